"""``-m`` of train and simulate: one job for each combination of values, a closing table, and one page over all."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ringmaster_dist.config.compose import compose, expand, to_typed
from ringmaster_dist.config.errors import UserError
from ringmaster_dist.errors import Mistake
from ringmaster_dist.signals import STOPPED

if TYPE_CHECKING:
    from ringmaster_dist.observe.run_list import RunLine

_MOST_IN_REPORT = 12  # jobs on the page; more curves cannot be told apart


class _Job(NamedTuple):
    overrides: list[str]  # all of them, with the run.dir of the job
    chosen: str  # those that other jobs have otherwise
    directory: Path
    overwrites: bool


def sweep(overrides: list[str], run: Callable[[list[str]], int], config_name: str) -> int:
    """Calls ``run`` for each combination of values and returns the first exit code that is not 0, if none is stopped.

    Each job gets a directory of its own, <run.dir>/0 and so on. A job that fails or diverges does not stop the others.
    A job that the user stops ends the sweep.
    """
    jobs = _jobs(overrides, config_name)
    codes: list[int] = []
    refused: list[_Job] = []
    for number, job in enumerate(jobs, 1):
        print(f"\njob {number} of {len(jobs)}: {job.chosen}", flush=True)
        try:
            codes.append(run(job.overrides))
        except (UserError, Mistake) as error:
            print(f"ringmaster: {error}", file=sys.stderr, flush=True)
            codes.append(2)
            refused.append(job)
        if codes[-1] in STOPPED:
            break
    _show_outcome(jobs[: len(codes)], refused, len(jobs), draws="run.report=false" not in overrides)
    return codes[-1] if codes[-1] in STOPPED else next((code for code in codes if code), 0)


def _jobs(overrides: list[str], config_name: str) -> list[_Job]:
    """All jobs. No job begins before all are checked, and their directories too."""
    given = next((word.partition("=")[2] for word in overrides if word.startswith("run.dir=")), "")
    if any(word.startswith("resume=") for word in overrides) and not ("resume=auto" in overrides and given):
        raise UserError("-m begins new runs; to resume a multirun, give it again with resume=auto and its run.dir")
    parent = Path(given or time.strftime("runs/%Y-%m-%d_%H-%M-%S-multirun"))
    combinations = expand([word for word in overrides if not word.startswith("run.dir=")])
    shared = set.intersection(*map(set, combinations))
    jobs = []
    for index, words in enumerate(combinations):
        chosen = [word for word in words if word not in shared] or words
        directory = parent / str(index)
        full = [*words, f"run.dir={directory}"]
        logs = any(word.startswith("logger=") and word != "logger=none" for word in words)
        if logs and not any(word.startswith("logger.group=") for word in words):
            full.append(f"logger.group={parent.name}")
        config = to_typed(compose(full, config_name), real_time=config_name == "train")
        jobs.append(_Job(full, " ".join(chosen), directory, config.run.overwrite))
    if "resume=auto" not in overrides:
        from ringmaster_dist.observe.run_directory import refuse_if_used

        for job in jobs:
            refuse_if_used(job.directory, overwrite=job.overwrites)
    return jobs


def _show_outcome(jobs: Sequence[_Job], refused: Sequence[_Job], planned: int, *, draws: bool) -> None:
    """Prints a table of the jobs that were tried, and draws one page of them.

    The directory of a job that was refused may hold another run, which is not shown.
    """
    from ringmaster_dist.observe.run_list import RunLine, describe, table

    lines = [RunLine(job.directory, "refused") if job in refused else describe(job.directory) for job in jobs]
    rows = [
        (str(number), job.chosen, line.state, line.result, f"{line.updates:,}", line.time, str(job.directory))
        for number, (job, line) in enumerate(zip(jobs, lines, strict=True), 1)
    ]
    print(f"\n{len(jobs)} of {planned} jobs" if len(jobs) < planned else f"\nall {planned} jobs")
    print(table(("job", "overrides", "state", "result", "updates", "time", "directory"), rows,
                right=("job", "updates", "time")), flush=True)  # fmt: skip
    if draws:
        _draw(lines, jobs[0].directory.parent)


def _draw(lines: Sequence[RunLine], folder: Path) -> None:
    """Draws the runs that have something to show. Of many, these are the ones with the lowest objective."""
    from ringmaster_dist.observe.report import FOLDER, show_report
    from ringmaster_dist.observe.run_list import in_order

    shown = [line for line in lines if line.updates and line.state != "damaged"]
    if len(shown) < 2:
        return
    if len(shown) > _MOST_IN_REPORT:
        print(f"  the page shows the {_MOST_IN_REPORT} jobs with the lowest result")
        best = in_order(shown, "loss")[:_MOST_IN_REPORT]
        shown = [line for line in shown if line in best]
    show_report([line.path for line in shown], folder / FOLDER)
