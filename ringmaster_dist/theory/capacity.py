"""What one server can carry, on paper: its arithmetic and its link against what the workers deliver.

Each accepted gradient costs the server one update and moves the model once in and once out; links are full duplex, and
transfers go on while an update is computed, so the smaller of the two rates is the limit. Workers ask for one exchange
per gradient. Local accumulation of ``k`` gradients divides what they ask for, a narrower wire the bytes, shards both
costs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

_ORTHOGONALIZATION_STEPS = 5
_ELEMENTWISE_BYTES = 5 * 4  # iterate, momentum and gradient are read, iterate and momentum written, fp32


class Model(NamedTuple):
    name: str
    parameters: int
    flops: float  # of one update's orthogonalisations


class Machine(NamedTuple):
    name: str
    flops_per_second: float
    memory_bytes_per_second: float


def orthogonalization_flops(shapes: Iterable[tuple[int, int]]) -> float:
    """Of the plain iteration: a Gram matrix, its square and a product, five times."""
    total = 0.0
    for rows, cols in shapes:
        short, long = min(rows, cols), max(rows, cols)
        total += _ORTHOGONALIZATION_STEPS * 2.0 * (2.0 * short * short * long + float(short) ** 3)
    return total


def fitted(name: str, measured: Iterable[tuple[Model, float]]) -> Machine:
    """The machine whose two rates explain two measured update times."""
    (a, a_seconds), (b, b_seconds) = measured
    determinant = a.flops * b.parameters - b.flops * a.parameters
    per_flop = (a_seconds * b.parameters - b_seconds * a.parameters) / determinant
    per_parameter = (a.flops * b_seconds - b.flops * a_seconds) / determinant
    return Machine(name, 1.0 / max(per_flop, 1e-18), _ELEMENTWISE_BYTES / max(per_parameter, 1e-18))


def update_seconds(model: Model, machine: Machine, shards: int = 1) -> float:
    arithmetic = model.flops / machine.flops_per_second
    return (arithmetic + model.parameters * _ELEMENTWISE_BYTES / machine.memory_bytes_per_second) / shards


def transfer_seconds(model: Model, link_bytes_per_second: float, wire_bytes: int, shards: int = 1) -> float:
    """One way; the other goes at the same time."""
    return model.parameters * wire_bytes / link_bytes_per_second / shards


def largest_cluster(exchanges_per_second: float, mean_rate: float, accumulation: int = 1) -> int:
    """How many workers, each of which finishes ``mean_rate`` gradients per second, one server keeps up with."""
    return int(exchanges_per_second * accumulation / mean_rate)
