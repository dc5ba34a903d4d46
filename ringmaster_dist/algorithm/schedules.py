"""Step size, momentum weight and delay threshold as functions of the version ``k``.

``eta(k)`` is the step size of update k, ``alpha(k)`` the weight of the new gradient in the momentum, and
``threshold(k)`` the R_k of the acceptance rule ``delay < R_k``. A threshold may be infinite. From one update to the
next it grows by at most 1, so a stale computation stays stale.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol


class Schedule(Protocol):
    def eta(self, version: int) -> float: ...

    def alpha(self, version: int) -> float: ...

    def threshold(self, version: int) -> float: ...


@dataclass(frozen=True)
class Constant:
    """The same numbers at every update."""

    eta_value: float
    alpha_value: float
    threshold_value: float = math.inf

    def eta(self, version: int) -> float:
        return self.eta_value

    def alpha(self, version: int) -> float:
        return self.alpha_value

    def threshold(self, version: int) -> float:
        return self.threshold_value


@dataclass(frozen=True)
class Agnostic:
    """The parameter-agnostic schedule: ``eta/(k+1)^(3/4)``, ``alpha_k = k^(-1/2)``, ``R_k = max(1, floor(sqrt k))``.

    The square root is an integer one. In floating point ``floor(1 / k^(-1/2))`` is too small by one at some perfect
    squares, first at k = 8649.
    """

    scale: float

    def eta(self, version: int) -> float:
        return self.scale * math.pow(version + 1, -0.75)

    def alpha(self, version: int) -> float:
        return 1.0 if version == 0 else 1.0 / math.sqrt(version)

    def threshold(self, version: int) -> float:
        return max(1, math.isqrt(version))


@dataclass(frozen=True)
class Ramped:
    """Another schedule, but eta rises linearly over ``warmup`` updates and falls linearly over the last ``decay``.

    The update after the warm-up is the first with the full eta. The last of ``total`` has ``final_fraction`` of it.
    """

    inner: Schedule
    warmup: int = 0
    decay: int = 0
    total: int = 0
    final_fraction: float = 0.0

    def eta(self, version: int) -> float:
        factor = 1.0
        if version < self.warmup:
            factor = (version + 1) / (self.warmup + 1)
        if self.decay:
            done = min(1.0, max(0.0, (version + 1 - (self.total - self.decay)) / self.decay))
            factor *= 1.0 - done * (1.0 - self.final_fraction)
        return factor * self.inner.eta(version)

    def alpha(self, version: int) -> float:
        return self.inner.alpha(version)

    def threshold(self, version: int) -> float:
        return self.inner.threshold(version)


@dataclass(frozen=True)
class Constants:
    """The constants of the problem that Theorem 1 needs."""

    smoothness: float  # L0
    generalized_smoothness: float  # L1
    noise: float  # sigma
    norm_ratio: float  # rho
    initial_gap: float  # Delta0
    updates: int  # K


def theory(constants: Constants) -> Constant:
    """The fixed parameters of Theorem 1. Rounding ``R = 1/alpha`` up does not change which delays are accepted."""
    l0, l1 = constants.smoothness, constants.generalized_smoothness
    noise, gap, k = constants.norm_ratio * constants.noise, constants.initial_gap, constants.updates
    alpha = 1.0 if noise == 0 else min(1.0, math.sqrt(gap * l0) / (noise * math.sqrt(k)))
    steps = [math.sqrt(gap / (l0 * k))]
    if noise > 0:
        steps.append(gap**0.75 / (l0**0.25 * math.sqrt(noise) * k**0.75))
    if l1 > 0:
        steps.append(1.0 / (8.0 * l1))
        if noise > 0:
            steps.append(math.sqrt(gap * l0) / (8.0 * l1 * noise * math.sqrt(k)))
    return Constant(min(steps), alpha, math.ceil(1.0 / alpha))


def agnostic(eta: float, *, generalized: bool = False, known_l1: float | None = None) -> Agnostic:
    """The three cases of the parameter-agnostic theorem: L1 = 0, L1 > 0 but unknown, and L1 known."""
    if known_l1 is not None:
        return Agnostic(1.0 / (17.0 * known_l1))
    return Agnostic(eta / 17.0 if generalized else eta)
