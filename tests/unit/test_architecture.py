"""The arrows between the rooms, and what the pure rooms may know."""

import ast
from pathlib import Path

from importlinter.cli import lint_imports

import ringmaster_dist

PACKAGE = Path(ringmaster_dist.__file__).parent


def test_the_import_arrows_hold():
    assert lint_imports(config_filename=str(PACKAGE.parent / "pyproject.toml"), no_cache=True) == 0


def test_only_transport_knows_torch_distributed():
    """Import Linter does not look inside torch, so this part is looked at here."""
    guilty = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            if any(name.startswith("torch.distributed") for name in names):
                guilty.append(str(path.relative_to(PACKAGE)))
    assert [name for name in guilty if not name.startswith("transport")] == []
