"""What the terminal shows: progress while a run goes on, and a closing summary a newcomer understands."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

_FIRST_LINE_SECONDS = 1.0  # of silence before progress is shown at all
_PLAIN_LINE_SECONDS = 10.0  # between lines where there is no terminal
_LISTED_WORKERS = 8
_NAMED_FILES = ("config.yaml", "trace.jsonl", "metrics.jsonl", "summary.json", "final.safetensors", "checkpoints")


class ProgressLine:
    """A progress bar on a terminal, a line now and then elsewhere, nothing for a run that is soon over."""

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


def print_summary(console: Console, summary: dict[str, Any], first_value: float | None, directory: Path) -> None:
    """The end of a run in words."""

    def say(text: str = "") -> None:
        console.print(text, highlight=False, soft_wrap=True)

    objective = "gap" if "final_gap" in summary else "loss"
    last_value = summary.get(f"final_{objective}")  # a problem need not evaluate
    meaning = "objective gap f(x) - f*" if objective == "gap" else "loss"
    pushes = summary["pushes"]
    virtual = summary["clock"] == "virtual"
    kind = "simulated" if virtual else "real"
    say()
    say(f"[bold]{summary['method']}[/bold] on {summary['num_workers']} {kind} workers, {summary['profile']} delays")
    others = _others(summary, objective)
    if f"final_{objective}" in summary:
        first = "?" if first_value is None else f"{first_value:.4g}"
        last = "not a finite number" if last_value is None else f"{last_value:.4g}"
        where = f" on {summary['evaluated_on']}" if summary.get("evaluated_on") else ""
        others = f" ({others})" if others else ""
        say(f"  {meaning}: {first} -> [bold]{last}[/bold]{others}{where}")
    elif others:
        say(f"  evaluation: {others}")
    if summary.get("diverged"):
        say("  [bold red]THE RUN HAS DIVERGED[/bold red]: try a smaller method.eta, see docs/choosing.md")
    say(
        f"  {summary['updates']:,} updates in {summary['seconds']:,.1f} {'virtual ' if virtual else ''}seconds"
        + (f" ({summary['wall_seconds']:.1f} s on this machine, {summary['engine']} engine)" if virtual else "")
    )
    say(
        f"  {pushes:,} gradients arrived: {summary['accepted']:,} accepted, {summary['stale']:,} stale, "
        f"{summary['invalid']:,} invalid; {summary['interrupted']:,} more were stopped early"
    )
    say(
        f"  {summary['wasted_fraction']:.0%} of the workers' compute went into work that was not used"
        + _wasted(summary)
    )
    if summary["method"] != "synchronous" and summary["synchronous_updates"]:
        say(
            f"  for comparison: waiting for the slowest worker every time allows at most "
            f"{summary['synchronous_updates']:,} updates in that time"
        )
    _print_workers(say, summary["per_worker"], summary["num_workers"])
    say(f"  files: {directory}")
    say(f"    {', '.join(name for name in _NAMED_FILES if (directory / name).exists())}")


def _others(summary: dict[str, Any], objective: str) -> str:
    """The other numbers of the closing evaluation."""
    named = {key.removeprefix("final_"): value for key, value in summary.items() if key.startswith("final_")}
    shown = [f"{name.replace('_', ' ')} {'not finite' if value is None else format(value, '.4g')}"
             for name, value in named.items() if name != objective]  # fmt: skip
    return escape(", ".join(shown))


def _wasted(summary: dict[str, Any]) -> str:
    seconds = sum(worker["wasted_seconds"] for worker in summary["per_worker"].values())
    return f" ({seconds:,.1f} s)" if seconds and not summary["per_worker_omitted"] else ""


def _print_workers(say: Any, per_worker: dict[str, dict[str, Any]], num_workers: int) -> None:
    if not per_worker:
        return
    say()
    say("  worker   s/gradient   accepted      stale    stopped   share of accepted")
    total = sum(worker["accepted"] for worker in per_worker.values()) or 1
    rows = list(per_worker.items())
    shown = rows if len(rows) <= _LISTED_WORKERS else rows[: _LISTED_WORKERS - 1] + rows[-1:]
    for index, (name, worker) in enumerate(shown):
        if index == _LISTED_WORKERS - 1 and len(rows) > _LISTED_WORKERS:
            say("     ...")
        share = worker["accepted"] / total
        bar = "█" * round(20 * share)
        say(
            f"  {name:>6}   {worker['base_seconds']:>10.4g} {worker['accepted']:>10,} {worker['stale']:>10,} "
            f"{worker['interrupted']:>10,}   {share:>5.1%} {bar}"
        )
    say()
