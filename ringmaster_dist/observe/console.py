"""What the terminal shows: progress, a table of a run that is being written, and the closing summary."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ringmaster_dist.observe.measures import per_second, share_of, smoothed_loss, smoothed_tau
from ringmaster_dist.observe.records import VERDICTS, Arrival, MetricsRow, Summary, WorkerSummary, objective_of
from ringmaster_dist.observe.run_files import CONFIG, FINAL, METRICS, ROWS, SUMMARY, TERMS, TRACE, RunFiles, Tail
from ringmaster_dist.protocol import Verdict

log = logging.getLogger(__name__)

_FIRST_LINE_SECONDS = 1.0  # of silence before progress is shown at all
_PLAIN_LINE_SECONDS = 10.0  # between lines where there is no terminal
_REFRESH_SECONDS = 0.5
_WORKERS_IN_TABLE, _WORKERS_IN_SUMMARY = 16, 8
_NAMED_FILES = (CONFIG, TRACE, METRICS, SUMMARY, ROWS, FINAL, "checkpoints")


class ProgressLine:
    """A progress bar on a terminal, a line now and then elsewhere, and nothing for work that is soon done."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began = time.monotonic()
        self._next_plain = self._began + _PLAIN_LINE_SECONDS
        self._bar: Progress | None = None

    def show(self, fraction: float, text: str) -> None:
        now = time.monotonic()
        if now - self._began < _FIRST_LINE_SECONDS:
            return
        if self._console.is_terminal:
            if self._bar is None:
                columns = (BarColumn(), TextColumn("{task.percentage:>3.0f} %"), TimeRemainingColumn(),
                           TextColumn("{task.description}"))  # fmt: skip
                self._bar = Progress(*columns, console=self._console, transient=True, refresh_per_second=4)
                self._task = self._bar.add_task(text, total=1.0)
                self._bar.start()
            self._bar.update(self._task, completed=fraction, description=text)
        elif now >= self._next_plain:
            self._next_plain = now + _PLAIN_LINE_SECONDS
            self._console.print(f"{fraction:4.0%}  {text}", markup=False, highlight=False)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


@dataclass
class _WorkerNow:
    """What the table shows of a worker."""

    tau: float | None = None  # seconds per gradient
    delay: int = 0  # of its last gradient
    last: str = ""  # the verdict on it
    counts: Counter[str] = field(default_factory=Counter)  # gradients by verdict


class LiveRun:
    """What is known of a run that is being written, from its files. It does not ask the server."""

    def __init__(self, directory: Path) -> None:
        self._files = RunFiles(directory)
        self._begin()

    def _begin(self) -> None:
        self._trace = Tail(self._files.path / TRACE, Arrival.from_json)
        self._metrics = Tail(self._files.path / METRICS, MetricsRow.from_json)
        self._terms = self._files.size(TERMS)
        self.version, self.seconds = 0, 0.0
        self.loss: float | None = None
        self.evaluation: dict[str, float | None] = {}
        self.diverged = False
        self.workers: defaultdict[int, _WorkerNow] = defaultdict(_WorkerNow)
        self._recent: list[tuple[float, int]] = []

    def refresh(self) -> None:
        """Reads what is new, or everything if the server was restarted and has cut its files."""
        if self._files.size(TERMS) != self._terms:
            self._begin()
        for arrival in self._trace.new():
            worker = self.workers[arrival.worker]
            worker.counts[arrival.verdict.value] += 1
            worker.last, worker.delay = arrival.verdict.value, arrival.delay
            worker.tau = smoothed_tau(worker.tau, arrival.compute_seconds)
            if arrival.verdict is Verdict.ACCEPTED and arrival.loss is not None:
                self.loss = smoothed_loss(self.loss, arrival.loss)
            self.version, self.seconds = max(self.version, arrival.version), arrival.time
        for row in self._metrics.new():
            self.version, self.seconds = max(self.version, row.version), max(self.seconds, row.time)
            self.evaluation.update(row.evaluation)
            self.diverged = row.diverged
        self._recent = [*self._recent[-20:], (self.seconds, self.version)]

    @property
    def updates_per_second(self) -> float:
        (t0, v0), (t1, v1) = self._recent[0], self._recent[-1]
        return per_second(v1 - v0, t1 - t0)

    def line(self) -> str:
        shown = [f"version {self.version:,}", f"{self.updates_per_second:.1f} updates/s"]
        if self.loss is not None:
            shown.append(f"loss {self.loss:.4g}")
        shown += [
            f"{'valid ' if name == 'loss' else ''}{_named(name, value)}" for name, value in self.evaluation.items()
        ]
        if self.diverged:
            shown.append("DIVERGES")
        totals = sum((worker.counts for worker in self.workers.values()), Counter())
        if totals:
            shown.append(f"accepted {totals['accepted'] / totals.total():.0%}")
        return "  ".join(shown)


