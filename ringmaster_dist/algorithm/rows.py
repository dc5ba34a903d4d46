"""``cluster.batch=auto``: each worker gets a number of rows per gradient, by its measured seconds per row.

All gradients should take about as long as that of the quickest worker, which takes the usual number of rows. Then the
delays are about equal, and nearly every gradient arrives below the threshold. A worker whose speed is not known takes
the least number of rows. If the slowest worker would still be late with the least number of rows, the quick ones take
more than usual, up to the most.

Speeds come only from the pushes, in the order of their arrival. No clock is read, so a replay of the same arrivals
assigns the same rows. The seconds per row of a worker are the median of its last few. All are assigned again if the
seconds of a worker differ clearly from those of the last assignment. In between, a worker gets other rows only if its
own are clearly wrong. So rows do not follow the jitter. A gradient is taken to cost nothing apart from its rows. If it
costs more, rows change step by step, until a gradient takes as long as wanted.

A worker may be, or become, so slow that all its work is interrupted. Then no push tells its speed. So a worker that is
silent for clearly longer than expected is taken to be half as quick, and again a few times, until a push of it arrives.
The time that has passed is the compute time of the busiest worker.

A gradient of r rows counts as ``r / usual`` of an update (`weighted`), so every row has the same weight.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence, Set
from typing import Any, NamedTuple

_REMEMBERED = 5  # seconds per row of each worker
_CLEARLY = 1.25  # "differ clearly" is this factor
_CLEARLY_WRONG = 0.65, 0.15  # rows are, if they are wrong by more than this number and this fraction
_SILENT = 3.0  # "clearly longer than expected" is this factor
_MOST_GUESSES = 6  # in a row: a worker is not taken to be slower than it was by more than 2 to this power
_WORKERS_PER_ARRIVAL = 64  # a look for silent workers concerns all of them, so it is rarer if there are many
_MARGIN = 0.9  # delays should be below this fraction of the threshold
_NEARLY_LEAST = 1.1  # if no assignment keeps that, a delay within this factor of the least one is good enough


class RowsChange(NamedTuple):
    """A number of rows that a worker was given during the run, and why."""

    version: int  # of the server then
    worker: int
    rows: int
    reason: str


class _Worker:
    """What is known of a worker's speed."""

    __slots__ = ("accepted_rows", "gap", "guesses", "heard", "is_known", "rows", "seconds", "times")

    def __init__(self, rows: int, clock: float) -> None:
        self.rows = rows  # assigned
        self.seconds: float | None = None  # per row, as the last assignment has used it
        self.times: deque[float] = deque(maxlen=_REMEMBERED)  # seconds per row
        self.is_known = False  # whether a push of it has ever arrived
        self.guesses = 0  # how often it was found silent since its last push
        self.heard = clock  # when its last push arrived, or it was last found silent
        self.gap = 0.0  # between its last two pushes
        self.accepted_rows = 0


def weighted(eta: float, alpha: float, weight: float) -> tuple[float, float]:
    """The step and the momentum weight of a gradient that counts as ``weight`` updates.

    With weight 2 the momentum moves as far as in two updates with the same gradient, and never beyond it.
    """
    return (eta, alpha) if weight == 1.0 else (eta * weight, 1.0 - (1.0 - alpha) ** weight)


