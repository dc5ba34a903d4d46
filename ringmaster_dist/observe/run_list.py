"""Finds runs, says how each stands in one line, and compares their configurations.

A finished run is described by its summary, and another one by its configuration and the end of its metrics. So
thousands of runs are listed in seconds. Nothing here writes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringmaster_dist.errors import printable
from ringmaster_dist.observe.page_data import flat
from ringmaster_dist.observe.records import Summary, objective_of
from ringmaster_dist.observe.report import FOLDER
from ringmaster_dist.observe.run_files import CONFIG, METRICS, SUMMARY, TRACE, RunDirectoryError, RunFiles

_DEPTH = 4  # folders within folders that are searched
_OF_A_RUN = {TRACE, METRICS, SUMMARY}  # no other program is expected to write these names
_WRONG_TYPE = (TypeError, AttributeError)  # what an edited file raises


@dataclass(frozen=True)
class RunLine:
    """How a run stands. What is not known is empty or None."""

    path: Path
    state: str  # running, finished, stopped, diverged, crashed or damaged
    note: str = ""  # the reason, for a damaged run
    problem: str = ""
    method: str = ""
    objective: str = ""  # gap or loss
    value: float | None = None  # of the objective in the last evaluation
    best: float | None = None  # of the objective in the best one, for which weights were kept
    updates: int = 0
    seconds: float = 0.0  # on the clock of the run
    clock: str = ""  # real or virtual
    workers: int | None = None
    changed: float = 0.0  # when a file of the run was written last, in seconds since 1970

    @property
    def result(self) -> str:
        """The objective in words."""
        return f"{self.objective} {self.value:.4g}" if self.value is not None else ""

    @property
    def time(self) -> str:
        if not self.seconds:
            return ""
        return f"{self.seconds:,.1f} s" + (" virtual" if self.clock == "virtual" else "")

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "path": str(self.path)}


def find_runs(folder: Path) -> Iterator[Path]:
    """The runs in a folder, at most `_DEPTH` folders below it. A folder inside a run is not searched.

    Raises RunDirectoryError if there is no such folder.
    """
    if not folder.is_dir():
        raise RunDirectoryError(f"{folder} is not a directory: give a folder of runs")
    return _search(folder, _DEPTH)


def _search(folder: Path, depth: int) -> Iterator[Path]:
    try:
        with os.scandir(folder) as entries:
            inside = list(entries)
    except OSError:  # a folder that may not be read, or has just been removed
        return
    if _holds_run(folder, {entry.name for entry in inside}):
        yield folder
    elif depth:
        for entry in sorted(inside, key=lambda entry: entry.name):
            if not entry.name.startswith(".") and entry.is_dir():
                yield from _search(folder / entry.name, depth - 1)


def is_run(folder: Path) -> bool:
    """Whether the folder is certainly a run: its configuration or its summary is one of ours."""
    files = RunFiles(folder)
    try:
        return folder.is_dir() and bool(files.config())
    except RunDirectoryError:
        return files.summary() is not None and (folder / TRACE).exists()


def _holds_run(folder: Path, names: set[str]) -> bool:
    """Whether this folder is a run. A configuration alone has to be one of ours: other programs have such a file."""
    return bool(names & _OF_A_RUN) or (CONFIG in names and is_run(folder))


def without_pages(paths: Sequence[Path]) -> list[Path]:
    """The paths without the page of a multirun, which a pattern such as runs/compare/* matches too."""
    return [path for path in paths if path.name != FOLDER or is_run(path)] or list(paths)


def describe(path: Path) -> RunLine:
    """How the run in a directory stands. A damaged directory gives a line too."""
    files = RunFiles(path, tolerant=True)
    changed = max(_written(path / name) for name in (CONFIG, METRICS, SUMMARY))
    try:
        config = files.config()
        if (summary := files.summary()) is not None:
            return _of_summary(path, summary, changed)
        if (path / SUMMARY).exists():
            raise RunDirectoryError(f"{SUMMARY} cannot be read")
        return _of_files(files, config, changed)
    except (RunDirectoryError, OSError, *_WRONG_TYPE) as error:
        reason = f"a value has the wrong type ({error})" if isinstance(error, _WRONG_TYPE) else str(error)
        return RunLine(path, "damaged", reason.removeprefix(f"{path} ").removeprefix(f"{path}/"), changed=changed)


def _of_summary(path: Path, summary: Summary, changed: float) -> RunLine:
    state = "diverged" if summary.diverged else "finished" if summary.ended == "budget" else "stopped"
    objective = objective_of(summary.evaluation)
    return RunLine(
        path, state, problem=summary.problem, method=summary.method, objective=objective,
        value=_number(summary.evaluation.get(objective)), best=_number(summary.best_value), updates=summary.updates,
        seconds=summary.seconds, clock=summary.clock, workers=summary.num_workers, changed=changed,
    )  # fmt: skip


def _of_files(files: RunFiles, config: Mapping[str, Any], changed: float) -> RunLine:
    """The line of a run without a summary: it is running, or its process has died."""
    row, evaluation = files.newest_row()
    objective = objective_of(evaluation)
    return RunLine(
        files.path, "running" if files.is_running() else "crashed",
        problem=config["problem"].get("name", ""), method=config["method"].get("name", ""), objective=objective,
        value=_number(evaluation.get(objective)), updates=row.version if row else 0, seconds=row.time if row else 0.0,
        clock="virtual" if "simulation" in config else "real",
        workers=config["cluster"].get("workers"), changed=changed,
    )  # fmt: skip


def _written(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


_ORDER: dict[str, Callable[[RunLine], Any]] = {
    "changed": lambda line: -line.changed,
    "loss": lambda line: math.inf if line.value is None else line.value,
    "updates": lambda line: -line.updates,
    "time": lambda line: -line.seconds,
    "name": lambda line: str(line.path),
    "state": lambda line: line.state,
}


def in_order(lines: Sequence[RunLine], order: str) -> list[RunLine]:
    """The newest, the lowest objective, the most updates or the longest first, or by name or state."""
    return sorted(lines, key=_ORDER[order])


def differences(configs: Sequence[Mapping[str, Any]], ignored: Collection[str]) -> dict[str, list[Any]]:
    """The values of each key in which the configurations differ. None stands for a key that one does not have.

    The ``ignored`` keys are left out.
    """
    each = [flat(dict(config)) for config in configs]
    keys = dict.fromkeys(key for config in each for key in config)
    found = {key: [config.get(key) for config in each] for key in keys if key not in ignored}
    return {key: values for key, values in found.items() if any(value != values[0] for value in values)}


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()) -> str:
    """Plain text in columns that are as wide as their content. ``right`` names the columns of numbers."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for cell, width, column in zip(cells, widths, columns, strict=True)
        ]
        return "  ".join(padded).rstrip()

    return "\n".join(line(cells) for cells in (columns, *rows))
