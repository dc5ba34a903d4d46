"""``ringmaster bench efficiency`` and ``time-to-loss``: real runs of paced workers.

Efficiency measures two things by what a run leaves in its directory. Delivered gradients per second are compared with
the sum of the workers' own rates, ``1/tau_i`` with their jitter. What is missing is the cost of the exchange, the
server and the machine. Interruption is measured by how long a worker takes to restart after its work became stale, and
by the share of the compute that is wasted with and without it.

Time to loss is the wall time until the validation loss reaches a target. Eight workers train the tiny NanoChat on the
standard library, and the slowest takes eight times as long as the fastest. It compares every method, and
DistributedDataParallel over gloo with torch.optim.Muon, each with the best eta of a small grid. torch.optim.Muon
computes in bf16, which some processors emulate, so DDP is also shown without the time of its optimizers.
"""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from ringmaster_dist.bench import show, train
from ringmaster_dist.config.errors import UserError
from ringmaster_dist.observe.live import Tail
from ringmaster_dist.profiles import base_seconds

# --- efficiency --------------------------------------------------------------------------------------------------

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
        "of sum 1/tau": round(summary["gradients_per_second"] / rate, 3),
        "gradients/s": round(summary["gradients_per_second"], 1),
        "sum 1/tau": round(rate, 1),
        "seconds": round(summary["seconds"], 1),
    }


