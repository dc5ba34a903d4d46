"""How the ranks of one torchrun find the server that rank 0 has started: through torchrun's own store."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

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


def publish(facts: Mapping[str, Any]) -> dist.Store:
    """Rank 0 says what a worker needs to know. Keep what is returned: without an agent it is the store itself."""
    store = _store(60.0)
    store.set(_KEY, json.dumps(facts))
    return store


def find(timeout_seconds: float) -> dict[str, Any]:
    """What rank 0 has published; waits for it."""
    facts: dict[str, Any] = json.loads(_store(timeout_seconds).get(_KEY))
    return facts
