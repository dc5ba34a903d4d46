"""``python -m ringmaster_dist.worker server=HOST:PORT [token_file=...] [slot=N]``, also under torchrun.

The configuration comes from the server. The token is looked for in this order: ``token_file=``, the variable
RINGMASTER_TOKEN. Exit code 0 when the run is over, 2 for a mistake or when it is not wanted, 1 when the server is lost
or the gradient cannot be computed.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from ringmaster_dist.transport.quiet import quiet_environment

quiet_environment()


from ringmaster_dist.transport.memory import keep_memory  # noqa: E402
from ringmaster_dist.transport.star import Client, Unreachable  # noqa: E402
from ringmaster_dist.worker.job import make_job  # noqa: E402
from ringmaster_dist.worker.loop import Failed, Lost, Refused, Worker  # noqa: E402

_KEYS = ("server", "token_file", "slot", "connect_seconds", "call_seconds", "patience_seconds")


def main(argv: list[str]) -> int:
    logging.basicConfig(
        level=os.environ.get("RINGMASTER_LOG", "WARNING"), format="%(asctime)s %(name)s %(message)s", stream=sys.stderr
    )
    try:
        given = _parse(argv)
        token = _token(given)
        seconds = {name: float(given.get(name, default)) for name, default in
                   (("connect_seconds", 10), ("call_seconds", 60), ("patience_seconds", 60))}  # fmt: skip
        slot = int(given.get("slot", -1))
    except (ValueError, OSError) as error:
        print(f"ringmaster worker: {error}", file=sys.stderr)
        return 2
    return work(given["server"], token, slot=slot, **seconds)


def work(
    server: str, token: str, *, slot: int = -1, connect_seconds: float = 10.0, call_seconds: float = 60.0,
    patience_seconds: float = 60.0,
) -> int:  # fmt: skip
    keep_memory()

    def connect() -> Client:
        return Client(server, connect_seconds=connect_seconds, call_seconds=call_seconds)

    worker = Worker(connect, Unreachable, make_job, token=token, slot=slot, patience_seconds=patience_seconds)
    try:
        worker.run()
    except Refused as error:
        print(f"ringmaster worker: the server at {server} refused: {error}", file=sys.stderr)
        return 2
    except (Lost, Failed) as error:
        print(f"ringmaster worker: {error}", file=sys.stderr)
        return 1
    return 0


def _parse(argv: list[str]) -> dict[str, str]:
    given = {}
    for word in argv:
        key, equals, value = word.partition("=")
        if not equals or key not in _KEYS:
            raise ValueError(f"{word!r} is not understood: write key=value with {', '.join(_KEYS)}")
        given[key] = value
    host, _, port = given.get("server", "").rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"server={given.get('server', '')}: write server=HOST:PORT; <run.dir>/address has it")
    return given


def _token(given: dict[str, str]) -> str:
    if "token_file" in given:
        return Path(given["token_file"]).read_text().strip()
    token = os.environ.get("RINGMASTER_TOKEN", "")
    if not token:
        raise ValueError("no token: give token_file=<run.dir>/token or set RINGMASTER_TOKEN")
    return token


if __name__ == "__main__":
    # Without the interpreter's farewell: TensorPipe's threads may hang in it, and nothing is left to write.
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)
