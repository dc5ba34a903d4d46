"""When which fault strikes whom. A seed gives the same schedule every time."""

from __future__ import annotations

import random
from typing import NamedTuple

WORKER_KINDS = ("kill", "stop", "disconnect", "nan")
KINDS = (*WORKER_KINDS, "restart")
_STOP_SECONDS = (0.5, 6.0)  # some end within the lease, some after it
_QUIET_SHARE = 0.05  # at the beginning and at the end, so that every fault has its effect within the time


class Fault(NamedTuple):
    at_seconds: float
    kind: str
    slot: int  # of the worker; -1: the server
    lasting_seconds: float = 0.0


def schedule(seed: int, seconds: float, num_workers: int, num_faults: int, num_restarts: int) -> list[Fault]:
    """In order of time. Every kind of worker fault comes equally often, to within one; restarts are spread evenly."""
    dice = random.Random(seed)
    first, last = _QUIET_SHARE * seconds, (1 - _QUIET_SHARE) * seconds
    kinds = [WORKER_KINDS[index % len(WORKER_KINDS)] for index in range(num_faults)]
    dice.shuffle(kinds)
    faults = [
        Fault(
            dice.uniform(first, last),
            kind,
            dice.randrange(num_workers),
            min(dice.uniform(*_STOP_SECONDS), seconds / 10) if kind == "stop" else 0.0,
        )
        for kind in kinds
    ]
    faults += [
        Fault(first + (last - first) * (index + dice.random()) / num_restarts, "restart", -1)
        for index in range(num_restarts)
    ]
    return sorted(faults)
