"""``ringmaster doctor``."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from ringmaster_dist.cli.parser import Parser
from ringmaster_dist.cli.worker import TOKEN_HELP, server_address
from ringmaster_dist.config.secret import given_token

if TYPE_CHECKING:
    from ringmaster_dist.doctor import Finding

_MARKS = {True: "[green]ok[/green]     ", None: "[yellow]note[/yellow]   ", False: "[red]to do[/red]  "}


def doctor_options(parser: Parser) -> None:
    parser.setting("server=HOST:PORT", "look at this server too, as a worker would see it", server_address)
    parser.setting("token_file=FILE", TOKEN_HELP, str, "")
    parser.switch("--quick", help="leave out the small run")


def run_doctor(arguments: Namespace, overrides: list[str]) -> int:
    """ringmaster doctor [server=HOST:PORT] [token_file=FILE] [--quick]

    Looks at what commonly breaks a cluster. Each line says ok or what to do. On one machine alone it looks at versions,
    network names and interfaces, shared memory, disk, open files, clock, devices and their number types, and
    a small run of a server and two workers. With server= it looks at what a worker would see from here
    instead: name, port, token, versions, a call, clock skew. It does not join the run.

    The exit code is 0 if everything is ok, and 1 if something is not.
    """
    from ringmaster_dist.doctor.machine import machine_findings, small_run

    if not arguments.server:
        ok = _show("this machine", machine_findings(Path.cwd()))
        if not arguments.quick:
            ok &= _show("", [small_run()])
        return 0 if ok else 1
    token = given_token(arguments.token_file) or None

    from ringmaster_dist.doctor.server import server_findings
    from ringmaster_dist.runtime.processes import leave

    ok = _show("this machine", machine_findings(Path.cwd()))
    ok &= _show(f"the server at {arguments.server}", server_findings(arguments.server, token))
    return leave(0 if ok else 1)


def _show(title: str, findings: Iterable[Finding]) -> bool:
    """Prints each finding when it is made. Returns whether all are ok."""
    from ringmaster_dist.observe.closing import Stdout

    console, good = Stdout(), True
    if title:
        console.print(f"[bold]{title}[/bold]", highlight=False)
    for finding in findings:
        mark = _MARKS[finding.ok]
        console.print(f"  {mark}{finding.what:<12} ", end="", highlight=False)
        console.print(finding.text, highlight=False, markup=False, soft_wrap=True)
        good &= finding.ok is not False
    return good
