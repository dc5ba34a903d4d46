"""``method.threshold=auto``: the method finds out during the run which gradients are too stale.

Two stochastic gradients of neighbouring versions differ, mostly because of their noise. Two gradients whose versions
are further apart differ more, because the iterate has moved between them. A gradient is too stale if it differs clearly
more from a fresh one than two fresh ones differ from each other. While noise dominates, as in language models,
gradients of any age help, and R has no limit. Where gradients have little noise, averaging is useless, and R is small.

The method measures this with sketches of the accepted gradients. It needs the version at which a gradient was computed,
but not that the gradient was late. So it knows the effect of delays that no worker has. A worker whose gradients are
too stale is accepted again as soon as gradients of that age help again. Differences are averaged by the octave of the
distance in versions: 0 and 1 (neighbours), 2 and 3, 4 to 7, and so on. The first octave with too much difference ends
the delays that are accepted.

Near a minimum this is not enough. There an iterate with late gradients runs past the minimum and back, for ever, and
noise hides how gradients differ. But then gradients half an oscillation apart point against each other. While some
octave does so beyond doubt, only delays at which gradients agree almost as well as neighbours are accepted.

The step of a gradient is ``eta / sqrt(1 + delay)``, because the eta of Theorem 1 falls with the square root of R.

R falls as soon as it has to, and rises slowly. After a pause without a reason against it, R may double. If R has to
fall after such a rise, the next pauses are twice as long. Otherwise R would rise near a minimum, where noise hides how
gradients differ, and the iterate would oscillate again and again.

Only accepted gradients and their versions count, so a replay of the same arrivals chooses the same thresholds. From one
update to the next R grows by at most 1, so a stale gradient stays stale. It may fall by any amount.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ringmaster_dist.algorithm.layout import Layout
from ringmaster_dist.algorithm.methods import Change, Method
from ringmaster_dist.algorithm.schedules import Schedule
from ringmaster_dist.algorithm.sketch import Sketch, Sketcher, difference

TOO_DIFFERENT = 1.5  # times the difference of neighbours
AGAINST = 0.15  # gradients point against each other if the mean of their cosines is below the negative of this
ALMOST = 0.9  # of the cosine of neighbours, which an oscillating iterate needs
_LEAST_DIFFERENCE = 1e-4  # neighbours that differ by less are taken to differ by this much
_OCTAVES = 14  # distances of up to 2**14 - 1 versions are measured
_MEMORY = 100  # a mean difference is over about this many gradients
_DOUBT = 3.0  # standard errors by which the cosine of gradients against each other has to be below zero
_CHOOSE_EVERY = 10  # updates
_LEAST_WEIGHT = 0.1  # of a mean, before it counts: about 10 gradients
_FIRST_PAUSE = 20  # updates before a threshold that has fallen may rise


class _Kept(NamedTuple):
    """A gradient that later ones are compared with."""

    number: int  # of the gradient among the accepted ones
    version: int  # at which it was computed
    sketch: Sketch


class _Average:
    """The mean of about the last `_MEMORY` numbers, in which older ones weigh less, and its standard error."""

    __slots__ = ("square", "total", "weight", "weight_square")

    def __init__(self) -> None:
        self.total = self.square = 0.0  # of the numbers and of their squares, times their weights
        self.weight = self.weight_square = 0.0  # the sum of the weights, and of their squares

    def add(self, number: float) -> None:
        self.total += (number - self.total) / _MEMORY
        self.square += (number * number - self.square) / _MEMORY
        self.weight += (1.0 - self.weight) / _MEMORY
        self.weight_square = (1.0 - 1.0 / _MEMORY) ** 2 * self.weight_square + 1.0 / _MEMORY**2

    @property
    def mean(self) -> float:
        """NaN before about ten numbers."""
        return self.total / self.weight if self.weight >= _LEAST_WEIGHT else math.nan

    @property
    def error(self) -> float:
        """Of the mean, if there is one."""
        variance = max(0.0, self.square / self.weight - (self.total / self.weight) ** 2)
        return math.sqrt(variance * self.weight_square) / self.weight

    def state(self) -> list[float]:
        return [self.total, self.square, self.weight, self.weight_square]

    @classmethod
    def of_state(cls, state: Sequence[float]) -> _Average:
        average = cls()
        average.total, average.square, average.weight, average.weight_square = state
        return average


class AutoThreshold(Method):
    """Ringmaster with a threshold that it chooses itself.

    Without a layout it sees no gradients. Then R has no limit.
    """

    def __init__(self, schedule: Schedule, layout: Layout | None = None, seed: int = 0) -> None:
        super().__init__(schedule)
        self._sketcher = None if layout is None else Sketcher(layout, seed)
        self._threshold = math.inf
        self._target = math.inf  # the threshold falls to it at once, and rises to it by 1 per update
        self._pause = _FIRST_PAUSE  # updates before the target may rise
        self._may_rise_at = 0  # this many updates
        self._has_risen = False  # whether the last change of the target was a rise
        self._updates = 0
        self._kept: list[_Kept] = []  # the newest last; the older, the fewer
        self._differences = [_Average() for _ in range(_OCTAVES)]
        self._changes: list[Change] = []

    def threshold(self, version: int) -> float:
        return self._threshold

    def eta(self, version: int, delay: int, num_live: int) -> float:
        return self.schedule.eta(version) / math.sqrt(1 + delay)

    def inspect(self, gradient: torch.Tensor, version: int) -> None:
        self._updates += 1
        if self._sketcher is None:
            return
        sketch = self._sketcher.sketch(gradient)
        self._measure(sketch, version)
        self._keep(_Kept(self._updates, version, sketch))
        if self._updates % _CHOOSE_EVERY == 0:
            self._choose()
        self._threshold = min(self._target, self._threshold + 1)

    def changes(self) -> Sequence[Change]:
        changes, self._changes = self._changes, []
        return changes

    def _measure(self, sketch: Sketch, version: int) -> None:
        """Compares a gradient with the kept ones. All that are in one octave count as one comparison."""
        by_octave: dict[int, list[float]] = {}
        for kept in self._kept:
            octave = max(1, abs(version - kept.version)).bit_length() - 1
            if octave < _OCTAVES:
                by_octave.setdefault(octave, []).append(difference(sketch, kept.sketch))
        for octave, found in by_octave.items():
            self._differences[octave].add(sum(found) / len(found))

    def _keep(self, new: _Kept) -> None:
        """Adds a gradient. Of those that are 2**n to 2**(n + 1) - 1 gradients old, two are kept."""
        self._kept = [kept for kept in self._kept if _is_kept(kept.number, new.number - kept.number)]
        self._kept.append(new)

    def _choose(self) -> None:
        means = [average.mean for average in self._differences]
        neighbours = max(means[0], _LEAST_DIFFERENCE) if not math.isnan(means[0]) else math.inf
        against = next((octave for octave, mean in enumerate(means) if self._is_against(octave, mean)), None)
        for octave in range(1, _OCTAVES):
            ratio = means[octave] / neighbours
            apart = f"gradients that are {_versions(octave)} versions apart"
            if ratio > TOO_DIFFERENT:
                self._aim(2**octave - 1, f"{apart} differ {ratio:.2f} times as much as neighbours, and "
                                         f"{TOO_DIFFERENT} times is allowed")  # fmt: skip
                return
            if against is not None and 1 - means[octave] < ALMOST * (1 - means[0]):
                cosine = 1 - means[against]
                self._aim(2**octave - 1, f"the iterate oscillates: the cosine of gradients {_versions(against)} "
                                         f"versions apart is {cosine:.2f}. So {apart} must agree at least {ALMOST} "
                                         "times as well as neighbours, and they do not")  # fmt: skip
                return
        self._aim(math.inf, f"gradients differ at most {TOO_DIFFERENT} times as much as neighbours at any distance")

    def _is_against(self, octave: int, difference: float) -> bool:
        """Whether gradients that are so far apart point against each other, beyond doubt."""
        return difference > 1 + AGAINST and difference > 1 + _DOUBT * self._differences[octave].error

    def _aim(self, wanted: float, reason: str) -> None:
        """Lowers the target to what is wanted, or brings it nearer if a rise is due."""
        if wanted == self._target or (wanted > self._target and self._updates < self._may_rise_at):
            return
        self._has_risen, had_risen = wanted > self._target, self._has_risen
        if self._has_risen:
            doubled = 2 * self._target + 1
            if doubled < min(wanted, 2**_OCTAVES):
                wanted, reason = doubled, f"{reason}; the threshold rises step by step"
        elif had_risen:
            self._pause *= 2
        self._target = wanted
        self._may_rise_at = self._updates + self._pause
        self._changes.append(Change(self._updates, None if math.isinf(self._target) else int(self._target), reason))

    def state_dict(self) -> dict[str, Any]:
        return {
            "threshold": None if math.isinf(self._threshold) else self._threshold,
            "target": None if math.isinf(self._target) else self._target,
            "pause": self._pause,
            "may_rise_at": self._may_rise_at,
            "has_risen": self._has_risen,
            "updates": self._updates,
            "differences": [average.state() for average in self._differences],
            "kept": [[kept.number, kept.version, _text_of(kept.sketch)] for kept in self._kept],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._threshold = math.inf if state["threshold"] is None else state["threshold"]
        self._target = math.inf if state["target"] is None else state["target"]
        self._pause, self._may_rise_at, self._has_risen = state["pause"], state["may_rise_at"], state["has_risen"]
        self._updates = state["updates"]
        self._differences = [_Average.of_state(numbers) for numbers in state["differences"]]
        self._kept = [_Kept(number, version, _sketch_of(text)) for number, version, text in state["kept"]]


def _is_kept(number: int, age: int) -> bool:
    step = 1 << max(0, age.bit_length() - 2)
    return age < 2**_OCTAVES and number % step == 0


def _versions(octave: int) -> str:
    return f"{2**octave} to {2 ** (octave + 1) - 1}"


def _text_of(sketch: Sketch) -> str:
    return base64.b64encode(sketch.astype("<i2").tobytes()).decode("ascii")


def _sketch_of(text: str) -> Sketch:
    return np.frombuffer(base64.b64decode(text), dtype="<i2").astype(np.float64)
