"""The delay profiles of the paper, which say how long a gradient takes on each worker.

A profile gives each worker index a deterministic base time. Jitter adds a half-normal perturbation whose standard
deviation is a fraction of that base time. The simulator and the pacing of real workers use the same numbers, so a paced
run and its simulation agree draw by draw.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ringmaster_dist import randomness

# Seconds per NanoChat gradient, the mean of 100 steps after 3 warm-up steps (the paper's table of GPUs).
GPU_GRADIENT_SECONDS: dict[str, float] = {
    "H100": 14.18e-3,
    "A100": 22.74e-3,
    "RTX 4090": 26.53e-3,
    "RTX 3090": 38.42e-3,
    "V100": 64.15e-3,
    "T4": 128.60e-3,
    "GTX 1080 Ti": 215.20e-3,
}


def _gpus(index: NDArray[np.float64]) -> NDArray[np.float64]:
    """The GPU table, repeated over the workers, in units of the A100's time."""
    table = np.array(list(GPU_GRADIENT_SECONDS.values())) / GPU_GRADIENT_SECONDS["A100"]
    dealt: NDArray[np.float64] = table[index.astype(np.int64) % len(table)]
    return dealt


# Slowness of worker index i relative to the unit time.
PROFILES: dict[str, Callable[[NDArray[np.float64]], NDArray[np.float64]]] = {
    "similar": np.ones_like,
    "sublinear": lambda index: 1.0 + np.sqrt(index),
    "linear": lambda index: 1.0 + index,
    "gpus": _gpus,
}


def base_seconds(profile: str, num_workers: int, unit_seconds: float) -> NDArray[np.float64]:
    """Deterministic seconds per gradient of workers 0, ..., num_workers - 1."""
    times: NDArray[np.float64] = unit_seconds * PROFILES[profile](np.arange(num_workers, dtype=np.float64))
    return times


def jittered_seconds(base: float, jitter: float, key: int, sequence: int) -> float:
    """Seconds of one gradient: ``base + |N(0, (jitter * base)^2)|``, drawn for this worker's key and sequence."""
    if jitter == 0.0:
        return base
    return base * (1.0 + jitter * randomness.half_normal(key, sequence))


class SpeedPhase(Protocol):
    """From ``start_seconds`` on, ``workers`` (all if None) compute at ``rate`` times their usual speed."""

    start_seconds: float
    rate: float
    workers: list[int] | None


def rate_at(phases: Sequence[SpeedPhase], worker: int, seconds: float) -> float:
    """The speed of a worker at a time, in multiples of its usual one. A later phase overrides an earlier one."""
    begun = [phase for phase in phases if phase.start_seconds <= seconds]
    own = [phase for phase in begun if phase.workers is None or worker in phase.workers]
    return max(own, key=lambda phase: phase.start_seconds).rate if own else 1.0
