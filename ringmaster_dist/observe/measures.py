"""The figures that several parts of the program compute, each defined once; docs/metrics.md says them in words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ringmaster_dist.observe.records import VERDICTS
from ringmaster_dist.observe.run_files import Trace

ACCEPTED, STALE, INVALID = range(len(VERDICTS))  # as in the columns of a trace
_MOST_LOSS = 1e30
_LOSS_WEIGHT = 0.05  # of the newest loss in the smoothed one
_FIRST_FORECAST = 0.01  # of the budget: before that, the end is not predicted
_TAU_WEIGHT = 0.1  # of the newest compute time in a worker's seconds per gradient


def smoothed_loss(before: float | None, loss: float) -> float:
    """The loss of accepted gradients, exponentially smoothed. A huge number does not make it infinite for good."""
    if math.isfinite(loss):
        loss = max(-_MOST_LOSS, min(_MOST_LOSS, loss))
    return loss if before is None else before + _LOSS_WEIGHT * (loss - before)


def smoothed_tau(before: float | None, compute_seconds: float) -> float:
    """A worker's seconds per gradient now, exponentially smoothed."""
    return compute_seconds if before is None else before + _TAU_WEIGHT * (compute_seconds - before)


def per_second(count: float, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0


def wasted_fraction(used_seconds: float, wasted_seconds: float) -> float:
    """The share of compute time that was spent on gradients that were not accepted."""
    total = used_seconds + wasted_seconds
    return wasted_seconds / total if total else 0.0


def share_of(accepted: int, all_accepted: int) -> float:
    """A worker's part of all accepted gradients."""
    return accepted / max(1, all_accepted)


class Progress(NamedTuple):
    """How far a run has come."""

    fraction: float  # of the budget that is used up; of two limits, the one that is nearer
    seconds_left: float | None  # if the run continues at its mean pace so far; None where nothing can be said yet

    @classmethod
    def of(
        cls, updates: int, seconds: float, max_updates: float | None = None, max_seconds: float | None = None
    ) -> Progress:
        """A limit of None is no limit."""
        fraction = min(1.0, max(updates / (max_updates or math.inf), seconds / (max_seconds or math.inf)))
        return cls(fraction, seconds * (1 - fraction) / fraction if fraction > _FIRST_FORECAST else None)


def quantile(ordered: Sequence[int] | np.ndarray, fraction: float) -> int:
    """The smallest value that at least this fraction of all values does not exceed."""
    return int(ordered[max(0, math.ceil(fraction * len(ordered)) - 1)])


class UpdateTimes:
    """When each version was decided, as arrivals tell it, and how a delay divides into parts.

    An arrival of a newer version than those before says that the last accepted gradient has made the new version.
    """

    def __init__(self, first_version: int = 0, remembered: int | None = None) -> None:
        """``remembered`` limits how many of the newest versions are kept."""
        self._first_version, self._remembered = first_version, remembered
        self._decided = np.array([-math.inf])  # of shape (versions,), from the first version on
        self._last_accepted = 0.0

    def add(self, times: np.ndarray, versions: np.ndarray, accepted: np.ndarray) -> None:
        """Takes the next arrivals in their order, as arrays of shape (arrivals,)."""
        if not len(times):
            return
        before = np.maximum.accumulate(np.concatenate(([self._last_accepted], np.where(accepted, times, -math.inf))))
        new = np.arange(self._first_version + len(self._decided), int(versions.max()) + 1)
        firsts = np.searchsorted(np.maximum.accumulate(versions), new, side="left")
        self._decided = np.concatenate((self._decided, before[firsts]))
        self._last_accepted = float(before[-1])
        surplus = len(self._decided) - (self._remembered or len(self._decided))
        if surplus > 0:
            self._decided = self._decided[surplus:]
            self._first_version += surplus

    def computing_part(
        self, times: np.ndarray, versions: np.ndarray, delays: np.ndarray, compute_seconds: np.ndarray
    ) -> np.ndarray:
        """The part of each delay that was decided while the gradient was computed; the rest is queue and wire."""
        begun_at = self._first_version + np.searchsorted(self._decided, times - compute_seconds, side="right") - 1
        part: np.ndarray = np.minimum(np.maximum(versions - begun_at, 0), delays)  # of shape (arrivals,)
        return part


def delay_parts(trace: Trace) -> dict[str, float]:
    """The mean delay of arrivals in two parts: decided while the gradient was computed, and before or after that."""
    if not len(trace):
        return {}
    decided = UpdateTimes()
    decided.add(trace["time"], trace["version"], trace["verdict"] == ACCEPTED)
    computing = decided.computing_part(trace["time"], trace["version"], trace["delay"], trace["compute_seconds"])
    return {"compute": float(computing.mean()), "queue": float((trace["delay"] - computing).mean())}


def mean_compute_seconds(trace: Trace, usual_rows: int | None = None) -> dict[int, float]:
    """Seconds per gradient of each worker that delivered one, over the whole run.

    With ``usual_rows``, of a run that assigned rows, they are the seconds per row times this number.
    """
    counts = np.bincount(trace["worker"], weights=trace["rows"] / usual_rows if usual_rows else None)
    sums = np.bincount(trace["worker"], weights=trace["compute_seconds"])
    return {worker: float(sums[worker] / counts[worker]) for worker in np.flatnonzero(counts).tolist()}
