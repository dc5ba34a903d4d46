"""The closing summary of a run, in words and as a table of its workers."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping

from rich.console import Console
from rich.markup import escape

from ringmaster_dist.observe.measures import share_of
from ringmaster_dist.observe.records import Member, Summary, WorkerSummary, objective_of
from ringmaster_dist.observe.run_files import BEST, CONFIG, FINAL, METRICS, ROWS, SUMMARY, TRACE, RunFiles

STOPPED_BY_USER = "stopped by the user"  # how such a run has ended, in its summary
_MOST_WORKERS = 8
_NAMED_FILES = (CONFIG, TRACE, METRICS, SUMMARY, ROWS, FINAL, BEST, "checkpoints")


class Stdout(Console):
    """The console on stdout. When the reader of a pipe, such as head, has closed it, the command continues silently."""

    def __init__(self) -> None:
        super().__init__(file=sys.stdout)

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_summary(console: Console, files: RunFiles, summary: Summary) -> None:
    """Says the end of a run in words. The summary is as it was read from the file."""

    def say(text: str = "") -> None:
        console.print(text, highlight=False, soft_wrap=True)

    files = RunFiles(files.path, tolerant=True)
    virtual = summary.clock == "virtual"
    workers = by_slot(summary.per_worker, files.members())
    restarts = len(summary.per_worker) - len(workers)
    number = summary.num_workers - restarts
    say()
    say(
        f"[bold]{summary.method}[/bold] on {number} {'simulated' if virtual else 'real'} worker{'s' * (number != 1)}"
        + (f" ({restarts} restarted)" if restarts else "")
        + (f", {summary.profile} delays" if summary.profile != "none" else ", each at its own speed")
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
    if workers:
        _print_workers(say, workers, _local_steps(files))
    if summary.ended == STOPPED_BY_USER:
        again = "" if virtual else f"; continue with {files.resume_command}"
        say(f"  stopped early by you{again}")
    say(f"  files: {files.path}")
    say(f"    {', '.join(name for name in _NAMED_FILES if (files.path / name).exists())}")


def by_slot(per_worker: Mapping[str, WorkerSummary], members: Iterable[Member]) -> dict[str, WorkerSummary]:
    """The workers by their slot. A worker that was restarted has several ids and one slot, and is one worker here."""
    slots = {str(member.worker): str(member.slot) for member in members}
    found: dict[str, WorkerSummary] = {}
    for name, worker in per_worker.items():
        slot = slots.get(name, name)
        found[slot] = worker if slot not in found else found[slot].joined(worker)
    return dict(sorted(found.items(), key=lambda item: int(item[0])))


def named(name: str, value: float | None) -> str:
    """A number of an evaluation with its name, in words."""
    return f"{name.replace('_', ' ')} {'not finite' if value is None else format(value, '.4g')}"


def _local_steps(files: RunFiles) -> int:
    """How many gradients a push has."""
    try:
        return int(files.config()["local"]["steps"])
    except (ValueError, KeyError, TypeError):  # an older version did not write it
        return 1


def _print_evaluation(say: Callable[[str], None], files: RunFiles, summary: Summary) -> None:
    """The objective from its first value to the last, and the other numbers of the closing evaluation."""
    objective = objective_of(summary.evaluation)
    others = escape(", ".join(named(*item) for item in summary.evaluation.items() if item[0] != objective))
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
    if summary.best_value is not None and summary.best_version != summary.updates:
        say(f"  lowest {objective} during the run: {summary.best_value:.4g} after {summary.best_version:,} updates, "
            f"kept in {BEST}")  # fmt: skip


def _print_workers(say: Callable[..., None], workers: dict[str, WorkerSummary], local_steps: int) -> None:
    say()
    width = max(len(worker.device) for worker in workers.values())
    device = f"   {'device':<{max(6, width)}}" if width else ""  # simulated workers have none
    has_rows = any(worker.rows for worker in workers.values())
    rows_title = "   rows" if has_rows else ""
    unit = "s/gradient" if local_steps == 1 else "s/push"
    say(f"  worker{device}   {unit:>10}{rows_title}   accepted      stale    stopped   share of accepted")
    total = sum(worker.accepted for worker in workers.values())
    rows = list(workers.items())
    shown = rows if len(rows) <= _MOST_WORKERS else rows[: _MOST_WORKERS - 1] + rows[-1:]
    for index, (name, worker) in enumerate(shown):
        if index == _MOST_WORKERS - 1 and len(rows) > _MOST_WORKERS:
            say("     ...")
        share = share_of(worker.accepted, total)
        device = f"   {worker.device:<{max(6, width)}}" if width else ""
        seconds = f"{worker.gradient_seconds:.4g}" if worker.gradient_seconds else "none came"
        rows_text = f"{worker.rows:>7,}" if has_rows else ""
        say(
            f"  {name:>6}{device}   {seconds:>10}{rows_text} {worker.accepted:>10,} {worker.stale:>10,} "
            f"{worker.interrupted:>10,}   {share:>5.1%} {'█' * round(20 * share)}"
        )
    if local_steps > 1:
        say(f"  s/push is the measured time of {local_steps} local steps, which one push has")
    say()
