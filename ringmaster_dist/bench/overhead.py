"""``ringmaster bench overhead``: what it costs the server to measure a run.

The notes taken of a push and the making of a row are timed by themselves, many times over, as processor time of one
core; a difference of two throughputs would drown in the noise of the machine. The share is what they take of a second
at the rate of gradients measured in a real run of workers that push as fast as they can, and with the paper's model at
the rate the server alone could reach.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ringmaster_dist.algorithm.layout import GEOMETRY_MAPS, Layout, Parameter
from ringmaster_dist.algorithm.methods import Change, Method
from ringmaster_dist.algorithm.schedules import Constant
from ringmaster_dist.algorithm.update import Update
from ringmaster_dist.bench import show
from ringmaster_dist.bench.update import paper_parameters
from ringmaster_dist.config.errors import UserError
from ringmaster_dist.observe.metrics import Metrics
from ringmaster_dist.protocol import PROTOCOL_VERSION, JoinRequest, Push, Receipt, Snapshot, Verdict
from ringmaster_dist.server.core import ServerCore
from ringmaster_dist.server.service import Service, Settings

_ROW_SECONDS = 0.3  # between rows: 60 s of budget, 200 samples
_WORKERS = 8
_DIM = 1729
_COLUMNS = ["overhead", "of the time", "us/push", "ms/row", "ms/norms", "pushes/s"]


class _Journal:
    """Keeps nothing."""

    def arrival(self, time: float, worker: int, push: Push, receipt: Receipt) -> None: ...

    def membership(self, worker: int, event: str, pushes: int, slot: int) -> None: ...

    def change(self, time: float, change: Change) -> None: ...

    def flush(self) -> None: ...

    def mark(self) -> dict[str, int]:
        return {}


def run(quick: bool, as_json: bool) -> None:
    torch.set_num_threads(1)  # as a server computes unless told otherwise
    quadratic = Layout([Parameter("x", (_DIM,))], GEOMETRY_MAPS["euclidean"])
    paper = Layout(paper_parameters(), GEOMETRY_MAPS["muon"])
    rows = [
        measure("a quadratic, 8 real workers at full speed", quadratic, _real_rate(2.0 if quick else 15.0)),
        measure("the paper's model, the server alone", paper, None),
    ]
    show("overhead", _COLUMNS, rows, as_json)


def measure(name: str, layout: Layout, rate: float | None) -> dict[str, Any]:
    """``rate`` of pushes per second; None: that of the service without a wire."""
    core = ServerCore(torch.zeros(layout.size), Method(Constant(1e-3, 0.05, 64)), Update(layout))
    service = Service(core, Settings("", "", "", 1e12, 1e12, 1e12, max_invalid=10), _Journal())
    sessions = [service.join(JoinRequest(PROTOCOL_VERSION, "", -1)).wait().session for _ in range(_WORKERS)]
    gradient, metrics = torch.randn(layout.size), Metrics(layout, 0)
    sequence = iter(range(1 << 60))

    def exchange() -> None:
        number = next(sequence)
        service.push(sessions[number % _WORKERS], Push(number, core.version, gradient, 1.0, 0.01))
        service.compute()

    exchange()
    alone = 1.0 / _seconds(exchange, 10)

    def notes() -> None:
        number = next(sequence)
        push, receipt = Push(number, number, gradient, 1.0, 0.01), Receipt(Verdict.ACCEPTED, 2, number, number)
        waited = time.perf_counter() - time.perf_counter()
        service.meter.pushed(waited, gradient.nbytes)
        metrics.arrival(number * 0.01, number % _WORKERS, push, receipt)
        service.meter.sent(core.snapshot)
        service.meter.applied(core.snapshot, Snapshot(number, gradient), time.perf_counter() - time.perf_counter())

    def row() -> None:
        json.dumps(metrics.row(service, {}, dict.fromkeys(("pipes", "received", "sent", "refused"), 0)))

    notes()
    norms = _seconds(row, 1)  # the first has them; later ones only when they have become cheap enough
    per_row = _seconds(row, 50)
    per_push = _seconds(notes, 20_000)
    pushes = rate or alone
    norms_share = 1 / 200 if norms > _ROW_SECONDS / 200 else norms / _ROW_SECONDS
    return {
        "overhead": name,
        "of the time": f"{pushes * per_push + per_row / _ROW_SECONDS + norms_share:.2%}",
        "us/push": round(1e6 * per_push, 1),
        "ms/row": round(1e3 * per_row, 2),
        "ms/norms": round(1e3 * norms, 2),
        "pushes/s": round(pushes, 1),
    }


def _seconds(work: Callable[[], None], times: int) -> float:
    """Processor seconds of one, on average."""
    began = time.process_time()
    for _ in range(times):
        work()
    return (time.process_time() - began) / times


def _real_rate(seconds: float) -> float:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "ringmaster_dist", "train", f"run.dir={folder}/run", f"problem.dim={_DIM}",
                   f"cluster.workers={_WORKERS}", "cluster.profile=none", "method=asynchronous",
                   "budget.updates=null", f"budget.seconds={seconds}", "run.report=false"]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise UserError(f"the run that was to be measured failed: {done.stderr.strip()}")
        return float(json.loads(Path(folder, "run", "summary.json").read_text())["gradients_per_second"])
