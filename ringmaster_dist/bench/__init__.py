"""The measured comparisons. Each compares in one process and run, takes the best of several, and says what it ran."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Mapping
from typing import Any


def best_and_worst(work: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Seconds of the quickest and the slowest repetition."""
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return min(seconds), max(seconds)


def by_turns(candidates: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each, after a warm-up. They take turns, so that what disturbs the machine disturbs all of them."""
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    order = list(candidates)
    for turn in range(rounds + 1):
        for name in order:
            began = time.perf_counter()
            candidates[name]()
            if turn:
                seconds[name].append(time.perf_counter() - began)
        order.reverse()  # nobody always follows the same one
    return seconds


def compared(title: str, seconds: Mapping[str, list[float]], baseline: str) -> list[dict[str, Any]]:
    """A row for each: its best beside the baseline's, and its worst."""
    best = min(seconds[baseline])
    return [
        {title: name, "relative": f"{min(times) / best:.2f}x", "ms": round(1e3 * min(times), 1),
         "worst ms": round(1e3 * max(times), 1)}
        for name, times in seconds.items()
    ]  # fmt: skip


def machine() -> dict[str, Any]:
    """Where and with what the figures were taken."""
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
    """A table, or the same as one line of JSON."""
    if as_json:
        print(json.dumps({"bench": title, "machine": machine(), "rows": rows}))
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.width = max(console.width, 110)
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, justify="left" if column == columns[0] else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(str(row.get(column, "")) for column in columns))
    console.print(table)
    console.print(", ".join(f"{key} {value}" for key, value in machine().items()), highlight=False)
