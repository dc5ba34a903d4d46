"""The import contract between the folders of the package."""

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import ringmaster_dist
from ringmaster_dist.runtime.processes import PRELOADED
from tests.syntax import parsed

PACKAGE = Path(ringmaster_dist.__file__).parent


def test_the_import_contract_holds():
    # This runs in a separate process, because it configures logging and other tests read the log.
    code = "from importlinter.cli import lint_imports; raise SystemExit(lint_imports(no_cache=True))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent)
    assert done.returncode == 0, done.stdout


def test_only_transport_imports_torchs_rpc():
    """Import Linter does not look inside torch, so this test does.

    Collective calls are for a worker's own ranks, and for the benches of alternatives.
    """
    users = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(parsed(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            if any(name.startswith("torch.distributed") for name in names):
                rpc = any(name.startswith("torch.distributed.rpc") for name in names)
                users.add((path.relative_to(PACKAGE).parts[0], "rpc" if rpc else "collective"))
    assert users == {("transport", "rpc"), ("worker", "collective"), ("bench", "collective")}


def test_the_fork_server_imports_what_exists():
    """It would be silent about a module that was renamed, and every process would start seconds later."""
    assert [name for name in PRELOADED if importlib.util.find_spec(name) is None] == []
