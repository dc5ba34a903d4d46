"""What the terminal shows while a command works: progress, or a table of a run that is being written."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ringmaster_dist.observe import measures
from ringmaster_dist.observe.closing import named
from ringmaster_dist.observe.measures import per_second, smoothed_loss, smoothed_tau, wasted_fraction
from ringmaster_dist.observe.records import VERDICTS, Arrival, Member, MetricsRow, parse
from ringmaster_dist.observe.run_files import MEMBERS, METRICS, TERMS, TRACE, RunFiles, Tail
from ringmaster_dist.protocol import Verdict

log = logging.getLogger(__name__)

_FIRST_LINE_SECONDS = 1.0  # of silence before progress is shown at all
_PLAIN_LINE_SECONDS = 10.0  # between lines where there is no terminal
_REFRESH_SECONDS = 0.5
_WORKERS_IN_TABLE = 16


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
    """What the table shows of a worker. One that was restarted is the same worker, because it has the same slot."""

    tau: float | None = None  # measured seconds per gradient
    delay: int = 0  # of its last gradient
    last: str = ""  # the verdict on it
    is_gone: bool = False
    counts: Counter[str] = field(default_factory=Counter)  # gradients by verdict
    stopped: dict[int, int] = field(default_factory=dict)  # gradients that were stopped early, by worker id
    rows: int = 0  # of its next gradient, where the server assigns rows


class LiveRun:
    """What is known of a run that is being written, from its files. It does not ask the server."""

    def __init__(self, directory: Path) -> None:
        self._files = RunFiles(directory)
        self.news: list[tuple[str, int]] = []  # joins and leaves since the last refresh, and how many are there then
        self._begin()

    def _begin(self) -> None:
        self._trace = Tail(self._files.path / TRACE, Arrival.from_json)
        self._metrics = Tail(self._files.path / METRICS, MetricsRow.from_json)
        self._members = Tail(self._files.path / MEMBERS, partial(parse, Member))
        self._slots: dict[int, int] = {}  # by worker id
        self._live: set[int] = set()  # ids of workers that have joined and not left
        self._terms = self._files.size(TERMS)
        self.version, self.seconds = 0, 0.0
        self.loss: float | None = None
        self.evaluation: dict[str, float | None] = {}
        self.diverged = False
        self.wasted: float | None = None  # the share of compute time that was not used
        self.workers: defaultdict[int, _WorkerNow] = defaultdict(_WorkerNow)  # by slot
        self.num_arrivals = 0
        self._recent: list[tuple[float, int]] = []

    def refresh(self) -> None:
        """Reads what is new, or everything if the server was restarted and has cut its files."""
        self.news, is_old = [], False
        if self._files.size(TERMS) != self._terms:
            is_old = self._terms > 0  # the files tell again what they have told
            self._begin()
        for member in self._members.new():
            self._slots[member.worker] = member.slot
            (self._live.discard if member.event == "leave" else self._live.add)(member.worker)
            # A restarted worker has joined under a new id before the lease of its old id expires.
            self.workers[member.slot].is_gone = all(self._slots[worker] != member.slot for worker in self._live)
            if not is_old:
                self.news.append((_happened(member), len(self._live)))
        for arrival in self._trace.new():
            self.num_arrivals += 1
            worker = self._worker(arrival.worker)
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
            if row.used_seconds is not None and row.wasted_seconds is not None:
                self.wasted = wasted_fraction(row.used_seconds, row.wasted_seconds)
            for name, figures in (row.per_worker or {}).items():
                now = self._worker(int(name))
                now.stopped[int(name)], now.rows = figures.interrupted, figures.rows
        self._recent = [*self._recent[-20:], (self.seconds, self.version)]

    def _worker(self, worker: int) -> _WorkerNow:
        return self.workers[self._slots.get(worker, worker)]

    @property
    def updates_per_second(self) -> float:
        (t0, v0), (t1, v1) = self._recent[0], self._recent[-1]
        return per_second(v1 - v0, t1 - t0)

    def line(self) -> str:
        shown = [f"version {self.version:,}", f"{self.updates_per_second:.1f} updates/s"]
        if self.loss is not None:
            shown.append(f"loss {self.loss:.4g}")
        shown += [
            f"{'valid ' if name == 'loss' else ''}{named(name, value)}" for name, value in self.evaluation.items()
        ]
        if self.diverged:
            shown.append("DIVERGES")
        totals = sum((worker.counts for worker in self.workers.values()), Counter())
        if totals:
            shown.append(f"accepted {totals['accepted'] / totals.total():.0%}")
        if self.wasted:
            shown.append(f"wasted compute {self.wasted:.0%}")
        return "  ".join(shown)


def _happened(member: Member) -> str:
    """A join or a leave in words."""
    if member.event == "leave":
        return f"worker-{member.worker} {member.why or 'left'}"
    where = f" from {member.host}" if member.host else ""
    return f"worker-{member.worker} joined{where}, computes on {member.computed_on}"


class LiveTable:
    """Shows a run while it is written: a table on a terminal, a line now and then elsewhere."""

    def __init__(
        self, directory: Path, console: Console, max_updates: float | None, max_seconds: float | None, *,
        awaited: int = 0, local_steps: int = 1,
    ) -> None:  # fmt: skip
        """``awaited`` is how many workers the run expects, if they are started elsewhere. Their joins are told.

        A limit of None is no limit.
        """
        self._unit = "s/gradient" if local_steps == 1 else f"s/{local_steps} steps"
        self._run, self._console = LiveRun(directory), console
        self._directory, self._awaited = directory, awaited
        if awaited:
            self._run.refresh()  # what an earlier start has told is not told again
        self._address = ""  # that was told
        self._limits = max_updates, max_seconds
        self._next: float = time.monotonic() + _REFRESH_SECONDS
        self._next_line = self._next
        self._live: Live | None = None

    def update(self) -> None:
        """Called often, and shows something now and then. A failure to show the run does not stop the run."""
        if time.monotonic() >= self._next:
            self._attempt(self._update)

    def _attempt(self, show: Callable[[], None]) -> None:
        try:
            show()
        except Exception as error:
            log.warning("the run cannot be shown any more (%s: %s); it continues", type(error).__name__, error)
            self._next = math.inf

    def _update(self) -> None:
        now = time.monotonic()
        self._next = now + _REFRESH_SECONDS
        self._read()
        if self._console.is_terminal:
            if self._live is None:
                self._live = Live(console=self._console, auto_refresh=False, transient=True)
                self._live.start()
            self._live.update(self._render(), refresh=True)
        elif now >= self._next_line and self._run.workers:
            self._next_line = now + _PLAIN_LINE_SECONDS
            line = f"{self._progress().fraction:4.0%}  {self._run.line()}{self._what_is_awaited()}"
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _read(self) -> None:
        self._run.refresh()
        if self._awaited:
            self._tell_of_workers()

    def _tell_of_workers(self) -> None:
        """Says where the server listens, and who has joined or left. On a terminal this is above the table."""
        address = RunFiles(self._directory).read("address")
        if address and address != self._address:
            self._address = address
            self._say(f"the server listens at {address}; a worker joins with")
            self._say(f"  ringmaster worker server={address} token_file={self._directory / 'token'}")
        for happened, present in self._run.news:
            self._say(f"{happened} ({present} of {self._awaited})")

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _what_is_awaited(self) -> str:
        """Says why nothing moves, before the first gradient and after the last."""
        if not self._run.num_arrivals:
            return "  no gradient has arrived yet"
        return "  the weights are evaluated" if self._progress().fraction >= 1 else ""

    def close(self) -> None:
        """Ends the table, and tells of the joins and leaves since the last refresh."""
        if self._live is not None:
            self._live.stop()
        if self._awaited and self._next < math.inf:
            self._attempt(self._read)

    def _progress(self) -> measures.Progress:
        return measures.Progress.of(self._run.version, self._run.seconds, *self._limits)

    def _render(self) -> Group:
        (fraction, left), run = self._progress(), self._run
        text = f"{fraction:4.0%}  {run.seconds:,.0f} s" + (f", {left:,.0f} s left" if left is not None else "")
        head = Table.grid(padding=(0, 1))
        width = min(40, self._console.width - len(text) - 2)
        head.add_row(*([ProgressBar(total=1.0, completed=fraction, width=width)] if width >= 5 else []), text)
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        rows_title = ("rows",) if any(now.rows for now in run.workers.values()) else ()
        for name in ("worker", self._unit, *rows_title, *VERDICTS, "stopped", "delay", "last"):
            table.add_column(name, justify="right")
        shown = sorted(run.workers.items())[:_WORKERS_IN_TABLE]
        for worker, now in shown:
            counts = (str(now.counts[verdict]) for verdict in VERDICTS)
            tau = "" if now.tau is None else f"{now.tau:.3f}"
            rows = (str(now.rows),) if rows_title else ()
            stopped, last = str(sum(now.stopped.values())), "gone" if now.is_gone else now.last
            table.add_row(str(worker), tau, *rows, *counts, stopped, str(now.delay), last)
        more = len(run.workers) - len(shown)
        rest = [Text(f"and {more} more")] if more else []
        return Group(head, Text(run.line() + self._what_is_awaited()), table, *rest)
