"""The measured comparisons: which benches there are, how they take time, and how they show it.

A bench compares its candidates in one run, takes the best of several repetitions, and prints the machine with them.
"""

from __future__ import annotations

import importlib
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ringmaster_dist.observe.records import Arrival, Summary

BENCHES = {
    "simulator": "the paper's quadratic at full size, in virtual time",
    "update": "one server update of the paper's model, versus torch.optim.Muon",
    "gradient": "a gradient of the paper's model, versus a plain loop over the same module",
    "exchange": "a push and the snapshot that comes back, versus the same bytes over TCP, gloo, and Ray if installed",
    "links": "what overlap, a narrow wire and local steps are worth on slow links, in network namespaces (needs root)",
    "scale": "how large a cluster one server supports, from measured updates, simulated workers and assumed links",
    "server": "updates per second while many workers push, versus the rate that the time of one update allows",
    "time-to-loss": "seconds to a validation loss, versus DDP, DiLoCo and Ray; hours, or a small race if not named",
    "memory": "the most memory of a server and of a worker, versus the minimum that they need",
    "efficiency": "gradients delivered by paced workers versus their rates, and how fast stale work is interrupted",
    "overhead": "the share of the server's time that goes into measuring a run",
}
# The module and function of a bench, where that is not `run` of a module of its name.
_PLACES = {
    "update": ("arithmetic", "update"),
    "gradient": ("arithmetic", "gradient"),
    "time-to-loss": ("time_to_loss", "run"),
    "efficiency": ("paced", "efficiency"),
    "memory": ("resources", "memory"),
    "overhead": ("resources", "overhead"),
}


ON_DEVICES = ("update", "server")  # these take device=
_WIDEST = 400  # columns of a table, as text
LONG = ("time-to-loss",)  # these are quick, unless they are named


def run(name: str, *, quick: bool, as_json: bool, **settings: Any) -> None:
    """Runs one of `BENCHES` and prints its tables. Some have settings of their own."""
    module, function = _PLACES.get(name, (name, "run"))
    getattr(importlib.import_module(f"{__name__}.{module}"), function)(quick, as_json, **settings)


# --- time --------------------------------------------------------------------------------------------------------


def seconds_of(work: Callable[[], object], repeats: int) -> list[float]:
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return seconds


def best_and_worst(work: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Seconds of the fastest and of the slowest repetition."""
    seconds = seconds_of(work, repeats)
    return min(seconds), max(seconds)


def by_turns(candidates: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each candidate, after a warm-up. They take turns, so that a disturbance affects all of them."""
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    order = list(candidates)
    for turn in range(rounds + 1):
        for name in order:
            took = seconds_of(candidates[name], 1)
            seconds[name] += took if turn else []
        order.reverse()  # so that no candidate always follows the same one
    return seconds


def train(
    *overrides: str, watch: Callable[[subprocess.Popen[bytes], Path], None] = lambda process, directory: None
) -> tuple[Summary, list[Arrival]]:
    """A real ``ringmaster train`` in its own processes. Returns its summary and the arrivals of its trace.

    ``watch`` is called with the process and the run directory, many times a second while the run lasts.
    """
    from ringmaster_dist.config.errors import UserError
    from ringmaster_dist.observe.run_files import RunFiles
    from ringmaster_dist.signals import STOPPED

    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as errors:
        directory = Path(folder, "run")
        command = [sys.executable, "-m", "ringmaster_dist", "train", f"run.dir={directory}", "run.report=false"]
        process = subprocess.Popen([*command, *overrides], stdout=subprocess.DEVNULL, stderr=errors)
        try:
            while process.poll() is None:
                watch(process, directory)
                time.sleep(0.02)
        finally:
            process.terminate()  # if this process is stopped
            process.wait()
        if process.returncode not in (0, *STOPPED):  # ``watch`` may stop it
            errors.seek(0)
            raise UserError(f"the run that was to be measured failed: {errors.read().decode().strip()}")
        files = RunFiles(directory)
        return files.outcome(), files.arrivals()


# --- tables ------------------------------------------------------------------------------------------------------


def compared(title: str, seconds: Mapping[str, list[float]], baseline: str) -> list[dict[str, Any]]:
    """A row for each candidate: its best versus the baseline's best, and its worst."""
    best = min(seconds[baseline])
    return [
        {title: name, "relative": f"{min(times) / best:.2f}x", "ms": round(1e3 * min(times), 1),
         "worst ms": round(1e3 * max(times), 1)}
        for name, times in seconds.items()
    ]  # fmt: skip


def machine() -> dict[str, Any]:
    """The machine and the versions of the software."""
    import os

    import numpy
    import torch

    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "torch_threads": torch.get_num_threads(),
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def show(title: str, columns: list[str], rows: list[dict[str, Any]], as_json: bool) -> None:
    """Prints a table, or the same as one line of JSON."""
    if as_json:
        print(json.dumps({"bench": title, "machine": machine(), "rows": rows}))
        return
    from rich import box
    from rich.measure import Measurement
    from rich.table import Table

    from ringmaster_dist.observe.closing import Stdout

    console = Stdout()
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, justify="left" if column == columns[0] else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(str(row.get(column, "")) for column in columns))
    needed = Measurement.get(console, console.options.update(max_width=_WIDEST), table).maximum
    console.width = max(console.width, needed)  # a figure that is cut off is worse than a long line
    console.print(table)
    console.print(", ".join(f"{key} {value}" for key, value in machine().items()), highlight=False)
