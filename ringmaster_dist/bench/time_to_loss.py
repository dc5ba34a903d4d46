"""``ringmaster bench time-to-loss``: wall seconds until the validation loss reaches a target, in real processes.

Eight paced workers (`linear`: the slowest takes eight times as long as the quickest) train the tiny NanoChat on the
standard library: every method here, and DistributedDataParallel over gloo with torch.optim.Muon; each with the best eta
of a small grid. torch.optim.Muon computes in bf16, which some processors emulate: so DDP is also shown without the time
its optimizers take.
"""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ringmaster_dist.bench import show
from ringmaster_dist.config.errors import UserError
from ringmaster_dist.observe.records import MetricsRow
from ringmaster_dist.observe.run_files import METRICS, Tail

_WORKERS = 8
_COMMON = ["problem=nanochat", "model=nanochat_tiny", "data=stdlib", "problem.validation_rows=16", "eval.every=1",
           f"cluster.workers={_WORKERS}", "cluster.profile=linear", "cluster.unit_seconds=0.1",
           "run.report=false"]  # fmt: skip
# Who takes one gradient at a time needs smaller steps than who averages several.
_METHODS: dict[str, tuple[list[str], list[float]]] = {
    "ringmaster": (["method=ringmaster", "method.threshold=8"], [1.0, 2.5]),
    "ringmaster_agnostic": (["method=ringmaster_agnostic"], [25.0, 50.0]),
    "rennala": (["method=rennala", "method.batch=4"], [2.5, 5.0]),
    "delay_adaptive": (["method=delay_adaptive"], [1.0, 2.5]),
    "asynchronous": (["method=asynchronous"], [1.0, 2.5]),
    "synchronous": (["method=synchronous"], [2.5, 5.0]),
}
_DDP_ETAS = [2.5, 5.0]
_COLUMNS = ["time to loss", "x ringmaster", "seconds", "eta", "updates", "loss"]


def run(quick: bool, as_json: bool) -> None:
    target, limit = (6.0, 40.0) if quick else (5.0, 90.0)
    names = ["ringmaster"] if quick else list(_METHODS)
    rows = measure(target, limit, names, 1 if quick else 2)
    show(f"time-to-loss {target:g}", _COLUMNS, rows, as_json)


def measure(target: float, limit: float, names: list[str], num_etas: int) -> list[dict[str, Any]]:
    results = []
    for name in names:
        overrides, etas = _METHODS[name]
        results.append(_best(partial(_ours, name, overrides), etas[-num_etas:], target, limit))
    best = _best(_ddp, _DDP_ETAS[-num_etas:], target, limit)
    results.append(best)
    results.append({**best, "time to loss": "DDP, its optimizers' time left out",
                    "seconds": best["seconds"] - best["optimizer_seconds"]})  # fmt: skip
    ours = results[0]["seconds"]
    return [_row(result, ours, limit) for result in results]


def _best(
    run: Callable[[float, float, float], dict[str, Any]], etas: list[float], target: float, limit: float
) -> dict[str, Any]:
    """The quickest of several step sizes, the larger first; none is given longer than the best before it took."""
    best: dict[str, Any] | None = None
    for eta in reversed(etas):
        result = run(eta, target, limit if best is None else min(limit, best["seconds"]))
        best = result if best is None or result["seconds"] < best["seconds"] else best
    assert best is not None
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
    """Ends the run when it has got there."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder, "run")
        command = [sys.executable, "-m", "ringmaster_dist", "train", *_COMMON, *overrides, f"method.eta={eta}",
                   f"run.dir={directory}",
                   "budget.updates=null", f"budget.seconds={limit}", f"run.samples={1 + int(2 * limit)}"]  # fmt: skip
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        tail = Tail(directory / METRICS, MetricsRow.from_json)
        loss, updates, seconds = math.inf, 0, math.inf
        while process.poll() is None and math.isinf(seconds):
            for row in tail.new():
                if (found := row.evaluation.get("loss")) is None:
                    continue
                loss, updates = found, row.version
                if loss <= target:
                    seconds = row.time
                    process.send_signal(signal.SIGINT)
                    break
            time.sleep(0.05)
        _, errors = process.communicate()
    if process.returncode:
        raise UserError(f"the run that was to be measured failed: {errors.strip()}")
    return {"time to loss": name, "seconds": seconds, "eta": eta, "updates": updates, "loss": loss}


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
