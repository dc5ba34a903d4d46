"""``method.threshold=auto``: the method chooses the threshold during the run, from the compute times of the workers.

The rule is the trade-off of the paper's bounds. By Theorem 1, delays below ``1/alpha`` cost nothing in iterations, so
that is the largest R. By the lemma that R updates take at most t(R), a threshold guarantees some pace. Once it
guarantees half of the best possible pace, a larger threshold mostly adds older gradients. So R is the smallest such
threshold, and at most ``1/alpha``.

Times come only from the pushes, in the order of their arrival. No clock is read, so a replay of the same arrivals
chooses the same thresholds. The time that has passed is the compute time of the busiest worker. The time of a worker is
the median of its last few. If a worker is silent although it had the chance to deliver (R updates took clearly longer
than its median), its speed has changed and its times are forgotten. A worker that is always interrupted before it
finishes is silent too. So at first, and from time to time while a worker is silent, R is at its largest for a while, to
listen.

From one update to the next R grows by at most 1, so a stale gradient stays stale. It may fall by any amount.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence, Set
from typing import Any

from ringmaster_dist.algorithm.methods import Change, Method
from ringmaster_dist.algorithm.schedules import Schedule
from ringmaster_dist.theory import sufficient_threshold

SLACK = 2.0  # a guaranteed time per update of this many times the best is good enough
_REMEMBERED = 5  # compute times per worker
_CLEARLY = 1.5  # "clearly longer" is this factor
_WORKERS_PER_UPDATE = 64  # a choice looks at all workers, so it is made less often if there are many
_LISTEN, _LISTEN_EVERY = 2, 20  # updates, in multiples of the largest threshold


class AutoThreshold(Method):
    """Ringmaster with a threshold that it chooses itself."""

    def __init__(self, schedule: Schedule) -> None:
        super().__init__(schedule)
        self._most = max(1, round(1.0 / schedule.alpha(0)))
        self._threshold = self._target = self._most
        self._updates = 0
        self._listen_until = _LISTEN * self._most
        self._clock = 0.0  # a lower bound of the seconds that have passed
        self._recent: deque[float] = deque([0.0], maxlen=self._most + 1)  # the clock at the last updates
        self._heard: dict[int, float] = {}  # the clock at the last push of each worker
        self._times: dict[int, deque[float]] = {}
        self._changes: list[Change] = []

    def threshold(self, version: int) -> float:
        return self._threshold

    def observe(self, worker_id: int, seconds: float) -> None:
        if not (math.isfinite(seconds) and seconds > 0):
            return
        self._clock = max(self._heard.get(worker_id, 0.0) + seconds, self._clock)
        self._heard[worker_id] = self._clock
        self._times.setdefault(worker_id, deque(maxlen=_REMEMBERED)).append(seconds)

    def admit(self, worker_id: int, live: Set[int]) -> int:
        self._updates += 1
        self._recent.append(self._clock)
        if self._updates % (1 + len(live) // _WORKERS_PER_UPDATE) == 0:
            self._choose(live)
        self._threshold = min(self._target, self._threshold + 1)
        return super().admit(worker_id, live)

    def changes(self) -> Sequence[Change]:
        changes, self._changes = self._changes, []
        return changes

    def _choose(self, live: Set[int]) -> None:
        self._forget_the_changed()
        times = [statistics.median(self._times[worker]) for worker in live if worker in self._times]
        silent = len(live) - len(times)
        if silent and self._updates >= self._listen_until + _LISTEN_EVERY * self._most:
            self._listen_until = self._updates + _LISTEN * self._most
        if not times or (silent and self._updates < self._listen_until):
            self._aim(self._most, f"listening for {silent} silent workers")
            return
        enough = sufficient_threshold(times, SLACK)
        bound = f"half the best pace needs {enough}"
        if enough > self._most:
            bound += f", the momentum allows {self._most}"
        self._aim(min(enough, self._most), f"{len(times)} workers, {min(times):.3g} to {max(times):.3g} s: {bound}")

    def _forget_the_changed(self) -> None:
        window = self._clock - self._recent[-min(self._threshold + 1, len(self._recent))]
        for worker, times in list(self._times.items()):
            had_the_chance = window > _CLEARLY * statistics.median(times)
            if had_the_chance and self._clock - self._heard[worker] > 2 * window:
                del self._times[worker]

    def _aim(self, target: int, reason: str) -> None:
        if target != self._target:
            self._target = target
            self._changes.append(Change(self._updates, target, reason))

    def state_dict(self) -> dict[str, Any]:
        return {
            "threshold": self._threshold,
            "target": self._target,
            "updates": self._updates,
            "listen_until": self._listen_until,
            "clock": self._clock,
            "recent": list(self._recent),
            "workers": [[w, heard, list(self._times.get(w, ()))] for w, heard in self._heard.items()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._threshold, self._target, self._clock = state["threshold"], state["target"], state["clock"]
        self._updates, self._listen_until = state["updates"], state["listen_until"]
        self._recent = deque(state["recent"], maxlen=self._most + 1)
        self._heard = {worker: heard for worker, heard, _ in state["workers"]}
        self._times = {w: deque(times, maxlen=_REMEMBERED) for w, _, times in state["workers"] if times}