class LiveTable:
    """Shows a run while it is written: a table on a terminal, a line now and then elsewhere."""

    def __init__(self, directory: Path, console: Console, max_updates: float, max_seconds: float) -> None:
        self._run, self._console = LiveRun(directory), console
        self._max_updates, self._max_seconds = max_updates, max_seconds
        self._next: float = time.monotonic() + _REFRESH_SECONDS
        self._next_line = self._next
        self._live: Live | None = None

    def update(self) -> None:
        """Called often, and shows something now and then. A failure to show the run does not stop the run."""
        if time.monotonic() >= self._next:
            try:
                self._update(time.monotonic())
            except Exception as error:
                log.warning("the run cannot be shown any more (%s: %s); it continues", type(error).__name__, error)
                self._next = math.inf

    def _update(self, now: float) -> None:
        self._next = now + _REFRESH_SECONDS
        self._run.refresh()
        if self._console.is_terminal:
            if self._live is None:
                self._live = Live(console=self._console, auto_refresh=False, transient=True)
                self._live.start()
            self._live.update(self._render(), refresh=True)
        elif now >= self._next_line and self._run.workers:
            self._next_line = now + _PLAIN_LINE_SECONDS
            line = f"{self._fraction():4.0%}  {self._run.line()}"
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()

    def _fraction(self) -> float:
        run = self._run
        return min(1.0, max(run.version / self._max_updates, run.seconds / self._max_seconds))

    def _render(self) -> Group:
        fraction, run = self._fraction(), self._run
        left = run.seconds * (1 - fraction) / fraction if fraction > 0.01 else None
        text = f"{fraction:4.0%}  {run.seconds:,.0f} s" + (f", {left:,.0f} s left" if left is not None else "")
        head = Table.grid(padding=(0, 1))
        width = min(40, self._console.width - len(text) - 2)
        head.add_row(*([ProgressBar(total=1.0, completed=fraction, width=width)] if width >= 5 else []), text)
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for name in ("worker", "s/gradient", *VERDICTS, "delay", "last"):
            table.add_column(name, justify="right")
        shown = sorted(run.workers.items())[:_WORKERS_IN_TABLE]
        for worker, now in shown:
            counts = (str(now.counts[verdict]) for verdict in VERDICTS)
            table.add_row(str(worker), f"{now.tau:.3f}", *counts, str(now.delay), now.last)
        more = len(run.workers) - len(shown)
        rest = [Text(f"and {more} more")] if more else []
        return Group(head, Text(run.line()), table, *rest)


