"""``ringmaster doctor [server=HOST:PORT] [token_file=...]``."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from ringmaster_dist.config.errors import UserError
from ringmaster_dist.config.secret import given_token
from ringmaster_dist.transport.addresses import split

if TYPE_CHECKING:
    from ringmaster_dist.doctor import Finding

_HELP = """ringmaster doctor [server=HOST:PORT] [token_file=FILE] [--quick]

Looks at what commonly breaks a cluster; each line says ok or what to do. On one machine alone: versions, network names
and interfaces, shared memory, disk, open files, clock, devices with the types they compute in, and a small run of a
server and two workers. With server=, as a worker would see it from here: name, port, token, versions, a call, clock
skew. It does not join the run.

  token_file=FILE   the run's token, RUN_DIR/token (or RINGMASTER_TOKEN_FILE, RINGMASTER_TOKEN)
  --quick           without the small run

Exit code 0 if everything is ok, 1 if something is not.
"""


_MARKS = {True: "[green]ok[/green]     ", None: "[yellow]note[/yellow]   ", False: "[red]to do[/red]  "}


def main(argv: list[str]) -> int:
    if "-h" in argv or "--help" in argv:
        print(_HELP)
        return 0
    words = [word for word in argv if word != "--quick"]
    given = dict(word.split("=", 1) for word in words if "=" in word)
    if len(given) < len(words) or given.keys() - {"server", "token_file"}:
        raise UserError("ringmaster doctor takes server=HOST:PORT, token_file=FILE and --quick")

    from ringmaster_dist.doctor.machine import machine_findings, small_run

    if "server" not in given:
        ok = _show("this machine", machine_findings(Path.cwd()))
        if "--quick" not in argv:
            ok &= _show("", [small_run()])
        return 0 if ok else 1
    try:
        split(given["server"])
    except ValueError as error:
        raise UserError(
            f"server={given['server']}: write server=HOST:PORT; RUN_DIR/address has it ({error})"
        ) from error
    token = given_token(given.get("token_file", "")) or None

    from ringmaster_dist.doctor.server import server_findings

    ok = _show("this machine", machine_findings(Path.cwd()))
    ok &= _show(f"the server at {given['server']}", server_findings(given["server"], token))
    sys.stdout.flush()
    os._exit(0 if ok else 1)  # without the interpreter's farewell: TensorPipe's threads may hang in it


def _show(title: str, findings: Iterable[Finding]) -> bool:
    """Prints each as it is found; whether all are ok."""
    from rich.console import Console

    console, good = Console(file=sys.stdout), True
    if title:
        console.print(f"[bold]{title}[/bold]", highlight=False)
    for finding in findings:
        mark = _MARKS[finding.ok]
        console.print(f"  {mark}{finding.what:<12} ", end="", highlight=False)
        console.print(finding.text, highlight=False, markup=False, soft_wrap=True)
        good &= finding.ok is not False
    return good
