"""Notices a run whose loss is not finite, or has risen far above where it began.

The objective of an evaluation counts. A problem that does not evaluate is judged by the smoothed loss of its gradients.
That loss is noisy, so it has to rise further, and over some gradients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

_RISE = 0.25  # of an evaluated objective, as a fraction of its first value
_LEAST_RISE, _MANY_TIMES = 0.1, 10.0  # a small value is noisy: it also has to rise by this, or this many times
_RISE_OF_TRAINING = 2.0  # of the smoothed loss of gradients, as a fraction of its first value
_LEAST_GRADIENTS, _FAR = 30, 1000.0  # before that many gradients, only a rise by this factor counts


class Divergence:
    """Takes the rows of measurements in turn and says whether the run diverges now. One thread uses it."""

    def __init__(self, objective: str) -> None:
        self.objective = objective
        self.value = math.nan  # the newest
        self.began_at: float | None = None
        self._evaluates = self._has_looked = self._stuck = False
        self._num_gradients = 0

    @property
    def diverged(self) -> bool:
        if self.is_hopeless:
            return True
        if self.began_at is None:
            return False
        rise, scale = self.value - self.began_at, abs(self.began_at)
        if self._evaluates:
            return rise > _RISE * scale and (rise > _LEAST_RISE or rise > _MANY_TIMES * scale > 0)
        return rise > (_RISE_OF_TRAINING if self._num_gradients >= _LEAST_GRADIENTS else _FAR) * scale

    @property
    def is_hopeless(self) -> bool:
        """Whether the objective is not finite, or no gradient is."""
        return self._stuck or (self._has_looked and not math.isfinite(self.value))

    def give_up(self) -> None:
        """Notes that no gradient is finite any more, whatever the objective is."""
        self._stuck = True

    def look(self, evaluation: Mapping[str, Any], train_loss: float | None = None, num_gradients: int = 0) -> bool:
        """Takes note of a row. Returns whether the divergence begins with this row, so that the caller can warn.

        ``train_loss`` is smoothed over ``num_gradients`` so far.
        """
        before, self._num_gradients = self.diverged, num_gradients
        if self.objective in evaluation:
            if not self._evaluates:
                self._evaluates, self.began_at = True, None
            self._note(evaluation[self.objective])
        elif not self._evaluates and train_loss is not None:
            self._note(train_loss)
        return self.diverged and not before

    def _note(self, value: float | None) -> None:
        self._has_looked, self.value = True, math.nan if value is None else float(value)
        if self.began_at is None and math.isfinite(self.value):
            self.began_at = self.value

    def words(self, eta: float) -> str:
        """A sentence that says what has happened and what to try."""
        now = f"{self.value:.4g}" if math.isfinite(self.value) else "not a finite number"
        began = "was never finite" if self.began_at is None else f"began at {self.began_at:.4g}"
        return (
            f"THE RUN DIVERGES: the {self.objective} is {now}, it {began}. "
            f"Try a smaller step, such as method.eta={eta / 4:.2g} (it is {eta:.2g}), or a warm-up, such as "
            "method.warmup=0.05; docs/choosing.md says more"
        )
