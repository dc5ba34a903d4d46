"""Where the server's agent is: one question to the store at the server's port, with a limit that holds.

c10d's client reads its answers without a timeout: with a peer that accepts and stays silent (another program, a link
just cut) it would wait for as long as TCP does. So the question is asked in a thread that may be left behind.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist


class Found(NamedTuple):
    number: int  # how many have asked before
    address: bytes  # of the server's agent


def look_up(host: str, port: int, key: str, seconds: float) -> Found | None:
    """None: no answer in time, or none that makes sense."""
    found: list[Found] = []

    def ask() -> None:
        try:
            store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=seconds))
            found.append(Found(store.add("joined", 1), store.get(key)))
        except (OSError, RuntimeError):
            return

    thread = threading.Thread(target=ask, name="lookup", daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None
