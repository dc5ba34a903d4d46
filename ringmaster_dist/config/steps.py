"""The step size of a run that names none: each problem has its own, by geometry and by method.

The quadratic has the paper's. NanoChat has the winners of ``ringmaster experiment steps`` and ``radii``. Models of the
user's own get what suited small ones, which is a guess: docs/choosing.md has the figures, and says how to find better.
"""

from __future__ import annotations

from typing import NamedTuple


class _Steps(NamedTuple):
    by_geometry: dict[str, float]  # of the methods that bound the delay, or average
    factors: dict[str, float]  # of the other methods


_PROBLEMS = {
    "quadratic": _Steps(
        {"muon": 0.2, "scion": 0.2, "euclidean": 0.2, "sign": 0.005},
        {"ringmaster_agnostic": 25.0, "delay_adaptive": 0.04, "asynchronous": 0.04},
    ),
    "nanochat": _Steps(
        {"muon": 1.0, "scion": 0.01, "euclidean": 0.1, "sign": 0.003},
        {"ringmaster_agnostic": 25.0},
    ),
    "python": _Steps(
        {"muon": 0.01, "scion": 0.01, "euclidean": 0.01, "sign": 0.001},
        {"ringmaster_agnostic": 25.0, "delay_adaptive": 0.5, "asynchronous": 0.5},
    ),
}


def suggested_eta(problem: str, geometry: str, method: str) -> float:
    """What method.eta is where nobody says. A problem or geometry that is not known is not this function's affair."""
    steps = _PROBLEMS.get(problem, _PROBLEMS["python"])
    eta = steps.by_geometry.get(geometry, steps.by_geometry["muon"]) * steps.factors.get(method, 1.0)
    return float(f"{eta:.6g}")  # without the digits that binary fractions add
