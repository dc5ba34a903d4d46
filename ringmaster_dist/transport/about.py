"""What a server says of itself in its store, for who wants to know before joining: versions, clock, token's digest.

The token is a long random number: its digest tells whether somebody has the same one, and nothing else.
"""

from __future__ import annotations

import errno
import hashlib
import json
import platform
import socket
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ringmaster_dist import __version__
from ringmaster_dist.protocol import PROTOCOL_VERSION

_ABOUT, _CLOCK = "about", "clock"
BEAT_SECONDS = 1.0  # between two tellings of the time
_SPEAKS_FIRST_SECONDS = 0.3


def here() -> dict[str, Any]:
    """The versions of this process."""
    return {
        "program": __version__,
        "protocol": PROTOCOL_VERSION,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def digest(token: str) -> str:
    return hashlib.sha256(f"ringmaster token {token}".encode()).hexdigest()


def tell(store: dist.Store, token: str) -> None:
    store.set(_ABOUT, json.dumps({**here(), "token": digest(token)}))


def tell_time(store: dist.Store) -> None:
    store.set(_CLOCK, repr(time.time()))


class Reader:
    """Reads a server's store.

    Raises OSError if nobody listens there, or nobody answers in time, and RuntimeError if it is not a store.
    """

    def __init__(self, host: str, port: int, seconds: float) -> None:
        with socket.create_connection((host, port), timeout=seconds) as stream:
            stream.settimeout(_SPEAKS_FIRST_SECONDS)
            if not _is_silent(stream):
                raise RuntimeError("it hangs up, or speaks first: it is not a store")
        made: list[dist.Store | Exception] = []

        def connect() -> None:
            try:
                store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=seconds))
                store.check([_ABOUT])
                made.append(store)
            except (OSError, RuntimeError) as error:
                made.append(error)

        # In a thread: c10d reads the first answer without a timeout.
        thread = threading.Thread(target=connect, name="reader", daemon=True)
        thread.start()
        thread.join(seconds + 2.0)  # what does not hang has its own timeout
        if not made:
            raise OSError(errno.ETIMEDOUT, "it accepts connections but says nothing")
        if isinstance(made[0], Exception):
            raise made[0]
        self._store = made[0]

    def about(self) -> dict[str, Any] | None:
        """None: it is not a server of this system, or one that does not tell."""
        return json.loads(self._store.get(_ABOUT)) if self._store.check([_ABOUT]) else None

    def rpc_address(self) -> str:
        """Where its agent listens, such as uv://10.0.0.1:1234; empty if it does not say."""
        key = "server/addrs/server"
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def clock_skew_seconds(self) -> float | None:
        """This clock less the server's, to a few hundredths. None: it does not tell the time any more."""
        if not self._store.check([_CLOCK]):
            return None
        before, deadline = self._store.get(_CLOCK), time.monotonic() + 3 * BEAT_SECONDS
        while time.monotonic() < deadline:
            told = self._store.get(_CLOCK)
            if told != before:
                return time.time() - float(told)
            time.sleep(0.01)
        return None


def _is_silent(stream: socket.socket) -> bool:
    """Whether it waits to be asked, as a store does."""
    try:
        stream.recv(1)
    except TimeoutError:
        return True
    except ConnectionError:
        return False
    return False
