"""Random numbers as pure functions of (seed, stream, worker, sequence).

Everything that a worker draws for its ``sequence``-th gradient (its batch, its noise, its jitter) is a hash of these
four numbers. So no generator has to be saved or sent, any machine can recompute any draw, and the order of the draws
never matters. The hash is SplitMix64. `bits` and `bits_of_many` are the same function for one worker and for an array
of workers.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

_MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
FIRST_FACTOR = 0xBF58476D1CE4E5B9
SECOND_FACTOR = 0x94D049BB133111EB
_TO_UNIT = 2.0**-52

_inverse_normal_cdf = NormalDist().inv_cdf

# One number per kind of draw, so that a gradient's noise and its runtime are independent.
STREAM_NOISE = 1
STREAM_JITTER = 2
STREAM_BATCH = 3
STREAM_MODEL = 4  # draws that a model makes itself, such as dropout
STREAM_ROUNDING = 5  # of gradients for the wire

# |z| of a half-normal is at least this slope times (1 - u). Its quantile is convex, and this is the tangent at 0.
HALF_NORMAL_SLOPE = math.sqrt(math.pi / 2)


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * FIRST_FACTOR) & _MASK
    value = ((value ^ (value >> 27)) * SECOND_FACTOR) & _MASK
    return value ^ (value >> 31)


def worker_key(seed: int, stream: int, worker_id: int) -> int:
    """The 64-bit key from which all of one worker's draws in one stream follow."""
    base = _mix((seed * GOLDEN + stream) & _MASK)
    return _mix((base + (worker_id + 1) * GOLDEN) & _MASK)


def bits(key: int, sequence: int) -> int:
    """64 random bits for a worker's ``sequence``-th gradient."""
    return _mix((key + sequence * GOLDEN + GOLDEN) & _MASK)


def unit(random_bits: int) -> float:
    """A number strictly between 0 and 1 from 64 random bits."""
    return ((random_bits >> 12) + 0.5) * _TO_UNIT


def normal(key: int, sequence: int) -> float:
    """A standard normal draw."""
    return _inverse_normal_cdf(unit(bits(key, sequence)))


def half_normal(key: int, sequence: int) -> float:
    """The absolute value of a standard normal draw. It falls as the underlying uniform rises."""
    return -_inverse_normal_cdf(0.5 * unit(bits(key, sequence)))


def _mix_many(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """`_mix` in place on an array."""
    values ^= values >> np.uint64(30)
    values *= np.uint64(FIRST_FACTOR)
    values ^= values >> np.uint64(27)
    values *= np.uint64(SECOND_FACTOR)
    values ^= values >> np.uint64(31)
    return values


def worker_keys(seed: int, stream: int, num_workers: int) -> NDArray[np.uint64]:
    """`worker_key` of workers 0, 1, ..., num_workers - 1."""
    base = _mix((seed * GOLDEN + stream) & _MASK)
    workers = np.arange(1, num_workers + 1, dtype=np.uint64)
    return _mix_many(workers * np.uint64(GOLDEN) + np.uint64(base))


def bits_of_many(keys: NDArray[np.uint64], sequences: NDArray[np.int64]) -> NDArray[np.uint64]:
    """`bits` of each pair of a key and a sequence."""
    values = sequences.astype(np.uint64)
    values += np.uint64(1)
    values *= np.uint64(GOLDEN)
    values += keys
    return _mix_many(values)
