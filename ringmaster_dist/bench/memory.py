"""``ringmaster bench memory``: the most memory a server and a worker of the paper's model take.

The server beside its iterate and momentum, which it cannot do without; a worker beside a plain training loop over the
same model in one process, optimizers included. What a process has before it begins, Python and torch, is left out. The
context is 256 tokens and a batch one row, so that what a gradient itself needs does not hide the rest.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ringmaster_dist.bench import show
from ringmaster_dist.bench.update import paper_parameters
from ringmaster_dist.config.errors import UserError

_SETTINGS = ["problem=nanochat", "model=nanochat_d6", "model.sequence_len=256", "problem.batch=1", "data=stdlib",
             "problem.validation_rows=1"]  # fmt: skip
_COLUMNS = ["memory", "relative", "MB", "beside", "MB of that"]


def run(quick: bool, as_json: bool) -> None:
    show("memory", _COLUMNS, measure(updates=8 if quick else 60), as_json)


def measure(updates: int) -> list[dict[str, Any]]:
    needed = 2 * 4 * sum(parameter.size for parameter in paper_parameters())
    plain = int(subprocess.run([sys.executable, "-m", __name__], capture_output=True, text=True, check=True).stdout)
    server, worker = _peaks(updates)
    return [
        _row("server, 2 workers", server, "iterate + momentum", needed),
        _row("a worker", worker, "plain loop with torch.optim", plain),
    ]


def _row(name: str, peak: int, beside: str, size: int) -> dict[str, Any]:
    return {"memory": name, "relative": f"{peak / size:.2f}x", "MB": round(peak / 1e6), "beside": beside,
            "MB of that": round(size / 1e6)}  # fmt: skip


def _peaks(updates: int) -> tuple[int, int]:
    """Of the server and of the first worker, in bytes, above what they began with."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "ringmaster_dist", "train", *_SETTINGS, f"run.dir={folder}/run",
                   "cluster.workers=2", "cluster.profile=none", "run.report=false", "checkpoint.every=null",
                   f"budget.updates={updates}", "budget.seconds=600"]  # fmt: skip
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        first: dict[str, int] = {}
        peak: dict[str, int] = {}
        while process.poll() is None:
            for name, status in _named(process.pid, ("server", "worker-slot-0")):
                first.setdefault(name, _bytes(status, "VmRSS"))
                peak[name] = max(peak.get(name, 0), _bytes(status, "VmHWM"))
            time.sleep(0.02)
        _, errors = process.communicate()
    if process.returncode or len(peak) < 2:
        raise UserError(f"the run that was to be measured failed: {errors.strip()}")
    return tuple(peak[name] - first[name] for name in ("server", "worker-slot-0"))  # type: ignore[return-value]


def _named(ancestor: int, names: tuple[str, ...]) -> list[tuple[str, dict[str, str]]]:
    """The status of the processes below another that have one of these names."""
    table = {}
    for path in Path("/proc").glob("[0-9]*/status"):
        try:
            table[int(path.parent.name)] = dict(
                line.split(":\t", 1) for line in path.read_text().splitlines() if ":\t" in line
            )
        except OSError:  # it has ended meanwhile
            continue

    def below(pid: int) -> bool:
        while pid > 1 and pid in table:
            if pid == ancestor:
                return True
            pid = int(table[pid]["PPid"])
        return False

    return [(s["Name"], s) for pid, s in table.items() if s["Name"] in names and "VmHWM" in s and below(pid)]


def _bytes(status: dict[str, str], key: str) -> int:
    return 1024 * int(status[key].split()[0])


def _plain() -> int:
    """A few steps of the loop everybody writes; how much the process has grown at most."""
    import torch

    from ringmaster_dist.bench.ddp import optimizers_of
    from ringmaster_dist.problems.nanochat.model import NanoChat, NanoChatConfig

    torch.set_num_threads(1)
    status = Path("/proc/self/status")

    def read(key: str) -> int:
        return next(1024 * int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith(key))

    before = read("VmRSS")
    model = NanoChat(NanoChatConfig(sequence_len=256))
    optimizers = optimizers_of(model, 0.02)
    for _ in range(3):
        tokens = torch.randint(0, 8192, (1, 257))
        torch.autograd.backward(model(tokens[:, :-1], tokens[:, 1:]))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return read("VmHWM") - before


if __name__ == "__main__":
    print(_plain())
