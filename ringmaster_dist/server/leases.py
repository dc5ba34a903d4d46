"""How long each worker may be silent. Everything here happens under the lock of the service.

Any call of a worker renews its lease. A worker that computes longer than its lease keeps it by its long poll, which is
answered after a third of a lease and asked again.
"""

from __future__ import annotations

from collections.abc import Callable


class Leases:
    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self._seconds, self._clock = seconds, clock
        self._renewed: dict[int, float] = {}  # when each worker was last heard of

    def renew(self, worker: int) -> None:
        self._renewed[worker] = self._clock()

    def renew_all(self) -> None:
        self._renewed = dict.fromkeys(self._renewed, self._clock())

    def expired(self) -> set[int]:
        """Workers whose lease has run out, also those that have been counted out already."""
        oldest = self._clock() - self._seconds
        return {worker for worker, renewed in self._renewed.items() if renewed < oldest}

    @property
    def poll_again_before(self) -> float:
        """A poll that was asked before this time is answered, so that the worker calls again."""
        return self._clock() - self._seconds / 3
