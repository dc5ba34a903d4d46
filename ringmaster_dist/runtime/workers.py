"""Supervises workers of one machine whose server is elsewhere: a worker that dies is started again, alone."""

from __future__ import annotations

import os
import time

from ringmaster_dist.runtime.signals import stop_signals
from ringmaster_dist.runtime.supervisor import Place, become, finish, leave, prepare_fork_server

_TICK_SECONDS = 0.05
_LAST_SECONDS = 2.0


def supervise_workers(argv: list[str], workers: int, restarts: int) -> int:
    """Until all have ended. Returns the worst exit code."""
    prepare_fork_server()
    places = [Place(f"worker-{index}", _work, argv, index, most_restarts=restarts) for index in range(workers)]
    try:
        with stop_signals() as asked:
            while not asked() and not all(place.has_ended for place in places):
                for place in places:
                    if not place.has_ended:
                        place.tend()
                time.sleep(_TICK_SECONDS)
            if asked():
                for place in places:
                    if place.process is not None:
                        place.process.terminate()
    finally:
        finish(places, _LAST_SECONDS)
    return max(place.last_code or 0 for place in places)


def _work(name: str, argv: list[str], index: int) -> None:
    """What each process does."""
    from ringmaster_dist.worker.__main__ import main as work

    become(name)
    os.environ["LOCAL_RANK"] = str(index)  # which GPU is its own
    leave(work(argv))
