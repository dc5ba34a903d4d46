"""How the ranks of one torchrun find the server that rank 0 has started: through torchrun's own store.

The store outlives the ranks when torchrun starts them again, so it also tells rank 0 which run it had begun.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_SERVER, _BEGUN = "ringmaster/server", "ringmaster/begun"


class Rendezvous:
    def __init__(self, timeout_seconds: float) -> None:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "False") == "True"
        is_master = not by_agent and os.environ["RANK"] == "0"
        timeout = timedelta(seconds=timeout_seconds)
        self._store = dist.TCPStore(host, port, is_master=is_master, timeout=timeout, wait_for_workers=False)

    def publish(self, facts: Mapping[str, Any]) -> None:
        """Rank 0 says what a worker needs to know."""
        self._store.set(_SERVER, json.dumps(facts))

    def find(self) -> dict[str, Any]:
        """What rank 0 has published last; waits for the first."""
        facts: dict[str, Any] = json.loads(self._store.get(_SERVER))
        return facts

    def begin(self, directory: str) -> None:
        self._store.set(_BEGUN, directory)

    def begun(self) -> str:
        """The directory of the run that this torchrun has begun; empty if it has not."""
        return self._store.get(_BEGUN).decode() if self._store.check([_BEGUN]) else ""
