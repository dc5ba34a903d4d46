"""How the ranks of one torchrun find the server that rank 0 has started: through torchrun's own store."""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist

_KEY = "ringmaster/server"


def _store(timeout_seconds: float) -> dist.Store:
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "False") == "True"
    is_master = not by_agent and os.environ["RANK"] == "0"
    timeout = timedelta(seconds=timeout_seconds)
    store = dist.TCPStore(host, port, is_master=is_master, timeout=timeout, wait_for_workers=False)
    return dist.PrefixStore(f"attempt/{attempt}", store)


def publish(address: str, token: str) -> dist.Store:
    """Rank 0 says where it serves. Keep what is returned: without an agent it is the store itself."""
    store = _store(60.0)
    store.set(_KEY, f"{address} {token}")
    return store


def find(timeout_seconds: float) -> tuple[str, str]:
    """The server's address and token; waits until they are published."""
    address, token = _store(timeout_seconds).get(_KEY).decode().split(" ")
    return address, token
