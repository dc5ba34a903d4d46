"""``ringmaster theory``."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ringmaster_dist.cli.parser import Parser, whole
from ringmaster_dist.cli.sources import cluster_times, source_options
from ringmaster_dist.config.errors import UserError


def theory_options(parser: Parser) -> None:
    source_options(parser)
    parser.setting("updates=K", "the number of updates", whole(1), 1000)
    parser.setting("plot=FILE.png", "also draw H_m and the bounds", Path)


def run_theory(arguments: Namespace, overrides: list[str]) -> int:
    """ringmaster theory [SOURCE] [updates=K] [thresholds=R,R,...] [plot=FILE.png] [key=value ...]

    Prints what the paper's time bounds say about a cluster. SOURCE is times=, file=, run=, or the word gpus for the
    paper's table of GPUs. Without it, the times come from the configuration: cluster.workers=8 cluster.profile=linear
    cluster.unit_seconds=1 ...

    It prints the harmonic means H_m of the m quickest workers. For each threshold R it prints how many workers are
    useful (m*), how long any R consecutive updates take at most, t(R) = 2 min_m H_m (1 + R/m), and how long K updates
    take at most, ceil(K/R) t(R). Then it prints the time of K updates if the threshold grows as a square root. If
    speeds change (cluster.phases), it prints the same by the universal model. With constants
    (method.constants.smoothness=1 method.constants.noise=1 method.constants.initial_gap=1) it also prints the schedules
    of the theorems.
    """
    updates, thresholds = arguments.updates, arguments.thresholds
    times, what, config = cluster_times(arguments, overrides, f"budget.updates={updates}")
    _print(times, what, updates, thresholds, config)
    if arguments.plot:
        _plot(times, thresholds, updates, arguments.plot)
        print(f"drawn: {arguments.plot}")
    return 0


def _print(times: Sequence[float], what: str, updates: int, thresholds: Sequence[int], config: Any) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from ringmaster_dist import theory as bounds
    from ringmaster_dist.algorithm.schedules import agnostic

    console = Console(file=sys.stdout)
    means = bounds.harmonic_means(times)
    shown = sorted({1, 2, 4, 8, 16, 32, 64, len(times)} & set(range(1, len(times) + 1)))
    console.print(f"{what}: {len(times)} workers, {times[0]:.4g} to {times[-1]:.4g} s per gradient", highlight=False)
    console.print("H_m: " + ", ".join(f"H_{m} = {means[m - 1]:.4g}" for m in shown), highlight=False)
    table = Table(box=box.SIMPLE_HEAD)
    columns = ["R", "useful workers m*", "t(R)", f"T({updates:,})", "updates/s at least"]
    work = _work(config)
    if work is not None:
        columns.append("T by phases")
    for column in columns:
        table.add_column(column, justify="right")
    for threshold in thresholds:
        total = bounds.seconds_of_run(times, updates, lambda k, r=threshold: r)  # type: ignore[misc]
        row = [
            str(threshold),
            str(bounds.useful_workers(times, threshold)),
            f"{bounds.seconds_of_updates(times, threshold):.4g}",
            f"{total:.4g}",
            f"{updates / total:.4g}",
        ]
        if work is not None:
            row.append(f"{bounds.seconds_of_run_at(work, updates, threshold):.4g}")
        table.add_row(*row)
    console.print(table)
    growing = bounds.seconds_of_run(times, updates, agnostic(1.0).threshold)
    console.print(f"threshold growing as sqrt(k): T({updates:,}) = {growing:.4g} s at most", highlight=False)
    console.print(f"waiting for all: T({updates:,}) = {updates * times[-1]:.4g} s", highlight=False)
    _print_schedules(console, config, updates)


def _work(config: Any) -> Any:
    """Gradients each worker could have done by a time, where speeds change; else None."""
    if not config.cluster.phases:
        return None
    import numpy as np

    from ringmaster_dist.simulation.session import build_speeds

    speeds = build_speeds(config)
    rates = speeds.rates
    assert rates is not None

    def work(time: float) -> Any:
        edges = np.append(rates.times, np.inf)
        spent = np.clip(time - edges[:-1], 0.0, edges[1:] - edges[:-1])
        return spent @ rates.factors / speeds.base

    return work


def _print_schedules(console: Any, config: Any, updates: int) -> None:
    from ringmaster_dist.algorithm.schedules import Constants, agnostic, theory

    given = config.method.constants
    if given.smoothness is None or given.noise is None or given.initial_gap is None:
        return
    constants = Constants(given.smoothness, given.generalized_smoothness, given.noise, given.norm_ratio,
                          given.initial_gap, updates)  # fmt: skip
    fixed = theory(constants)
    console.print(
        f"Theorem 1 for K = {updates:,}: eta = {fixed.eta_value:.4g}, alpha = {fixed.alpha_value:.4g} "
        f"(beta = {1 - fixed.alpha_value:.4g}), R = {fixed.threshold_value:g}",
        highlight=False,
    )
    schedule = agnostic(config.method.eta, generalized=given.generalized_smoothness > 0)
    for k in sorted({0, updates // 10, updates - 1}):
        console.print(
            f"agnostic at k = {k:,}: eta = {schedule.eta(k):.4g}, alpha = {schedule.alpha(k):.4g}, "
            f"R = {schedule.threshold(k):g}",
            highlight=False,
        )


def _plot(times: Sequence[float], thresholds: Sequence[int], updates: int, path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    from ringmaster_dist import theory as bounds

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4))
    means = bounds.harmonic_means(times)
    left.plot(range(1, len(times) + 1), means)
    left.set(xlabel="m quickest workers", ylabel="harmonic mean H_m, seconds")
    totals = [bounds.seconds_of_run(times, updates, lambda k, r=r: r) for r in thresholds]  # type: ignore[misc]
    right.plot(thresholds, totals, marker="o", label=f"at most, {updates:,} updates")
    right.axhline(updates * times[-1], color="C3", linestyle="--", label="waiting for all")
    right.set(xlabel="threshold R", ylabel="seconds", xscale="log", yscale="log")
    right.legend()
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise UserError(f"plot={path} cannot be written ({error})") from error
    plt.close(figure)
