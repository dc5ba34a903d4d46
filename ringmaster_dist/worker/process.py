"""The life of a worker's process, from the address of its server to an exit code."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ringmaster_dist import devices
from ringmaster_dist.addresses import split
from ringmaster_dist.config.errors import UserError
from ringmaster_dist.errors import printable
from ringmaster_dist.process_settings import keep_memory
from ringmaster_dist.protocol import Device
from ringmaster_dist.signals import Stopped
from ringmaster_dist.transport import AuthenticationFailed, Incompatible, Unreachable
from ringmaster_dist.transport.client import Client
from ringmaster_dist.worker.group import Leader, follow, group_of_torchrun
from ringmaster_dist.worker.job import Job, choice_of_devices, make_job
from ringmaster_dist.worker.link import Lost
from ringmaster_dist.worker.loop import Failed, Refused, Worker
from ringmaster_dist.worker.ranks import FIRST, RankLost
from ringmaster_dist.worker.talk import Talk


def work(
    server: str | Callable[[], str], token: str, make: Callable[..., Job] = make_job, /, *, slot: int = -1,
    tls: bool = True, insecure: bool = False, target: str = "", device: str = "", connect_seconds: float,
    call_seconds: float, patience_seconds: float, ranks: int = 1, talk: Talk | None = None,
) -> int:  # fmt: skip
    """Works until the run is over, and returns the exit code.

    ``target`` and ``device`` are those of `make_job`. ``ranks`` is the number of processes that are this worker. It
    tells ``talk`` what it does.
    ``server`` is HOST:PORT, or @FILE for a file with it, or a function that returns it. The file is read, and the
    function is called, at every attempt to connect, because a server that restarts may have another address.
    """
    keep_memory()

    where = server if isinstance(server, str) else ""

    def connect() -> Client:
        nonlocal where
        where = _where(server) if isinstance(server, str) else server()
        return Client(
            where, token=token, tls=tls, insecure=insecure, connect_seconds=connect_seconds, call_seconds=call_seconds
        )

    make = partial(make, target=target, device=device)
    try:
        described = tuple(Device.described(name, devices.title(name)) for name in choice_of_devices(device))
        worker = Worker(
            connect, make, token=token, slot=slot, devices=described, ranks=ranks, patience_seconds=patience_seconds,
            talk=talk,
        )  # fmt: skip
        if talk is not None:
            talk.waits(where)
        worker.run()
    except Refused as error:
        print(f"ringmaster worker: the server at {where} refused: {printable(error)}", file=sys.stderr)
        return 2
    except UserError as error:
        print(f"ringmaster worker: the run at {where} cannot be joined from here: {printable(error)}", file=sys.stderr)
        return 2
    except AuthenticationFailed as error:
        print(f"ringmaster worker: {printable(error)}", file=sys.stderr)
        return 2
    except (Lost, Failed, Incompatible) as error:
        print(f"ringmaster worker: {printable(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as error:
        print("ringmaster worker: stopped", file=sys.stderr)
        return error.exit_code if isinstance(error, Stopped) else 130
    return 0


def work_in_group(server: str, token: str, *, target: str, device: str, **arguments: Any) -> int:
    """Works as one rank of the group that torchrun has started, and returns the exit code, the same on all ranks."""
    try:
        ranks = group_of_torchrun()
    except RankLost as error:
        print(f"ringmaster worker: {error}", file=sys.stderr)
        return 1
    if ranks.rank != FIRST:
        keep_memory()
        return follow(ranks, partial(make_job, target=target, device=device))
    leader = Leader(ranks, make_job)
    code = work(server, token, leader.make_job, target=target, device=device, ranks=ranks.num, **arguments)
    leader.dismiss(code)
    return code


def _where(server: str) -> str:
    if not server.startswith("@"):
        return server
    try:
        text = Path(server[1:]).read_text().strip()
    except OSError as error:
        raise Unreachable(f"no server has written {server[1:]} ({error.strerror})") from error
    try:
        split(text)
    except ValueError as error:
        raise Unreachable(f"{server[1:]} has no HOST:PORT") from error
    return text
