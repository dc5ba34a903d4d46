"""Runs the jobs of a plan in parallel processes with one thread each. A job whose result is there does not run again.

The settings of a method compete in rungs (successive halving). Every setting plays the first rung, a part of the
budget. The best of each regime and method play the next one, up to the whole budget. One rule holds for all methods.

Each result is a file that appears whole, so a plan that was interrupted at any time can be resumed.
"""

from __future__ import annotations

import json
import logging
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor, as_completed
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ringmaster_dist.experiment.curves import Curve, end, last, seconds_to_each
from ringmaster_dist.experiment.plan import TRAIN_LOSS, Job, Plan, num_kept
from ringmaster_dist.simulation.pool import processes

if TYPE_CHECKING:
    from ringmaster_dist.config.schema import Config
    from ringmaster_dist.observe.records import Summary
    from ringmaster_dist.observe.run_directory import RunDirectory
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
    train: Curve = ()  # virtual seconds, mean training loss since the point before

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
    quickest: dict[tuple[str, str, float], Job]  # by regime, method and gap
    timed: list[Result]  # the quickest with other seeds

    def drawn(self, result: Result) -> Curve:
        """The curve of the plan's objective."""
        return result.train if self.plan.objective == TRAIN_LOSS else result.curve

    def end(self, result: Result) -> float:
        return _score(self.plan, result)


def run(plan: Plan, folder: Path, jobs: int, progress: Progress = lambda fraction, text: None) -> Outcome:
    """Tunes every method in every regime, then runs the winners with other seeds."""
    folder = folder / "runs"
    weights = _weights(plan)
    whole = with_estimate(progress)

    def stage(number: int, name: str) -> Progress:
        before, total = sum(weights[:number]), sum(weights)
        return lambda f, text: whole((before + f * weights[number]) / total, f"{name} {text}")

    tuning: list[Result] = []
    alive = list(plan.tuning())
    with processes(jobs) as pool:
        for number, part in enumerate(plan.rungs):
            name = "tuning" if part == 1.0 else f"tuning, the first {part:.0%}:"
            rung = [job.shortened(part) for job in alive]
            played = play_all(rung, folder, pool, stage(number, name), plan.cost)
            tuning += played
            alive = survivors(plan, alive, played)
        winners: dict[tuple[str, str], Job] = {}
        for job in alive:  # the best of each is the first
            winners.setdefault((job.regime, job.method), job)
        final_jobs = [job for winner in winners.values() for job in plan.final(winner)]
        final = play_all(final_jobs, folder, pool, stage(len(plan.rungs), "winners"), plan.cost)
        quickest = _quickest(plan, played)
        timed_jobs = [job for winner in dict.fromkeys(quickest.values()) for job in plan.final(winner)]
        timed = play_all(timed_jobs, folder, pool, stage(len(plan.rungs) + 1, "quickest"), plan.cost)
    return Outcome(plan, tuning, winners, final, quickest, timed)


def survivors(plan: Plan, jobs: list[Job], played: list[Result]) -> list[Job]:
    """The jobs of the best results, `num_kept` of each regime and method, the best first. ``played`` is in order."""
    groups: dict[tuple[str, str], list[tuple[float, int]]] = {}
    for index, (job, result) in enumerate(zip(jobs, played, strict=True)):
        groups.setdefault((job.regime, job.method), []).append((_score(plan, result), index))
    return [jobs[index] for group in groups.values() for _, index in sorted(group)[: num_kept(len(group))]]


def _score(plan: Plan, result: Result) -> float:
    return end(result.train) if plan.objective == TRAIN_LOSS else result.final


def _quickest(plan: Plan, tuning: list[Result]) -> dict[tuple[str, str, float], Job]:
    """The setting of each method that reaches a gap first, or else comes nearest to it at the end."""
    found: dict[tuple[str, str, float], Job] = {}
    if not plan.gaps:
        return found
    ends = [last(result.curve) for result in tuning]
    seconds = [seconds_to_each(result.curve, plan.gaps) for result in tuning]  # by result and gap
    for column, gap in enumerate(plan.gaps):
        for index in sorted(range(len(tuning)), key=lambda i: (seconds[i][column], ends[i])):
            job = tuning[index].job
            found.setdefault((job.regime, job.method, gap), job)
    return found


def _weights(plan: Plan) -> list[float]:
    """About how long each stage takes: every rung, the winners and the quickest."""
    groups: dict[tuple[str, str], list[float]] = {}
    for job in plan.tuning():
        groups.setdefault((job.regime, job.method), []).append(plan.cost(job))
    weights = [0.0] * (len(plan.rungs) + 2)
    for costs in groups.values():
        mean, left = sum(costs) / len(costs), len(costs)
        for number, part in enumerate(plan.rungs):
            weights[number] += part * mean * left
            left = num_kept(left)
        weights[-2] += mean * plan.seeds
        weights[-1] += mean * plan.seeds * len(plan.gaps) / 2  # some gaps have the same winner
    return weights


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
    missing.sort(key=cost, reverse=True)  # a long run at the end would leave the other processes idle
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
    logging.getLogger("ringmaster_dist").setLevel(logging.ERROR)  # a setting that diverges is a result, not a warning
    make_core = partial(_baseline, job.rates) if job.rates else build_core
    with tempfile.TemporaryDirectory() as scratch:
        directory = RunDirectory(scratch, name="experiment")
        summary = simulate(config := load(job.all_overrides), directory, make_core=make_core)
        rows = directory.metrics()
        train = _train_losses(directory, [row.time for row in rows], summary) if config.run.trace else []
    curve = [(row.time, row.evaluation[objective_of(row.evaluation)]) for row in rows if row.evaluation]
    record = {
        "job": job._asdict(),
        "curve": curve,
        "updates": summary.updates,
        "wall_seconds": summary.wall_seconds,
        "wasted": summary.wasted_fraction,
        "taking_part": _taking_part(summary),
        "train": train,
    }
    temporary = folder / f".{job.key}-{os.getpid()}"
    temporary.write_text(json.dumps(record))
    temporary.replace(folder / f"{job.key}.json")


def _train_losses(directory: RunDirectory, times: list[float], summary: Summary) -> list[tuple[float, float]]:
    """The mean loss of the accepted gradients since the time before, at each time that has any.

    The last one is infinite if the run was given up because its gradients were not finite.
    """
    from ringmaster_dist.observe.measures import ACCEPTED
    from ringmaster_dist.observe.run_files import TRACE, Trace

    trace = Trace(directory.path / TRACE)
    trace.read_new()
    accepted = trace["verdict"] == ACCEPTED
    arrived, losses = trace["time"][accepted], trace["loss"][accepted]  # (accepted,) each
    found, first = [], 0
    for seconds in times:
        until = int(np.searchsorted(arrived, seconds, side="right"))
        if until > first:
            found.append((seconds, float(losses[first:until].mean())))
        first = until
    return [*found, (times[-1], math.inf)] if summary.ended == "diverged" else found


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
        # an older version did not write these
        record.get("wasted", math.nan), record.get("taking_part", math.nan),
        [(float(time), float(value)) for time, value in record.get("train", [])],
    )  # fmt: skip