def print_summary(console: Console, files: RunFiles, summary: Summary) -> None:
    """Says the end of a run in words. The summary is as it was read from the file."""

    def say(text: str = "") -> None:
        console.print(text, highlight=False, soft_wrap=True)

    virtual = summary.clock == "virtual"
    say()
    say(
        f"[bold]{summary.method}[/bold] on {summary.num_workers} {'simulated' if virtual else 'real'} workers, "
        f"{summary.profile} delays"
    )
    _print_evaluation(say, files, summary)
    if summary.diverged:
        say("  [bold red]THE RUN HAS DIVERGED[/bold red]: try a smaller method.eta, see docs/choosing.md")
    say(
        f"  {summary.updates:,} updates in {summary.seconds:,.1f} {'virtual ' if virtual else ''}seconds"
        + (f" ({summary.wall_seconds:.1f} s on this machine, {summary.engine} engine)" if virtual else "")
    )
    say(
        f"  {summary.pushes:,} gradients arrived: {summary.accepted:,} accepted, {summary.stale:,} stale, "
        f"{summary.invalid:,} invalid; {summary.interrupted:,} more stopped early"
    )
    wasted = sum(worker.wasted_seconds for worker in summary.per_worker.values())
    say(
        f"  {summary.wasted_fraction:.0%} of the workers' compute went into work that was not used"
        + (f" ({wasted:,.1f} s)" if wasted and not summary.per_worker_omitted else "")
    )
    if summary.method != "synchronous" and summary.synchronous_updates:
        say(
            f"  for comparison: waiting for the slowest worker every time allows at most "
            f"{summary.synchronous_updates:,} updates in that time"
        )
    if summary.per_worker:
        _print_workers(say, summary.per_worker)
    say(f"  files: {files.path}")
    say(f"    {', '.join(name for name in _NAMED_FILES if (files.path / name).exists())}")


def _print_evaluation(say: Callable[[str], None], files: RunFiles, summary: Summary) -> None:
    """The objective from its first value to the last, and the other numbers of the closing evaluation."""
    objective = objective_of(summary.evaluation)
    others = escape(", ".join(_named(*item) for item in summary.evaluation.items() if item[0] != objective))
    if objective:
        meaning = "objective gap f(x) - f*" if objective == "gap" else "loss"
        first = next((row.evaluation.get(objective) for row in files.metrics()), None)
        last = summary.evaluation[objective]
        where = f" on {summary.evaluated_on}" if summary.evaluated_on else ""
        say(
            f"  {meaning}: {'?' if first is None else format(first, '.4g')} -> "
            f"[bold]{'not a finite number' if last is None else format(last, '.4g')}[/bold]"
            f"{f' ({others})' if others else ''}{where}"
        )
    elif others:
        say(f"  evaluation: {others}")


def _named(name: str, value: float | None) -> str:
    """A number of an evaluation with its name, in words."""
    return f"{name.replace('_', ' ')} {'not finite' if value is None else format(value, '.4g')}"


def _print_workers(say: Callable[..., None], per_worker: dict[str, WorkerSummary]) -> None:
    say()
    width = max(len(worker.device) for worker in per_worker.values())
    device = f"   {'device':<{max(6, width)}}" if width else ""  # simulated workers have none
    has_rows = any(worker.rows for worker in per_worker.values())
    rows_title = "   rows" if has_rows else ""
    say(f"  worker{device}   s/gradient{rows_title}   accepted      stale    stopped   share of accepted")
    total = sum(worker.accepted for worker in per_worker.values())
    rows = list(per_worker.items())
    shown = rows if len(rows) <= _WORKERS_IN_SUMMARY else rows[: _WORKERS_IN_SUMMARY - 1] + rows[-1:]
    for index, (name, worker) in enumerate(shown):
        if index == _WORKERS_IN_SUMMARY - 1 and len(rows) > _WORKERS_IN_SUMMARY:
            say("     ...")
        share = share_of(worker.accepted, total)
        device = f"   {worker.device:<{max(6, width)}}" if width else ""
        rows_text = f"{worker.rows:>7,}" if has_rows else ""
        say(
            f"  {name:>6}{device}   {worker.base_seconds:>10.4g}{rows_text} {worker.accepted:>10,} {worker.stale:>10,} "
            f"{worker.interrupted:>10,}   {share:>5.1%} {'█' * round(20 * share)}"
        )
    say()
