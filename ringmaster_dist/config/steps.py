"""The step size of a run that names none: each problem has its own, by geometry and by method.

The quadratic keeps the paper's choices. The other numbers are the winners of ``ringmaster experiment steps``;
docs/choosing.md has the figures and says when to choose another.
"""

from __future__ import annotations

from collections.abc import Mapping

_GEOMETRY_OF_OTHERS = "muon"  # stands for a geometry that has no row

# By geometry: eta of methods that bound the delay or average. Then the factors of the other methods.
_QUADRATIC = {"muon": 0.2, "euclidean": 0.2, "scion": 0.2, "sign": 0.005}
_MODELS = {"muon": 0.02, "euclidean": 0.1, "scion": 0.02, "sign": 0.002}
_FACTORS: Mapping[str, Mapping[str, float]] = {
    "quadratic": {"ringmaster_agnostic": 25.0, "delay_adaptive": 0.04, "asynchronous": 0.04},
    "nanochat": {"ringmaster_agnostic": 25.0},
    "python": {"ringmaster_agnostic": 25.0},
}
_ETAS = {"quadratic": _QUADRATIC, "nanochat": _MODELS, "python": _MODELS}


def suggested_eta(problem: str, geometry: str, method: str) -> float:
    """What method.eta is where nobody says."""
    etas = _ETAS.get(problem, _MODELS)
    eta = etas.get(geometry, etas[_GEOMETRY_OF_OTHERS])
    return float(f"{eta * _FACTORS.get(problem, {}).get(method, 1.0):.6g}")
