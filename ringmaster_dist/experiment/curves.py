"""Curves of an objective over virtual time: their value at a time and at the end, and when they reach a value.

The smoothing is a moving average of the logarithm, so that one lucky point does not count as reaching a value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_REACH = 3  # points on each side, of the moving average
_END = 0.1  # the part of a curve that `end` averages

Curve = Sequence[tuple[float, float]]  # virtual seconds, objective
Floats = NDArray[np.float64]


def smoothed(curve: Curve) -> tuple[Floats, Floats]:
    """The seconds and the smoothed objective, of shape (points,) each. What is not finite is infinite, and spreads."""
    points = np.array(sorted(dict(curve).items()))  # (points, 2), one for each time
    values = np.where(np.isfinite(points[:, 1]), points[:, 1], math.inf)
    logs = np.log(np.maximum(values, 1e-300))
    padded = np.pad(logs, _REACH, constant_values=math.nan)  # (points + 2 reach,)
    means = np.nanmean(np.lib.stride_tricks.sliding_window_view(padded, 2 * _REACH + 1), axis=1)  # (points,)
    return points[:, 0], np.exp(means)


def end(curve: Curve) -> float:
    """The mean over the last tenth of the time, or the last point if that is longer; infinite if it is not finite."""
    if not curve:
        return math.inf
    begin = (1 - _END) * curve[-1][0]
    values = [value for seconds, value in curve if seconds > begin]
    return float(np.mean(values)) if all(map(math.isfinite, values)) else math.inf


def value_at(curve: Curve, seconds: float) -> float:
    value = float(np.interp(seconds, *smoothed(curve)))
    return value if math.isfinite(value) else math.inf


def last(curve: Curve) -> float:
    return float(smoothed(curve)[1][-1])


def seconds_to(curve: Curve, goal: float) -> float:
    """When the smoothed curve first is at the goal or below, interpolated between its points; infinite if never."""
    return seconds_to_each(curve, [goal])[0]


def seconds_to_each(curve: Curve, goals: Sequence[float]) -> list[float]:
    times, values = smoothed(curve)
    return [_crossing(times, values, goal) for goal in goals]


def _crossing(times: Floats, values: Floats, goal: float) -> float:
    below = np.flatnonzero(values <= goal)
    if not len(below):
        return math.inf
    index = int(below[0])
    if index == 0 or not math.isfinite(values[index - 1]):
        return float(times[index])
    part = (values[index - 1] - goal) / (values[index - 1] - values[index])
    return float(times[index - 1] + part * (times[index] - times[index - 1]))