class RowsBySpeed:
    """Assigns rows to the workers of a run. It is a part of the server core, and no thread enters it but the core's."""

    def __init__(self, usual: int, least: int, most: int) -> None:
        assert 1 <= least <= usual <= most, (least, usual, most)
        self.usual, self.least, self.most = usual, least, most
        self._clock = 0.0  # a lower bound of the seconds that have passed
        self._workers: dict[int, _Worker] = {}
        self._wanted = 0.0  # the seconds that a gradient should take; 0 before the first assignment
        self._live: frozenset[int] = frozenset()  # the members at the last arrival
        self._arrivals = 0
        self._changes: list[RowsChange] = []

    def rows_of(self, worker_id: int) -> int:
        """The rows that this worker's next gradient takes."""
        worker = self._workers.get(worker_id)
        return self.least if worker is None else worker.rows

    def accepted_rows(self, worker_id: int) -> int:
        """The rows of all gradients of this worker that were accepted."""
        worker = self._workers.get(worker_id)
        return 0 if worker is None else worker.accepted_rows

    def weight(self, rows: int) -> float:
        """How much of an update a gradient of this many rows counts."""
        return rows / self.usual

    def refusal(self, rows: int) -> str:
        """Why no worker of this run can have been given this many rows. Empty if it can."""
        if self.least <= rows <= self.most:
            return ""
        return f"it says that it has {rows} rows; a gradient of this run has {self.least} to {self.most}"

    def observe(
        self, worker_id: int, rows: int, seconds: float, live: Set[int], *, version: int, threshold: float,
        accepted: bool,
    ) -> None:  # fmt: skip
        """Receives the compute time of a gradient, and assigns other rows if speeds or members have changed."""
        changed = live != self._live
        if changed:
            for newcomer in sorted(live - self._live):
                self._workers.setdefault(newcomer, _Worker(self.least, self._clock)).heard = self._clock
            self._live = frozenset(live)
        worker = self._workers[worker_id]
        worker.accepted_rows += rows if accepted else 0
        if math.isfinite(seconds) and seconds > 0:
            self._clock = max(worker.heard + seconds, self._clock)
            worker.gap, worker.heard = self._clock - worker.heard, self._clock
            if worker.guesses:
                worker.times.clear()
            worker.is_known, worker.guesses = True, 0
            worker.times.append(seconds / rows)
            changed |= self._has_changed(worker)
        self._arrivals += 1
        silent: dict[int, float] = {}
        if self._arrivals % (1 + len(live) // _WORKERS_PER_ARRIVAL) == 0:
            silent = self._find_silent()
        if changed or silent:
            self._assign(version, threshold, silent)
        elif worker.times:
            self._correct(version, worker_id)

    def changes(self) -> Sequence[RowsChange]:
        """The rows that were assigned since the last call."""
        changes, self._changes = self._changes, []
        return changes

    @staticmethod
    def _has_changed(worker: _Worker) -> bool:
        now = statistics.median(worker.times)
        if worker.seconds is not None and 1 / _CLEARLY < now / worker.seconds < _CLEARLY:
            return False
        worker.seconds = now
        return True

    def _find_silent(self) -> dict[int, float]:
        """Guesses the speed of workers that should have been heard by now. Returns how long each was silent."""
        silent = {}
        quickest = self._quickest()
        for worker_id in sorted(self._live):
            worker = self._workers[worker_id]
            expected, passed = worker.seconds or quickest, self._clock - worker.heard
            if worker.guesses < _MOST_GUESSES and passed > _SILENT * max(worker.rows * expected, worker.gap):
                worker.seconds, worker.heard = 2 * expected, self._clock
                worker.guesses += 1
                silent[worker_id] = passed
        return silent

    def _quickest(self) -> float:
        """The least seconds per row among the members; infinity if nothing is known yet."""
        return min((self._workers[w].seconds or math.inf for w in self._live), default=math.inf)

    def _assign(self, version: int, threshold: float, silent: dict[int, float]) -> None:
        quickest = self._quickest()
        if quickest == math.inf:
            return
        base = self._rows_of_quickest(quickest, threshold)
        self._wanted = base * quickest
        for worker_id in sorted(self._live):
            worker = self._workers[worker_id]
            if not worker.is_known or worker.seconds is None:
                continue
            reason = f"{worker.seconds:.3g} s per row; the quickest worker takes {quickest:.3g} s, and {base} rows"
            if worker_id in silent:
                reason = f"silent for {silent[worker_id]:.3g} s, so it is taken to be half as quick"
            self._give(version, worker_id, self._rows_in(self._wanted, worker.seconds), reason)

    def _correct(self, version: int, worker_id: int) -> None:
        """Gives other rows to a worker whose gradients clearly do not take as long as wanted."""
        worker = self._workers[worker_id]
        seconds, (count, fraction) = statistics.median(worker.times), _CLEARLY_WRONG
        if abs(self._wanted / seconds - worker.rows) > max(count, fraction * worker.rows):
            worker.seconds = seconds
            reason = f"{seconds:.3g} s per row; a gradient should take {self._wanted:.3g} s"
            self._give(version, worker_id, self._rows_in(self._wanted, seconds), reason)

    def _give(self, version: int, worker_id: int, rows: int, reason: str) -> None:
        if rows != self._workers[worker_id].rows:
            self._workers[worker_id].rows = rows
            self._changes.append(RowsChange(version, worker_id, rows, reason))

    def _rows_in(self, wanted_seconds: float, seconds_per_row: float) -> int:
        return min(self.most, max(self.least, round(wanted_seconds / seconds_per_row)))

    def _rows_of_quickest(self, quickest: float, threshold: float) -> int:
        """The smallest number from the usual one on with which the slowest worker is not late."""
        if self.most == self.usual or threshold == math.inf:
            return self.usual
        speeds = [self._workers[w].seconds for w in sorted(self._live)]
        rows, delays = self.usual, {}
        while rows <= self.most:
            times = [s * self._rows_in(rows * quickest, s) for s in speeds if s is not None]  # seconds of a gradient
            delays[rows] = max(times) * sum(1.0 / seconds for seconds in times) - 1.0
            if delays[rows] <= _MARGIN * threshold:
                return rows
            rows += max(1, rows // 16)  # a finer choice would make no difference
        least = min(delays.values())
        return next(rows for rows, delay in delays.items() if delay <= _NEARLY_LEAST * least)

    def state_dict(self) -> dict[str, Any]:
        """The state as plain numbers and lists, without the changes that were not asked for yet."""
        return {
            "clock": self._clock,
            "wanted": self._wanted,
            "arrivals": self._arrivals,
            "live": sorted(self._live),
            "workers": [
                [worker_id, w.rows, w.seconds, list(w.times), w.is_known, w.guesses, w.heard, w.gap, w.accepted_rows]
                for worker_id, w in self._workers.items()
            ],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._clock, self._arrivals, self._live = state["clock"], state["arrivals"], frozenset(state["live"])
        self._wanted, self._workers, self._changes = state["wanted"], {}, []
        for worker_id, rows, seconds, times, is_known, guesses, heard, gap, accepted_rows in state["workers"]:
            worker = self._workers[worker_id] = _Worker(rows, heard)
            worker.seconds, worker.is_known, worker.guesses = seconds, is_known, guesses
            worker.gap, worker.accepted_rows = gap, accepted_rows
            worker.times.extend(times)