def interrupted(interrupt: bool, seconds: float) -> dict[str, Any]:
    summary, trace = train(
        *_PACED, "cluster.workers=8", f"budget.seconds={seconds}", "method=ringmaster", "method.threshold=2",
        f"method.interrupt={interrupt}",
    )  # fmt: skip
    late = sorted(_lateness(trace, summary["per_worker"]))
    row: dict[str, Any] = {_INTERRUPTED[0]: "on" if interrupt else "off", "wasted": f"{summary['wasted_fraction']:.0%}"}
    if interrupt and late:
        row |= {
            "restarts": summary["interrupted"],
            "late p50 ms": round(1e3 * late[len(late) // 2][0], 1),
            "late p95 ms": round(1e3 * late[int(0.95 * len(late))][0], 1),
            "beyond limit": f"{sum(seconds > limit for seconds, limit in late)} of {len(late)}",
        }
    return row


def _lateness(trace: list[dict[str, Any]], per_worker: dict[str, dict[str, Any]]) -> list[tuple[float, float]]:
    """For gradients whose predecessor was interrupted: how late they began, and the limit of 20 ms + 5 % of tau.

    A worker is interrupted when a newer version makes its own stale, and it restarts with that newer version. So its
    lateness is the time from the making of that version to its restart.
    """
    made = {record["version"] + 1: record["time"] for record in trace if record["verdict"] == "accepted"}
    late = []
    for worker, facts in per_worker.items():
        own = [record for record in trace if str(record["worker"]) == worker]
        for before, record in pairwise(own):
            was_interrupted = record["sequence"] > before["sequence"] + 1
            if was_interrupted and record["gradient_version"] in made:
                began = record["time"] - record["compute_seconds"]
                late.append((began - made[record["gradient_version"]], 0.020 + 0.05 * facts["base_seconds"]))
    return late


# --- time to loss ------------------------------------------------------------------------------------------------

_WORKERS = 8
_COMMON = ["problem=nanochat", "model=nanochat_tiny", "data=stdlib", "problem.validation_rows=16", "eval.every=1",
           f"cluster.workers={_WORKERS}", "cluster.profile=linear", "cluster.unit_seconds=0.1"]  # fmt: skip
# A method that takes one gradient at a time needs smaller steps than a method that averages several.
_METHODS: dict[str, tuple[list[str], list[float]]] = {
    "ringmaster": (["method=ringmaster", "method.threshold=8"], [1.0, 2.5]),
    "ringmaster_agnostic": (["method=ringmaster_agnostic"], [25.0, 50.0]),
    "rennala": (["method=rennala", "method.batch=4"], [2.5, 5.0]),
    "delay_adaptive": (["method=delay_adaptive"], [1.0, 2.5]),
    "asynchronous": (["method=asynchronous"], [1.0, 2.5]),
    "synchronous": (["method=synchronous"], [2.5, 5.0]),
}
_DDP_ETAS = [2.5, 5.0]


def time_to_loss(quick: bool, as_json: bool) -> None:
    target, limit, num_etas = (6.0, 40.0, 1) if quick else (5.0, 90.0, 2)
    results = []
    for name in ["ringmaster"] if quick else _METHODS:
        overrides, etas = _METHODS[name]
        results.append(_best(partial(_ours, name, overrides), etas[-num_etas:], target, limit))
    ddp = _best(_ddp, _DDP_ETAS[-num_etas:], target, limit)
    without_optimizers = {"time to loss": "DDP, its optimizers' time left out",
                          "seconds": ddp["seconds"] - ddp["optimizer_seconds"]}  # fmt: skip
    results += [ddp, ddp | without_optimizers]
    rows = [_row(result, results[0]["seconds"], limit) for result in results]
    columns = ["time to loss", "x ringmaster", "seconds", "eta", "updates", "loss"]
    show(f"time-to-loss {target:g}", columns, rows, as_json)


def _best(
    run: Callable[[float, float, float], dict[str, Any]], etas: list[float], target: float, limit: float
) -> dict[str, Any]:
    """The fastest of several step sizes, the larger first. A run is stopped when it is slower than the best so far."""
    best = run(etas[-1], target, limit)
    for eta in reversed(etas[:-1]):
        result = run(eta, target, min(limit, best["seconds"]))
        best = result if result["seconds"] < best["seconds"] else best
    return best


def _row(result: dict[str, Any], ours: float, limit: float) -> dict[str, Any]:
    reached = math.isfinite(result["seconds"])
    return {
        "time to loss": result["time to loss"],
        "x ringmaster": f"{result['seconds'] / ours:.2f}" if reached else "",
        "seconds": round(result["seconds"], 1) if reached else f"not in {limit:g}",
        "eta": result["eta"],
        "updates": result["updates"],
        "loss": round(result["loss"], 3),
    }


def _ours(name: str, overrides: list[str], eta: float, target: float, limit: float) -> dict[str, Any]:
    """A run of ours, which is stopped when it has reached the target."""
    tail: Tail | None = None
    last, seconds = {"loss": math.inf, "version": 0}, math.inf

    def watch(process: subprocess.Popen[bytes], directory: Path) -> None:
        nonlocal tail, last, seconds
        tail = tail or Tail(directory / "metrics.jsonl")
        for row in tail.new():
            if "loss" in row and math.isinf(seconds):
                last = row
                if row["loss"] <= target:
                    seconds = row["time"]
                    process.send_signal(signal.SIGINT)

    train(*_COMMON, *overrides, f"method.eta={eta}", "budget.updates=null", f"budget.seconds={limit}",
          f"run.samples={1 + int(2 * limit)}", watch=watch)  # fmt: skip
    return {"time to loss": name, "seconds": seconds, "eta": eta, "updates": last["version"], "loss": last["loss"]}


def _ddp(eta: float, target: float, limit: float) -> dict[str, Any]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={_WORKERS}",
               "-m", "ringmaster_dist.bench.ddp", str(eta), str(target), str(limit), *_COMMON]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"the DDP run failed: {done.stderr.strip()[-2000:]}")
    facts = json.loads(done.stdout.strip().splitlines()[-1])
    return {
        "time to loss": "DDP (gloo) + torch.optim.Muon",
        "seconds": facts["seconds"] if facts["reached"] else math.inf,
        "eta": eta,
        "updates": facts["steps"],
        "loss": facts["loss"],
        "optimizer_seconds": facts["optimizer_seconds"],
    }
