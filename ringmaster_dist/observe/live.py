"""A run as it goes on, from what it writes: read by whoever wants to look, without asking the server."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

log = logging.getLogger(__name__)

_REFRESH_SECONDS = 0.5
_PLAIN_LINE_SECONDS = 10.0
_LISTED_WORKERS = 16
_SMOOTHING = 0.05


class Tail:
    """The whole lines that a growing file has got since the last look."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0

    def new(self) -> Iterator[dict[str, Any]]:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                try:
                    yield json.loads(line)
                except json.JSONDecodeError:  # the file was cut and has grown again meanwhile: see State.look
                    continue


class State:
    """What is known of a run."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._begin()

    def _begin(self) -> None:
        self._trace, self._metrics = Tail(self._directory / "trace.jsonl"), Tail(self._directory / "metrics.jsonl")
        self._terms = self._size_of_terms()
        self.version, self.seconds, self.live = 0, 0.0, 0
        self.loss: float | None = None
        self.evaluation: dict[str, float | None] = {}
        self.diverged = False
        self.workers: dict[int, dict[str, Any]] = {}
        self._recent: list[tuple[float, int]] = []

    def _size_of_terms(self) -> int:
        path = self._directory / "terms.jsonl"
        return path.stat().st_size if path.exists() else 0

    def look(self) -> None:
        """Reads what is new; everything, where the server was started again and has cut its files."""
        if self._size_of_terms() != self._terms:
            self._begin()
        for record in self._trace.new():
            worker = self.workers.setdefault(
                record["worker"], {"accepted": 0, "stale": 0, "invalid": 0, "tau": record["compute_seconds"]}
            )
            worker[record["verdict"]] += 1
            worker["last"], worker["delay"] = record["verdict"], record["delay"]
            worker["tau"] += 0.2 * (record["compute_seconds"] - worker["tau"])
            if record["verdict"] == "accepted" and record["loss"] is not None:
                before = record["loss"] if self.loss is None else self.loss
                self.loss = before + _SMOOTHING * (record["loss"] - before)
            self.version, self.seconds = max(self.version, record["version"]), record["time"]
        for row in self._metrics.new():
            self.live, self.version = row.get("workers", 0), max(self.version, row["version"])
            self.seconds = max(self.seconds, row["time"])
            self.evaluation.update(row.get("evaluation", {}))
            self.diverged = row.get("diverged", False)
        self._recent = [*self._recent[-20:], (self.seconds, self.version)]

    @property
    def updates_per_second(self) -> float:
        (t0, v0), (t1, v1) = self._recent[0], self._recent[-1]
        return (v1 - v0) / (t1 - t0) if t1 > t0 else 0.0

    def line(self) -> str:
        shown = [f"version {self.version:,}", f"{self.updates_per_second:.1f} updates/s"]
        if self.loss is not None:
            shown.append(f"loss {self.loss:.4g}")
        shown += [f"{'valid ' if name == 'loss' else ''}{name.replace('_', ' ')} "
                  f"{'not finite' if value is None else format(value, '.4g')}"
                  for name, value in self.evaluation.items()]  # fmt: skip
        if self.diverged:
            shown.append("DIVERGES")
        totals = {v: sum(w[v] for w in self.workers.values()) for v in ("accepted", "stale", "invalid")}
        pushes = sum(totals.values())
        if pushes:
            shown.append(f"accepted {totals['accepted'] / pushes:.0%}")
        return "  ".join(shown)


class View:
    """A calm table on a terminal, a line now and then elsewhere."""

    def __init__(self, directory: Path, console: Console, max_updates: float, max_seconds: float) -> None:
        self._state, self._console = State(directory), console
        self._max_updates, self._max_seconds = max_updates, max_seconds
        self._next: float = time.monotonic() + _REFRESH_SECONDS
        self._next_line = time.monotonic() + _REFRESH_SECONDS
        self._live: Live | None = None

    def update(self) -> None:
        """Called often; does something now and then. What cannot be shown does not stop who trains."""
        if time.monotonic() >= self._next:
            try:
                self._update(time.monotonic())
            except Exception as error:
                log.warning("the run cannot be shown any more (%s: %s); it goes on", type(error).__name__, error)
                self._next = math.inf

    def _update(self, now: float) -> None:
        self._next = now + _REFRESH_SECONDS
        self._state.look()
        if self._console.is_terminal:
            if self._live is None:
                self._live = Live(console=self._console, auto_refresh=False, transient=True)
                self._live.start()
            self._live.update(self._render(), refresh=True)
        elif now >= self._next_line and self._state.workers:
            self._next_line = now + _PLAIN_LINE_SECONDS
            line = f"{self._fraction():4.0%}  {self._state.line()}"
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()

    def _fraction(self) -> float:
        state = self._state
        return min(1.0, max(state.version / self._max_updates, state.seconds / self._max_seconds))

    def _render(self) -> Group:
        fraction, state = self._fraction(), self._state
        left = state.seconds * (1 - fraction) / fraction if fraction > 0.01 else None
        text = f"{fraction:4.0%}  {state.seconds:,.0f} s" + (f", {left:,.0f} s left" if left is not None else "")
        head = Table.grid(padding=(0, 1))
        width = min(40, self._console.width - len(text) - 2)
        head.add_row(*([ProgressBar(total=1.0, completed=fraction, width=width)] if width >= 5 else []), text)
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for name in ("worker", "s/gradient", "accepted", "stale", "invalid", "delay", "last"):
            table.add_column(name, justify="right")
        shown = sorted(state.workers.items())[:_LISTED_WORKERS]
        for worker, facts in shown:
            counts = (str(facts[verdict]) for verdict in ("accepted", "stale", "invalid"))
            table.add_row(str(worker), f"{facts['tau']:.3f}", *counts, str(facts["delay"]), facts["last"])
        more = len(state.workers) - len(shown)
        rest = [Text(f"and {more} more")] if more else []
        return Group(head, Text(state.line()), table, *rest)
