"""Who reaches a target loss first: tunes contenders, drops hopeless settings early, and runs the winners again.

One rule holds for every contender of a cell. In cells whose runs take long, each setting gets a first look, a part of
the budget, and the best third, and at least two, run the whole budget. Elsewhere all settings do, with three seeds. The
setting that reaches the target first, by the median of its seeds, runs again with other seeds.

The target of a cell is the lowest loss that any contender without an automatic choice has at two thirds of the budget.
So the best of the others reaches it, and the automatic contenders have no part in setting it.

The curves are the objective at regular virtual times: the gap, or the loss on a fixed set of validation rows. `curves`
smooths them.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from ringmaster_dist.experiment.curves import last, seconds_to, value_at
from ringmaster_dist.experiment.machines import SHORT, Cell, Machines
from ringmaster_dist.experiment.plan import AUTOMATIC, Job
from ringmaster_dist.experiment.runner import Progress, Result, play_all, with_estimate
from ringmaster_dist.simulation.pool import processes

TARGET_AT = 2 / 3  # of the budget


class Race(NamedTuple):
    """What was run, by cell and contender where it says so."""

    plan: Machines
    tuning: list[Result]
    winners: dict[tuple[str, str], Job]
    final: list[Result]

    def of(self, cell: Cell, contender: str) -> list[Result]:
        return [r for r in self.final if (r.job.regime, r.job.method) == (cell.name, contender)]


def run(plan: Machines, folder: Path, jobs: int, progress: Progress = lambda fraction, text: None) -> Race:
    """Plays all cells. Results that are in the folder are used."""
    folder = folder / "runs"
    pairs = [(cell, contender) for cell in plan.cells for contender in cell.grids]
    looked_at = [cell.short(job) for cell, name in pairs if cell.drops_some(name) for job in cell.jobs(name)]
    costs = {cell.name: cell.cost for cell in plan.cells}
    weights = [
        SHORT * sum(costs[job.regime] for job in looked_at),
        sum(cell.cost * cell.num_whole(name) * len(cell.tuning_seeds) for cell, name in pairs),
        sum(cell.cost * plan.seeds for cell, _ in pairs),
    ]
    whole = with_estimate(progress)

    def stage(number: int, name: str) -> Progress:
        before, total = sum(weights[:number]), sum(weights)
        return lambda f, text: whole((before + f * weights[number]) / total, f"{name}: {text}")

    def cost(job: Job) -> float:
        return costs[job.regime]

    with processes(jobs) as pool:
        first = play_all(looked_at, folder, pool, stage(0, "first look"), cost)
        kept = [
            job._replace(seed=seed)
            for cell, name in pairs
            for job in _survivors(cell, name, first)
            for seed in cell.tuning_seeds
        ]
        tuning = play_all(kept, folder, pool, stage(1, "tuning"), cost)
        winners = {}
        for cell in plan.cells:
            winners.update(_winners(cell, [r for r in tuning if r.job.regime == cell.name]))
        again = [job for winner in winners.values() for job in plan.final(winner)]
        final = play_all(again, folder, pool, stage(2, "winners"), cost)
    return Race(plan, [*first, *tuning], winners, final)


def _survivors(cell: Cell, contender: str, looks: Iterable[Result]) -> list[Job]:
    """The settings that run the whole budget, best first."""
    jobs = cell.jobs(contender)
    if not cell.drops_some(contender):
        return jobs
    seen = {r.job: last(r.curve) for r in looks}
    return sorted(jobs, key=lambda job: seen[cell.short(job)])[: cell.num_whole(contender)]


def _winners(cell: Cell, tuning: list[Result]) -> dict[tuple[str, str], Job]:
    """The setting of every contender that reaches the target first, or else comes nearest to it."""
    goal = target(cell, tuning)
    by_setting: dict[Job, list[Result]] = {}
    for result in tuning:
        by_setting.setdefault(result.job._replace(seed=0), []).append(result)

    def rank(job: Job) -> tuple[float, float]:
        results = by_setting[job]
        return (statistics.median_high(seconds_to(r.curve, goal) for r in results),
                statistics.median_high(last(r.curve) for r in results))  # fmt: skip

    ranked = sorted(by_setting, key=rank)
    return {(cell.name, name): next(job for job in ranked if job.method == name) for name in cell.grids}


def target(cell: Cell, results: Iterable[Result]) -> float:
    """The lowest loss at two thirds of the budget of a contender without an automatic choice, the median over seeds."""
    by_setting: dict[tuple[str, tuple[str, ...]], list[float]] = {}
    for result in results:
        if result.job.method not in AUTOMATIC:
            value = value_at(result.curve, TARGET_AT * cell.seconds)
            by_setting.setdefault((result.job.method, result.job.overrides), []).append(value)
    return min(statistics.median_high(values) for values in by_setting.values())
