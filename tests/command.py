"""The command without a new process, for what does not depend on one. A new process needs two seconds of imports."""

import contextlib
import io
import subprocess

from ringmaster_dist.cli.main import main


def ringmaster(*words: str) -> subprocess.CompletedProcess:
    """Runs a command in this process. Returns its exit code and what it printed."""
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        code = main([str(word) for word in words])
    return subprocess.CompletedProcess(words, code, output.getvalue(), errors.getvalue())
