"""``ringmaster bench memory`` and ``overhead``: what a run takes of a machine.

Memory is the most that a server and a worker of the paper's model take. The server is compared with its iterate and
momentum, which it cannot do without, and a worker with a plain training loop over the same model, optimizers included.
The memory of Python and torch is subtracted. The context is 256 tokens and a batch is one row, so that the memory of
the gradient's computation does not hide the rest.

Overhead is the share of the server's time that goes into measuring the run. The notes of a push and the making of a row
are timed by themselves, as processor time of one core, because the difference of two throughputs would drown in noise.
The share is taken at the rate of a real run whose workers push as fast as they can, and, for the paper's model, at the
rate that the server alone could reach.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ringmaster_dist.algorithm.layout import GEOMETRY_MAPS, Layout, Parameter
from ringmaster_dist.algorithm.methods import Method
from ringmaster_dist.algorithm.schedules import Constant
from ringmaster_dist.algorithm.update import Update
from ringmaster_dist.bench import show, train
from ringmaster_dist.bench.arithmetic import optimizers_of, paper_layout
from ringmaster_dist.bench.peers import descendants
from ringmaster_dist.observe.metrics import Metrics
from ringmaster_dist.problems.nanochat.model import NanoChat, NanoChatConfig
from ringmaster_dist.protocol import PROTOCOL_VERSION, JoinRequest, Push, Receipt, Snapshot, Verdict
from ringmaster_dist.server.core import ServerCore
from ringmaster_dist.server.outlets import NoJournal
from ringmaster_dist.server.service import Service, Settings

_MODEL = ["problem=nanochat", "model=nanochat_d6", "model.sequence_len=256", "problem.batch=1", "data=stdlib",
          "problem.validation_rows=1", "problem.final_tokens=256", "cluster.workers=2", "cluster.profile=none",
          "checkpoint.every=null", "budget.seconds=600"]  # fmt: skip
_ROW_SECONDS = 0.3  # between rows: 60 s of budget, 200 samples
_WORKERS, _DIM = 8, 1729


# --- memory ------------------------------------------------------------------------------------------------------


def memory(quick: bool, as_json: bool) -> None:
    needed = 2 * 4 * paper_layout().size
    plain = int(subprocess.run([sys.executable, "-m", __name__], capture_output=True, text=True, check=True).stdout)
    first: dict[str, int] = {}
    peak: dict[str, int] = {}

    def watch(process: subprocess.Popen[bytes], directory: Path) -> None:
        for status in _statuses(process.pid):
            if status.get("Name") in ("server", "worker-slot-0") and "VmHWM" in status:
                first.setdefault(status["Name"], _bytes(status["VmRSS"]))
                peak[status["Name"]] = max(peak.get(status["Name"], 0), _bytes(status["VmHWM"]))

    train(*_MODEL, f"budget.updates={8 if quick else 60}", watch=watch)
    rows = [
        _memory_row("server, 2 workers", peak["server"] - first["server"], "iterate + momentum", needed),
        _memory_row("a worker", peak["worker-slot-0"] - first["worker-slot-0"], "plain loop with torch.optim", plain),
    ]
    show("memory", ["memory", "relative", "MB", "versus", "MB of that"], rows, as_json)


def _memory_row(name: str, peak: int, other: str, size: int) -> dict[str, Any]:
    return {"memory": name, "relative": f"{peak / size:.2f}x", "MB": round(peak / 1e6), "versus": other,
            "MB of that": round(size / 1e6)}  # fmt: skip


def _statuses(pid: int) -> list[dict[str, str]]:
    """/proc/PID/status of a process and its descendants."""
    found = []
    try:
        for each in descendants(pid):
            lines = Path(f"/proc/{each}/status").read_text().splitlines()
            found.append(dict(line.split(":\t", 1) for line in lines if ":\t" in line))
    except OSError:  # a process has ended meanwhile; the next look sees the others
        pass
    return found


def _bytes(kilobytes: str) -> int:
    return 1024 * int(kilobytes.split()[0])


def _plain_loop() -> int:
    """Does a few steps of an ordinary training loop. Returns by how much the process has grown at most."""
    torch.set_num_threads(1)
    before = _bytes(_statuses(os.getpid())[0]["VmRSS"])
    model = NanoChat(NanoChatConfig(sequence_len=256))
    optimizers = optimizers_of(model, 0.02)
    for _ in range(3):
        tokens = torch.randint(0, 8192, (1, 257))
        torch.autograd.backward(model(tokens[:, :-1], tokens[:, 1:]))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return _bytes(_statuses(os.getpid())[0]["VmHWM"]) - before


# --- overhead ----------------------------------------------------------------------------------------------------


def overhead(quick: bool, as_json: bool) -> None:
    torch.set_num_threads(1)  # the default of a server
    summary, _ = train(
        f"problem.dim={_DIM}", f"cluster.workers={_WORKERS}", "cluster.profile=none", "method=asynchronous",
        "budget.updates=null", f"budget.seconds={2.0 if quick else 15.0}",
    )  # fmt: skip
    quadratic = Layout([Parameter("x", (_DIM,))], GEOMETRY_MAPS["euclidean"])
    rows = [
        _overhead_row("a quadratic, 8 real workers at full speed", quadratic, summary.gradients_per_second),
        _overhead_row("the paper's model, the server alone", paper_layout(), None),
    ]
    show("overhead", ["overhead", "of the time", "us/push", "ms/row", "ms/norms", "pushes/s"], rows, as_json)


def _overhead_row(name: str, layout: Layout, rate: float | None) -> dict[str, Any]:
    """``rate`` is in pushes per second. None is the rate of the service without a network."""
    core = ServerCore(torch.zeros(layout.size), Method(Constant(1e-3, 0.05, 64)), Update(layout))
    service = Service(core, Settings("", "", "", 1e12, 1e12, 1e12, max_invalid=10), NoJournal())
    sessions = [service.join(JoinRequest(PROTOCOL_VERSION, "", -1)).wait().session for _ in range(_WORKERS)]
    gradient, metrics = torch.randn(layout.size), Metrics(layout, 0)
    sequence = iter(range(1 << 60))

    def exchange() -> None:
        number = next(sequence)
        service.push(sessions[number % _WORKERS], Push(number, core.version, gradient, 1.0, 0.01))
        service.compute()

    def notes() -> None:
        number = next(sequence)
        push, receipt = Push(number, number, gradient, 1.0, 0.01), Receipt(Verdict.ACCEPTED, 2, number, number)
        waited = time.perf_counter() - time.perf_counter()
        service.meter.pushed(waited, gradient.nbytes)
        metrics.arrival(number * 0.01, number % _WORKERS, push, receipt)
        service.meter.sent(core.snapshot)
        service.meter.applied(core.snapshot, Snapshot(number, gradient), time.perf_counter() - time.perf_counter())

    def row() -> None:
        counts = dict.fromkeys(("pipes", "received", "sent", "refused"), 0)
        json.dumps(metrics.row(service.measure(), {}, counts).to_json())

    exchange()
    pushes = _cpu_seconds(exchange, 10)
    notes()
    norms = _cpu_seconds(row, 1)  # the first row computes norms; later rows do so only when norms are cheap enough
    per_row, per_push = _cpu_seconds(row, 50), _cpu_seconds(notes, 20_000)
    pushes_per_second = rate or 1.0 / pushes
    norms_share = 1 / 200 if norms > _ROW_SECONDS / 200 else norms / _ROW_SECONDS
    return {
        "overhead": name,
        "of the time": f"{pushes_per_second * per_push + per_row / _ROW_SECONDS + norms_share:.2%}",
        "us/push": round(1e6 * per_push, 1),
        "ms/row": round(1e3 * per_row, 2),
        "ms/norms": round(1e3 * norms, 2),
        "pushes/s": round(pushes_per_second, 1),
    }


def _cpu_seconds(work: Callable[[], None], times: int) -> float:
    """Processor seconds of one call, on average."""
    began = time.process_time()
    for _ in range(times):
        work()
    return (time.process_time() - began) / times


if __name__ == "__main__":
    print(_plain_loop())
