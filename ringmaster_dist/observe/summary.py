"""The keys of summary.json that every run has, from the core and what its clock measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ringmaster_dist import __version__
from ringmaster_dist.observe.divergence import finite
from ringmaster_dist.server.core import ServerCore

_LISTED_WORKERS = 1000  # at most this many, the first ones


def summarize(
    core: ServerCore,
    evaluation: Mapping[str, float],
    *,
    seconds: float,
    wall_seconds: float,
    workers: Mapping[int, Mapping[str, Any]],
    **facts: Any,
) -> dict[str, Any]:
    """``workers`` gives, for those that did anything, ``interrupted``, ``used_seconds``, ``wasted_seconds``, ..."""
    used = sum(worker["used_seconds"] for worker in workers.values())
    wasted = sum(worker["wasted_seconds"] for worker in workers.values())
    per_worker = {}
    for worker_id, measured in list(workers.items())[:_LISTED_WORKERS]:
        record = core.workers[worker_id]
        counts = {"accepted": record.accepted, "stale": record.stale, "invalid": record.invalid}
        per_worker[str(worker_id)] = {**counts, **measured}
    return {
        **facts,
        "updates": core.version,
        "seconds": seconds,
        "pushes": core.pushes,
        "accepted": core.accepted,
        "stale": core.stale,
        "invalid": core.invalid,
        "interrupted": sum(worker["interrupted"] for worker in workers.values()),
        **finite({f"final_{name}": value for name, value in evaluation.items()}),
        "gradients_per_second": core.pushes / seconds if seconds else 0.0,
        "updates_per_second": core.version / seconds if seconds else 0.0,
        "wasted_fraction": wasted / (used + wasted) if used + wasted else 0.0,
        "wall_seconds": wall_seconds,
        "version_of_program": __version__,
        "per_worker": per_worker,
        "per_worker_omitted": max(0, len(workers) - _LISTED_WORKERS),
    }
