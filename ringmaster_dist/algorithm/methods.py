"""The six methods.

The server core owns the loop, the delay, the state and the arithmetic. A method says whether a gradient is accepted
(``threshold``: if and only if its delay is below; ``refusal``: whether this worker may contribute at all), whether it
completes an update (``admit``, ``complete_without``: how many gradients are averaged), and how long the step is
(``eta``, ``alpha``). A method holds counts, and at most a few small arrays.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any, NamedTuple

import torch

from ringmaster_dist.algorithm.schedules import Schedule


def is_stale(delay: int, threshold: float) -> bool:
    """Whether a gradient, or a computation that is still running, is too old to be accepted."""
    return delay >= threshold


def delay_adapted(eta: float, delay: int, num_live: int) -> float:
    """The step of a gradient with this delay, ``eta * n / max(n, delay)``."""
    return eta * num_live / max(num_live, delay, 1)


class Change(NamedTuple):
    """A threshold that was chosen during the run, and why."""

    version: int  # the threshold is in force, or approached, from this update on
    threshold: int | None  # None if there is no limit
    reason: str


class Method:
    """One gradient per update: `ringmaster`, `ringmaster_agnostic` and `asynchronous`, by their thresholds."""

    waits = False  # whether a contributor continues only from the next version
    averages = False  # whether an update is the mean of several gradients

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule

    def threshold(self, version: int) -> float:
        """R_k. A gradient is accepted if and only if its delay is below R_k."""
        return self.schedule.threshold(version)

    def refusal(self, worker_id: int) -> str:
        """Why this worker may not contribute now, or an empty string if it may."""
        return ""

    def observe(self, worker_id: int, seconds: float) -> None:
        """Receives the compute time of a gradient, accepted or stale.

        A method may decide by these times and by accepted gradients only, so that a replay makes the same decisions.
        """

    def inspect(self, gradient: torch.Tensor, version: int) -> None:
        """Receives an accepted gradient, (size,) as it arrived, and the version at which it was computed.

        This is called with the verdict, so it must be quick. The update may be computed later.
        """

    def changes(self) -> Sequence[Change]:
        """The thresholds that the method has chosen since the last call."""
        return ()

    def admit(self, worker_id: int, live: Set[int]) -> int:
        """Counts an accepted gradient. Returns how many gradients the update averages if it is complete now, else 0."""
        return 1

    def complete_without(self, live: Set[int]) -> int:
        """The same after a worker has left."""
        return 0

    def eta(self, version: int, delay: int, num_live: int) -> float:
        return self.schedule.eta(version)

    def alpha(self, version: int) -> float:
        return self.schedule.alpha(version)

    def state_dict(self) -> dict[str, Any]:
        """The state as plain numbers and lists."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert not state, f"unexpected method state {sorted(state)}"


class DelayAdaptive(Method):
    """Accepts every gradient, with a smaller step for a late one."""

    def eta(self, version: int, delay: int, num_live: int) -> float:
        return delay_adapted(self.schedule.eta(version), delay, num_live)


class Rennala(Method):
    """An update is the mean of ``batch`` fresh gradients (delay 0), of any workers."""

    averages = True

    def __init__(self, schedule: Schedule, batch: int) -> None:
        super().__init__(schedule)
        self.batch = batch
        self._count = 0

    def threshold(self, version: int) -> float:
        return 1

    def admit(self, worker_id: int, live: Set[int]) -> int:
        self._count += 1
        if self._count < self.batch:
            return 0
        self._count = 0
        return self.batch

    def state_dict(self) -> dict[str, Any]:
        return {"count": self._count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._count = state["count"]


class Synchronous(Method):
    """An update is the mean of one fresh gradient of every live worker. A contributor waits for the others."""

    waits = averages = True

    def __init__(self, schedule: Schedule) -> None:
        super().__init__(schedule)
        self._contributors: set[int] = set()

    def threshold(self, version: int) -> float:
        return 1

    def refusal(self, worker_id: int) -> str:
        return "this worker has contributed to the round already" if worker_id in self._contributors else ""

    def admit(self, worker_id: int, live: Set[int]) -> int:
        self._contributors.add(worker_id)
        return self.complete_without(live)

    def complete_without(self, live: Set[int]) -> int:
        # The length is compared first, so that the sets are compared once per round and not once per push.
        if not live or len(self._contributors) < len(live) or not live <= self._contributors:
            return 0
        count = len(self._contributors)
        self._contributors.clear()
        return count

    def state_dict(self) -> dict[str, Any]:
        return {"contributors": sorted(self._contributors)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._contributors = set(state["contributors"])
