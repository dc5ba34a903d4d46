"""``python -m ringmaster_dist.worker server=HOST:PORT [key=value ...]``, also under torchrun. ``--help`` says more."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from ringmaster_dist.transport.process_settings import prepare_environment

prepare_environment()


from ringmaster_dist.config.errors import UserError  # noqa: E402
from ringmaster_dist.config.schema import ServerConfig  # noqa: E402
from ringmaster_dist.config.secret import given_token  # noqa: E402
from ringmaster_dist.logs import log_as_told  # noqa: E402
from ringmaster_dist.transport import AuthenticationFailed, Incompatible, Unreachable  # noqa: E402
from ringmaster_dist.transport.addresses import split  # noqa: E402
from ringmaster_dist.transport.client import Client  # noqa: E402
from ringmaster_dist.transport.process_settings import keep_memory  # noqa: E402
from ringmaster_dist.worker.job import Job, make_job  # noqa: E402
from ringmaster_dist.worker.loop import Failed, Lost, Refused, Worker  # noqa: E402

HELP = """python -m ringmaster_dist.worker server=HOST:PORT [key=value ...]

One worker of a run that is served at HOST:PORT, on any machine that can reach it. It waits for a server that is not
there yet, and for one that has gone; the configuration comes from the server. Under torchrun, one per process:

  torchrun --standalone --nproc-per-node=G -m ringmaster_dist.worker server=HOST:PORT

(which starts all G again when one dies; launch/worker.sh gives each an agent of its own)

  server            where the server is; <run.dir>/address on its machine has it. server=@FILE: what FILE says, read
                    at every attempt, for a server that may come back at another place
  token_file        the file with the run's token; else RINGMASTER_TOKEN_FILE names it, or RINGMASTER_TOKEN is it
  target            the problem.target this worker may import, where the run has one of its own (problem=python)
  tls               false: without encryption, for a server with server.tls=false (true)
  slot              whose place in the delay profile it keeps the pace of, where the run is paced (-1: that of its id)
  connect_seconds   it waits this long for a connection (10)
  call_seconds      and this long for an answer, then it connects anew and asks again (60)
  patience_seconds  it looks for a server that is away for this long, then gives up (180)

RINGMASTER_LOG=INFO says more. Exit code 0: the run is over. 1: the server is lost, or gradients cannot be computed
here. 2: a mistake, or the server refuses this worker; the line on stderr says why.
"""
_KEYS = ("server", "token_file", "target", "tls", "slot", "connect_seconds", "call_seconds", "patience_seconds")


def main(argv: list[str]) -> int:
    log_as_told()
    if "-h" in argv or "--help" in argv:
        print(HELP)
        return 0
    try:
        given = parse(argv)
        token = _token(given)
        seconds = {name: float(given.get(name, getattr(ServerConfig, name))) for name in _KEYS if "seconds" in name}
        slot = int(given.get("slot", -1))
        tls = _true_or_false("tls", given.get("tls", "true"))
    except (ValueError, UserError) as error:
        print(f"ringmaster worker: {error}", file=sys.stderr)
        return 2
    return work(given["server"], token, slot=slot, tls=tls, target=given.get("target", ""), **seconds)


def work(
    server: str | Callable[[], str], token: str, make: Callable[..., Job] = make_job, /, *, slot: int = -1,
    tls: bool = True, target: str = "", connect_seconds: float, call_seconds: float, patience_seconds: float,
) -> int:  # fmt: skip
    """Blocks until the run is over, and returns the exit code. ``server`` is an address, @FILE, or returns one."""
    keep_memory()

    where = ""

    def connect() -> Client:
        nonlocal where
        where = _where(server) if isinstance(server, str) else server()
        return Client(where, token=token, tls=tls, connect_seconds=connect_seconds, call_seconds=call_seconds)

    worker = Worker(connect, partial(make, target=target), token=token, slot=slot, patience_seconds=patience_seconds)
    try:
        worker.run()
    except Refused as error:
        print(f"ringmaster worker: the server at {where} refused: {error}", file=sys.stderr)
        return 2
    except UserError as error:
        print(f"ringmaster worker: the run at {where} cannot be joined from here: {error}", file=sys.stderr)
        return 2
    except AuthenticationFailed as error:
        print(f"ringmaster worker: {error}", file=sys.stderr)
        return 2
    except (Lost, Failed, Incompatible) as error:
        print(f"ringmaster worker: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # the server counts it out when its lease ends
        print("ringmaster worker: stopped", file=sys.stderr)
        return 130
    return 0


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


def _true_or_false(key: str, text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError(f"{key}={text}: write true or false")
    return text == "true"


def parse(argv: list[str]) -> dict[str, str]:
    given = {}
    for word in argv:
        key, equals, value = word.partition("=")
        if not equals or key not in _KEYS:
            raise ValueError(f"{word!r} is not understood: write key=value with {', '.join(_KEYS)}")
        given[key] = value
    server = given.get("server", "")
    if not server.startswith("@"):
        try:
            split(server)
        except ValueError as error:
            raise ValueError(f"server={server}: write server=HOST:PORT; <run.dir>/address has it ({error})") from error
    return given


def _token(given: dict[str, str]) -> str:
    token = given_token(given.get("token_file", ""))
    if not token:
        raise ValueError("no token: give token_file=<run.dir>/token or set RINGMASTER_TOKEN")
    return token


if __name__ == "__main__":
    # Without the interpreter's farewell: TensorPipe's threads may hang in it, and nothing is left to write.
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)
