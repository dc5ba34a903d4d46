"""Time bounds of the paper under fixed computation times ``tau_1 <= ... <= tau_n``, and under changing ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray


def harmonic_means(seconds: Sequence[float] | NDArray[np.float64]) -> NDArray[np.float64]:
    """``H_m``, the harmonic mean of the m smallest times, for m = 1, ..., n. The result is (n,)."""
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
    """A bound on the first ``updates`` updates for a non-decreasing threshold, as blocks of R at each level R."""
    total, version = 0.0, 0
    while version < updates:
        level = math.floor(threshold(version))
        stop = version
        while stop < updates and math.floor(threshold(stop)) == level:
            stop += 1
        total += math.ceil((stop - version) / level) * seconds_of_updates(seconds, level)
        version = stop
    return total


def useful_workers(seconds: Sequence[float] | NDArray[np.float64], threshold: int) -> int:
    """``m*``, the number of fastest workers that reach ``t(R)``. The others do not improve the bound."""
    means = harmonic_means(seconds)
    return 1 + int(np.argmin(means * (1.0 + threshold / np.arange(1, means.size + 1))))


def seconds_of_updates_at(
    work: Callable[[float], NDArray[np.float64]], threshold: int, start: float, horizon: float = 1e9
) -> float:
    """``t(R; T0)`` of the universal model: the time of R gradients if workers have a quarter of their speed.

    ``work(T)`` is the number of gradients, not rounded, that each worker could finish up to time T, (n,). The result is
    infinite if it is beyond the horizon.
    """
    before = work(start)

    def enough(duration: float) -> bool:
        return float(np.floor((work(start + duration) - before) / 4.0 + 1e-12).sum()) >= threshold

    low, high = 0.0, 1.0
    while not enough(high):
        low, high = high, 2.0 * high
        if high > horizon:
            return math.inf
    while high - low > 1e-9 * max(1.0, high):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def seconds_of_run_at(
    work: Callable[[float], NDArray[np.float64]], updates: int, threshold: int, horizon: float = 1e9
) -> float:
    """A bound on the first ``updates`` updates at a fixed threshold R and changing speeds, as blocks of R in a row."""
    total = 0.0
    for _ in range(math.ceil(updates / threshold)):
        total += seconds_of_updates_at(work, threshold, total, horizon)
        if math.isinf(total):
            break
    return total
