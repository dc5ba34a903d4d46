"""Time bounds of the paper under fixed computation times ``tau_1 <= ... <= tau_n``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray


def harmonic_means(seconds: Sequence[float] | NDArray[np.float64]) -> NDArray[np.float64]:
    """``H_m`` for m = 1, ..., n: the harmonic mean of the m quickest times."""
    times = np.sort(np.asarray(seconds, dtype=np.float64))
    if times.size == 0 or times[0] <= 0 or not np.isfinite(times).all():
        raise ValueError(f"gradient times must be positive and finite, at least one of them: {list(seconds)}")
    means: NDArray[np.float64] = np.arange(1, times.size + 1) / np.cumsum(1.0 / times)
    return means


def seconds_of_updates(seconds: Sequence[float] | NDArray[np.float64], threshold: int) -> float:
    """``t(R) = 2 min_m H_m (1 + R/m)``: any R consecutive updates take at most this long."""
    means = harmonic_means(seconds)
    return float(2.0 * np.min(means * (1.0 + threshold / np.arange(1, means.size + 1))))


def seconds_of_run(
    seconds: Sequence[float] | NDArray[np.float64], updates: int, threshold: Callable[[int], float]
) -> float:
    """A bound on the first ``updates`` updates for a non-decreasing threshold: blocks of R at each level R."""
    total, version = 0.0, 0
    while version < updates:
        level = math.floor(threshold(version))
        stop = version
        while stop < updates and math.floor(threshold(stop)) == level:
            stop += 1
        total += math.ceil((stop - version) / level) * seconds_of_updates(seconds, level)
        version = stop
    return total
