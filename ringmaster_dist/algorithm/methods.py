"""The six methods. Each answers two questions: is a gradient accepted, and what is applied when.

The server core owns the loop, the delay and the state; a method is asked ``threshold`` (accept iff the delay is
below it), ``refusal`` (may this worker contribute at all), and ``collect`` (the gradient to apply now, or
nothing yet). Methods that average hold the running sum.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import torch

from ringmaster_dist.algorithm.schedules import Schedule


class Method:
    """One gradient per update: `ringmaster`, `ringmaster_agnostic` and `asynchronous`, by their thresholds."""

    waits = False  # whether a contributor continues only from the next version

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule

    def threshold(self, version: int) -> float:
        """R_k: a gradient is accepted iff its delay is below this."""
        return self.schedule.threshold(version)

    def refusal(self, worker_id: int) -> str:
        """Why this worker may not contribute now; empty if it may."""
        return ""

    def collect(self, worker_id: int, gradient: torch.Tensor, live: Set[int]) -> torch.Tensor | None:
        """Takes an accepted gradient; gives what is to be applied now, or None to go on collecting."""
        return gradient

    def complete_without(self, live: Set[int]) -> torch.Tensor | None:
        """What is to be applied because the live workers have become fewer, or None."""
        return None

    def eta(self, version: int, delay: int, num_live: int) -> float:
        return self.schedule.eta(version)

    def alpha(self, version: int) -> float:
        return self.schedule.alpha(version)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert not state, f"unexpected method state {sorted(state)}"


class DelayAdaptive(Method):
    """Accepts everything and shrinks the step of the late: ``eta * n / max(n, delay)``."""

    def eta(self, version: int, delay: int, num_live: int) -> float:
        return self.schedule.eta(version) * num_live / max(num_live, delay, 1)


class _Averaging(Method):
    """Applies the mean of several fresh gradients (delay 0) of the current version."""

    def __init__(self, schedule: Schedule) -> None:
        super().__init__(schedule)
        self._sum: torch.Tensor | None = None
        self._count = 0

    def threshold(self, version: int) -> float:
        return 1

    def _add(self, gradient: torch.Tensor) -> None:
        if self._count == 0:
            self._sum = gradient.clone() if self._sum is None else self._sum.copy_(gradient)
        else:
            assert self._sum is not None
            self._sum.add_(gradient)
        self._count += 1

    def _take_mean(self) -> torch.Tensor:
        assert self._sum is not None
        mean = self._sum.div_(self._count)
        self._count = 0
        return mean

    def state_dict(self) -> dict[str, Any]:
        kept = self._sum is not None and self._count > 0
        return {"count": self._count, "sum": self._sum.clone() if kept and self._sum is not None else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._count = state["count"]
        self._sum = None if state["sum"] is None else state["sum"].clone()


class Rennala(_Averaging):
    """The mean of ``batch`` gradients of the current version, from whoever is quick."""

    def __init__(self, schedule: Schedule, batch: int) -> None:
        super().__init__(schedule)
        self.batch = batch

    def collect(self, worker_id: int, gradient: torch.Tensor, live: Set[int]) -> torch.Tensor | None:
        self._add(gradient)
        return self._take_mean() if self._count >= self.batch else None


class Synchronous(_Averaging):
    """One gradient from every live worker, then the mean; who has contributed waits for the rest."""

    waits = True

    def __init__(self, schedule: Schedule) -> None:
        super().__init__(schedule)
        self._contributors: set[int] = set()

    def refusal(self, worker_id: int) -> str:
        return "this worker has contributed to the round already" if worker_id in self._contributors else ""

    def collect(self, worker_id: int, gradient: torch.Tensor, live: Set[int]) -> torch.Tensor | None:
        self._add(gradient)
        self._contributors.add(worker_id)
        return self.complete_without(live)

    def complete_without(self, live: Set[int]) -> torch.Tensor | None:
        # The length is compared first: the set comparison is then made once a round, not once a push.
        if not live or len(self._contributors) < len(live) or not live <= self._contributors:
            return None
        self._contributors.clear()
        return self._take_mean()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "contributors": sorted(self._contributors)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._contributors = set(state["contributors"])
