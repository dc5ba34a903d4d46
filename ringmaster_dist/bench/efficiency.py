"""``ringmaster bench efficiency``: real runs of paced workers, measured by what they leave in their run directories.

Delivered: gradients per second beside the sum of the workers' own rates, ``1/tau_i`` with its jitter: what is missing
is what the exchange, the server and the machine cost. Interruption: how long after its work became stale a worker has
begun anew, and what share of the compute is wasted with and without it.
"""

from __future__ import annotations

import math
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

from ringmaster_dist.bench import show
from ringmaster_dist.config.errors import UserError
from ringmaster_dist.observe.records import Arrival, Summary, WorkerSummary
from ringmaster_dist.observe.run_files import RunFiles
from ringmaster_dist.profiles import base_seconds
from ringmaster_dist.protocol import Verdict

_UNIT_SECONDS, _JITTER = 0.05, 0.05
_DELIVERED = ["delivered", "of sum 1/tau", "gradients/s", "sum 1/tau", "seconds"]
_INTERRUPTED = ["interruption, R=2, 8 workers", "wasted", "restarts", "late p50 ms", "late p95 ms", "beyond limit"]


def run(quick: bool, as_json: bool) -> None:
    seconds = 4.0 if quick else 30.0
    rows = [delivered(workers, seconds) for workers in ((8,) if quick else (8, 24))]
    show("efficiency", _DELIVERED, rows, as_json)
    rows = [interrupted(interrupt, seconds) for interrupt in ((True,) if quick else (True, False))]
    show("efficiency", _INTERRUPTED, rows, as_json)


def delivered(workers: int, seconds: float) -> dict[str, Any]:
    summary, _ = _train(workers, seconds, "method=asynchronous")
    mean = 1.0 + _JITTER * math.sqrt(2.0 / math.pi)  # of the half-normal runtime noise
    rate = sum(1.0 / (mean * base_seconds("linear", workers, _UNIT_SECONDS)))
    return {
        "delivered": f"{workers} workers",
        "of sum 1/tau": round(summary.gradients_per_second / rate, 3),
        "gradients/s": round(summary.gradients_per_second, 1),
        "sum 1/tau": round(rate, 1),
        "seconds": round(summary.seconds, 1),
    }


def interrupted(interrupt: bool, seconds: float) -> dict[str, Any]:
    summary, trace = _train(8, seconds, "method=ringmaster", "method.threshold=2", f"method.interrupt={interrupt}")
    late = sorted(_lateness(trace, summary.per_worker, threshold=2))
    within = [seconds for seconds, limit in late if seconds <= limit]
    row: dict[str, Any] = {_INTERRUPTED[0]: "on" if interrupt else "off", "wasted": f"{summary.wasted_fraction:.0%}"}
    if interrupt and late:
        row |= {
            "restarts": summary.interrupted,
            "late p50 ms": round(1e3 * late[len(late) // 2][0], 1),
            "late p95 ms": round(1e3 * late[int(0.95 * len(late))][0], 1),
            "beyond limit": f"{len(late) - len(within)} of {len(late)}",
        }
    return row


def _lateness(trace: list[Arrival], per_worker: dict[str, WorkerSummary], threshold: int) -> list[tuple[float, float]]:
    """For gradients whose predecessor was interrupted: how late they were begun, and the limit of 20 ms + 5 % of tau.

    A worker is told when its version falls out of the threshold, which is when a newer version is made; the one it
    begins anew with is the newest then. So it was late by its beginning less the making of that version.
    """
    made = {arrival.version + 1: arrival.time for arrival in trace if arrival.verdict is Verdict.ACCEPTED}
    late = []
    for worker, facts in per_worker.items():
        mine = [arrival for arrival in trace if str(arrival.worker) == worker]
        for before, arrival in pairwise(mine):
            was_interrupted = arrival.sequence > before.sequence + 1
            if was_interrupted and arrival.gradient_version in made:
                began = arrival.time - arrival.compute_seconds
                late.append((began - made[arrival.gradient_version], 0.020 + 0.05 * facts.base_seconds))
    return late


def _train(workers: int, seconds: float, *overrides: str) -> tuple[Summary, list[Arrival]]:
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "ringmaster_dist", "train", f"run.dir={folder}/run", f"cluster.workers={workers}",
            "cluster.profile=linear", f"cluster.unit_seconds={_UNIT_SECONDS}", f"cluster.jitter={_JITTER}",
            "budget.updates=null", f"budget.seconds={seconds}", "run.report=false", *overrides,
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise UserError(f"the run that was to be measured failed: {done.stderr.strip()}")
        run = RunFiles(Path(folder, "run"))
        return run.outcome(), run.arrivals()
