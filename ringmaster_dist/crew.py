"""Threads that share the work of one update.

The threads of a torch operation wait for each other at its end, and an update has hundreds of operations. The threads
of a crew take whole tasks instead, with one torch thread each, so they wait for each other once per update.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait

import torch

_START_SECONDS = 60.0  # a thread that cannot be started ends the wait for it


class Crew:
    """A fixed number of threads. They start at the first call of `run`, and end with the object."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._threads: ThreadPoolExecutor | None = None

    def run(self, work: Callable[[int], None]) -> None:
        """Calls ``work`` with the numbers 0 to size - 1 in these threads. Returns when all calls have returned.

        Raises what a call has raised.
        """
        if self._threads is None:
            self._threads = self._started()
        calls = [self._threads.submit(work, index) for index in range(self.size)]
        wait(calls)  # also if one has failed, because the others still use the memory
        for call in calls:
            call.result()

    def _started(self) -> ThreadPoolExecutor:
        usual, all_there = torch.get_num_threads(), threading.Barrier(self.size, timeout=_START_SECONDS)
        threads = ThreadPoolExecutor(self.size, "crew", initializer=_one_torch_thread)
        for call in [threads.submit(all_there.wait) for _ in range(self.size)]:
            call.result()
        torch.set_num_threads(usual)  # torch gives the last number that any thread has set to threads that are new
        return threads


def _one_torch_thread() -> None:
    torch.get_num_threads()  # a thread's first question sets its number, and would do so after the next line
    torch.set_num_threads(1)
