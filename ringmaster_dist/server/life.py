"""The phases of a run, and its clock. Everything here happens under the lock of the service.

    GATHERING ── begin ──► RUNNING ── end ──► ENDING ── announce_end ──► OVER
        └──────────────── end ───────────────────┘

GATHERING  workers that join wait for the others, and the clock does not run
RUNNING    gradients get verdicts
ENDING     there are no more verdicts; the updates that were decided are computed, and a last checkpoint is written
OVER       the answer to every call says that the run is over
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum


class Phase(IntEnum):
    GATHERING = 0
    RUNNING = 1
    ENDING = 2
    OVER = 3


class Life:
    """The phase only moves forward. The clock runs from `begin` to `stop_clock`, over all terms of the server."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.phase = Phase.GATHERING
        self._clock = clock
        self._earlier_seconds = 0.0  # in earlier terms
        self._began: float | None = None
        self._stopped: float | None = None

    @property
    def has_begun(self) -> bool:
        """Whether the clock has run in this term. A run may end without that."""
        return self._began is not None

    @property
    def is_ending(self) -> bool:
        """ENDING or OVER: there are no more verdicts."""
        return self.phase >= Phase.ENDING

    @property
    def is_over(self) -> bool:
        return self.phase is Phase.OVER

    @property
    def seconds(self) -> float:
        if self._began is None:
            return self._earlier_seconds
        return self._earlier_seconds + (self._clock() if self._stopped is None else self._stopped) - self._began

    def resume(self, earlier_seconds: float, *, ended: bool) -> None:
        """Continues the clock of an earlier term. A run that had ended does not run again."""
        self._earlier_seconds = earlier_seconds
        if not ended:
            self.begin()

    def begin(self) -> None:
        """Does nothing if the clock runs already, or if the run is ending."""
        if self.phase is Phase.GATHERING:
            self._began = self._clock()
            self.phase = Phase.RUNNING

    def end(self) -> None:
        self.phase = max(self.phase, Phase.ENDING)

    def stop_clock(self) -> None:
        """Stops the clock, before the last checkpoint stores the seconds."""
        assert self.phase is Phase.ENDING
        self._stopped = self._clock()

    def announce_end(self) -> None:
        assert self.phase is Phase.ENDING
        self.phase = Phase.OVER
