"""Runs the jobs of a plan in parallel processes with one thread each. A job whose result is there does not run again.

Each result is a file that appears whole, so a plan that was interrupted at any time can be resumed.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor, as_completed
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ringmaster_dist.experiment.plan import Job, Plan
from ringmaster_dist.simulation.pool import processes

if TYPE_CHECKING:
    from ringmaster_dist.config.schema import Config
    from ringmaster_dist.observe.records import Summary
    from ringmaster_dist.problems import Problem
    from ringmaster_dist.server.core import ServerCore

Progress = Callable[[float, str], None]


class Result(NamedTuple):
    job: Job
    curve: list[tuple[float, float]]  # virtual seconds, objective
    updates: int
    wall_seconds: float
    wasted: float  # the share of compute time on gradients that were not accepted
    taking_part: float  # the share of workers of whose compute time a tenth or more went into accepted gradients

    @property
    def final(self) -> float:
        """The objective at the end; infinite if it is not finite."""
        value = self.curve[-1][1] if self.curve else math.inf
        return value if math.isfinite(value) else math.inf


class Outcome(NamedTuple):
    plan: Plan
    tuning: list[Result]
    winners: dict[tuple[str, str], Job]  # by regime and method
    final: list[Result]


def run(plan: Plan, folder: Path, jobs: int, progress: Progress = lambda fraction, text: None) -> Outcome:
    """Tunes every method in every regime, then runs the winners with other seeds."""
    folder = folder / "runs"
    tuning_jobs = list(plan.tuning())
    groups = len({(job.regime, job.method) for job in tuning_jobs})
    share = len(tuning_jobs) / (len(tuning_jobs) + groups * plan.seeds)
    whole = with_estimate(progress)
    with processes(jobs) as pool:
        tuning = play_all(tuning_jobs, folder, pool, lambda f, text: whole(share * f, f"tuning {text}"))
        winners: dict[tuple[str, str], Job] = {}
        for result in sorted(tuning, key=lambda r: r.final):
            winners.setdefault((result.job.regime, result.job.method), result.job)
        final_jobs = [job for winner in winners.values() for job in plan.final(winner)]
        final = play_all(final_jobs, folder, pool, lambda f, text: whole(share + (1 - share) * f, f"winners {text}"))
    return Outcome(plan, tuning, winners, final)


def with_estimate(progress: Progress) -> Progress:
    """Adds how long the rest takes at the pace so far. What was there at the first call does not count."""
    began, first = time.monotonic(), -1.0

    def show(fraction: float, text: str) -> None:
        nonlocal first
        if first < 0:
            first = fraction
        if fraction > first:
            left = (time.monotonic() - began) * (1 - fraction) / (fraction - first)
            text += f", about {left / 60:.1f} min left"
        progress(fraction, text)

    return show


def play_all(
    jobs: Iterable[Job],
    folder: Path,
    pool: Executor,
    progress: Progress,
    cost: Callable[[Job], float] = lambda job: 1.0,
) -> list[Result]:
    """Runs the jobs that have no result in the folder. Returns all results in the order of the jobs.

    ``cost`` says how long a job takes relative to others, for the progress.
    """
    folder.mkdir(parents=True, exist_ok=True)
    wanted = list(jobs)
    missing = [job for job in wanted if not (folder / f"{job.key}.json").exists()]
    left, all_costs, done = sum(map(cost, missing)), sum(map(cost, wanted)) or 1.0, len(wanted) - len(missing)
    progress(1 - left / all_costs, f"{done} of {len(wanted)} runs")
    futures = {pool.submit(_play, job, folder): job for job in missing}
    for future in as_completed(futures):
        future.result()
        left, done = left - cost(futures[future]), done + 1
        progress(1 - left / all_costs, f"{done} of {len(wanted)} runs")
    return [_read(job, folder) for job in wanted]


def _play(job: Job, folder: Path) -> None:
    """Runs one job, in a process of its own."""
    import torch

    from ringmaster_dist.config.build import build_core
    from ringmaster_dist.config.compose import load
    from ringmaster_dist.observe.records import objective_of
    from ringmaster_dist.observe.run_directory import RunDirectory
    from ringmaster_dist.simulation.session import simulate

    torch.set_num_threads(1)
    make_core = partial(_baseline, job.rates) if job.rates else build_core
    with tempfile.TemporaryDirectory() as scratch:
        directory = RunDirectory(scratch, name="experiment")
        summary = simulate(load(job.all_overrides), directory, make_core=make_core)
        rows = directory.metrics()
    curve = [(row.time, row.evaluation[objective_of(row.evaluation)]) for row in rows if row.evaluation]
    record = {
        "job": job._asdict(),
        "curve": curve,
        "updates": summary.updates,
        "wall_seconds": summary.wall_seconds,
        "wasted": summary.wasted_fraction,
        "taking_part": _taking_part(summary),
    }
    temporary = folder / f".{job.key}-{os.getpid()}"
    temporary.write_text(json.dumps(record))
    temporary.replace(folder / f"{job.key}.json")


def _taking_part(summary: Summary) -> float:
    """See `Result`. In a large cluster it is the share among the workers that the summary lists."""
    workers = summary.per_worker.values()
    useful = sum(w.used_seconds > 0 and w.used_seconds >= 0.1 * (w.used_seconds + w.wasted_seconds) for w in workers)
    return useful / (summary.num_workers - summary.per_worker_omitted)


def _baseline(rates: Mapping[str, float], config: Config, problem: Problem, run: Path) -> ServerCore:
    """A core whose updates are those of torch's optimizers."""
    from ringmaster_dist.config.build import build_core
    from ringmaster_dist.experiment.baseline import MuonAdamW

    core = build_core(config, problem, run)
    core.update = MuonAdamW(core.update.layout, rates)
    return core


def _read(job: Job, folder: Path) -> Result:
    record: dict[str, Any] = json.loads((folder / f"{job.key}.json").read_text())
    curve = [(float(time), math.nan if value is None else float(value)) for time, value in record["curve"]]
    return Result(
        job, curve, record["updates"], record["wall_seconds"],
        record.get("wasted", math.nan), record.get("taking_part", math.nan),  # an older version did not write these
    )  # fmt: skip
