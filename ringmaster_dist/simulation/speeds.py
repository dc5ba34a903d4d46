"""When a simulated gradient is finished.

A gradient of worker i is ``base_i * share_i * (1 + jitter * |z|)`` seconds of work. The share is its number of rows
over the usual number, and a gradient costs nothing apart from its rows. The normal number z is drawn for its worker and
sequence. Work is done at rate 1, or at a rate that changes with time and may be zero for a while.

`earliest` bounds `finish` from below for many workers at a fraction of its cost. The arrival queue asks for the exact
time only of those that can be next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringmaster_dist import randomness
from ringmaster_dist.profiles import jittered_seconds

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_BELOW = 1.0 - 1e-12  # lowers a bound by more than the rounding errors, so that it never exceeds the time it bounds


class Phase(NamedTuple):
    """From ``start_seconds`` on, ``workers`` (all if None) compute at ``rate`` times their usual speed."""

    start_seconds: float
    rate: float
    workers: Sequence[int] | None = None


class Rates:
    """Piecewise-constant rates. ``factors[s, i]`` is the rate of worker i from ``times[s]`` to ``times[s + 1]``."""

    def __init__(self, times: Floats, factors: Floats) -> None:
        if times[0] != 0.0 or (np.diff(times) <= 0).any():
            raise ValueError(f"rates need increasing times that begin at 0, not {times.tolist()}")
        if not np.isfinite(factors).all() or (factors < 0).any():
            raise ValueError("rates must be finite and not negative")
        self.times = times
        self.factors = factors

    @classmethod
    def from_phases(cls, phases: Sequence[Phase], num_workers: int) -> Rates:
        times = np.array(sorted({0.0, *(phase.start_seconds for phase in phases)}))
        factors = np.ones((len(times), num_workers))  # (segments, workers)
        for phase in sorted(phases, key=lambda p: p.start_seconds):  # a later phase overrides an earlier one
            workers = slice(None) if phase.workers is None else list(phase.workers)
            factors[np.searchsorted(times, phase.start_seconds) :, workers] = phase.rate
        return cls(times, factors)

    @classmethod
    def from_callable(
        cls, rate: Callable[[int, float], float], num_workers: int, horizon_seconds: float, step_seconds: float
    ) -> Rates:
        """Samples ``rate(worker, time)`` in the middle of each step, up to the horizon."""
        times = np.arange(0.0, horizon_seconds, step_seconds)
        table = [[rate(worker, time + step_seconds / 2) for worker in range(num_workers)] for time in times]
        return cls(times, np.array(table, dtype=np.float64))

    def finish(self, start: float, work: Floats, workers: Ints) -> Floats:
        """When this much work of each worker, begun at ``start``, is done; infinity if it never is."""
        finish = np.full(len(work), np.inf)
        pending = np.arange(len(work))
        remaining = work
        time = start
        for segment in range(int(np.searchsorted(self.times, start, "right")) - 1, len(self.times)):
            end = self.times[segment + 1] if segment + 1 < len(self.times) else np.inf
            rate = self.factors[segment, workers[pending]]
            with np.errstate(divide="ignore"):
                done_at = time + remaining / rate
            done = done_at <= end
            finish[pending[done]] = done_at[done]
            pending, remaining, rate = pending[~done], remaining[~done], rate[~done]
            if len(pending) == 0 or end == np.inf:
                break
            remaining = np.maximum(remaining - (end - time) * rate, 0.0)
            time = end
        return finish


class Speeds:
    """The virtual cluster. It has base times, jitter, and optionally rates that change."""

    def __init__(
        self,
        base_seconds: Sequence[float] | Floats,
        *,
        jitter: float = 0.0,
        seed: int = 0,
        rates: Rates | None = None,
    ) -> None:
        self.base: Floats = np.asarray(base_seconds, dtype=np.float64)
        if self.base.size == 0 or not np.isfinite(self.base).all() or (self.base <= 0).any():
            raise ValueError("every worker needs a positive, finite time per gradient")
        self.num_workers = self.base.size
        self.jitter = jitter
        self.rates = rates
        self.share: Floats = np.ones(self.num_workers)  # of the usual rows, in the newest gradient of each worker
        self.keys = randomness.worker_keys(seed, randomness.STREAM_JITTER, self.num_workers)

    def finish(self, worker: int, sequence: int, start: float) -> float:
        """When the worker's ``sequence``-th gradient, begun at ``start``, is finished."""
        usual = float(self.base[worker]) * float(self.share[worker])
        work = jittered_seconds(usual, self.jitter, int(self.keys[worker]), sequence)
        if self.rates is None:
            return start + work
        return float(self.rates.finish(start, np.array([work]), np.array([worker]))[0])

    def earliest(self, workers: Ints, sequences: Ints, start: float) -> Floats:
        """A lower bound on `finish` for each worker; exact if there is no jitter."""
        work: Floats = self.base.take(workers) * self.share.take(workers)
        if self.jitter:
            slope = self.jitter * randomness.HALF_NORMAL_SLOPE
            factor = randomness.bits_of_many(self.keys.take(workers), sequences).astype(np.float64)  # 2^64 u
            factor *= -slope * 2.0**-64
            factor += (1.0 + slope) * _BELOW  # 1 + slope (1 - u)
            work = np.multiply(work, factor, out=factor)
        return work + start if self.rates is None else self.rates.finish(start, work, workers)
