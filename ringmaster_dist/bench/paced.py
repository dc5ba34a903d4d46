"""``ringmaster bench efficiency``: real runs of paced workers.

It measures two things by what a run leaves in its directory. Delivered gradients per second are compared with
the sum of the workers' own rates, ``1/tau_i`` with their jitter. What is missing is the cost of the exchange, the
server and the machine. Interruption is measured by how long a worker takes to restart after its work became stale, and
by the share of the compute that is wasted with and without it.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

from ringmaster_dist.bench import show, train
from ringmaster_dist.observe.records import Arrival, WorkerSummary
from ringmaster_dist.profiles import base_seconds
from ringmaster_dist.protocol import Verdict

_UNIT_SECONDS, _JITTER = 0.05, 0.05
_PACED = ("cluster.profile=linear", f"cluster.unit_seconds={_UNIT_SECONDS}", f"cluster.jitter={_JITTER}",
          "budget.updates=null")  # fmt: skip
_DELIVERED = ["delivered", "of sum 1/tau", "gradients/s", "sum 1/tau", "seconds"]
_INTERRUPTED = ["interruption, R=2, 8 workers", "wasted", "restarts", "late p50 ms", "late p95 ms", "beyond limit"]


def efficiency(quick: bool, as_json: bool) -> None:
    seconds = 4.0 if quick else 30.0
    rows = [delivered(workers, seconds) for workers in ((8,) if quick else (8, 24))]
    show("efficiency", _DELIVERED, rows, as_json)
    rows = [interrupted(interrupt, seconds) for interrupt in ((True,) if quick else (True, False))]
    show("efficiency", _INTERRUPTED, rows, as_json)


def delivered(workers: int, seconds: float) -> dict[str, Any]:
    summary, _ = train(*_PACED, f"cluster.workers={workers}", f"budget.seconds={seconds}", "method=asynchronous")
    mean = 1.0 + _JITTER * math.sqrt(2.0 / math.pi)  # of the half-normal jitter
    rate = sum(1.0 / (mean * base_seconds("linear", workers, _UNIT_SECONDS)))
    return {
        "delivered": f"{workers} workers",
        "of sum 1/tau": round(summary.gradients_per_second / rate, 3),
        "gradients/s": round(summary.gradients_per_second, 1),
        "sum 1/tau": round(rate, 1),
        "seconds": round(summary.seconds, 1),
    }


def interrupted(interrupt: bool, seconds: float) -> dict[str, Any]:
    summary, trace = train(
        *_PACED, "cluster.workers=8", f"budget.seconds={seconds}", "method=ringmaster", "method.threshold=2",
        f"method.interrupt={interrupt}",
    )  # fmt: skip
    late = sorted(_lateness(trace, summary.per_worker))
    row: dict[str, Any] = {_INTERRUPTED[0]: "on" if interrupt else "off", "wasted": f"{summary.wasted_fraction:.0%}"}
    if interrupt and late:
        row |= {
            "restarts": summary.interrupted,
            "late p50 ms": round(1e3 * late[len(late) // 2][0], 1),
            "late p95 ms": round(1e3 * late[int(0.95 * len(late))][0], 1),
            "beyond limit": f"{sum(seconds > limit for seconds, limit in late)} of {len(late)}",
        }
    return row


def _lateness(trace: list[Arrival], per_worker: dict[str, WorkerSummary]) -> list[tuple[float, float]]:
    """For gradients whose predecessor was interrupted: how late they began, and the limit of 20 ms + 5 % of tau.

    A worker is interrupted when a newer version makes its own stale, and it restarts with that newer version. So its
    lateness is the time from the making of that version to its restart.
    """
    made = {record.version + 1: record.time for record in trace if record.verdict is Verdict.ACCEPTED}
    late = []
    for worker, facts in per_worker.items():
        own = [record for record in trace if str(record.worker) == worker]
        for before, record in pairwise(own):
            was_interrupted = record.sequence > before.sequence + 1
            if was_interrupted and record.gradient_version in made:
                began = record.time - record.compute_seconds
                late.append((began - made[record.gradient_version], 0.020 + 0.05 * facts.base_seconds))
    return late
