"""The results of an experiment: tables, the figure, and a short summary in words."""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Callable
from pathlib import Path

from ringmaster_dist.experiment import claims, gaps
from ringmaster_dist.experiment.curves import Curve
from ringmaster_dist.experiment.plan import AUTO, BASELINE, CHANGE, EVERY_ETA, GEOMETRIES, ONE_ETA, RADII, TRAIN_LOSS
from ringmaster_dist.experiment.plan import chosen as choice_of
from ringmaster_dist.experiment.runner import Outcome, Result
from ringmaster_dist.observe import style

_COLOURS = {"ringmaster": "C0", "ringmaster_agnostic": "C1", "rennala": "C2", "delay_adaptive": "C3", AUTO: "C4",
            EVERY_ETA: "C4", "synchronous": "C5", "asynchronous": "C6", RADII: "C0", ONE_ETA: "C1",
            BASELINE: "C3"}  # fmt: skip
_TITLES = {CHANGE: "12 of 16 slow down at 200 s", "sequential": "one worker", "delayed": "8 workers, linear delays"}


_WORDS = {TRAIN_LOSS: "training loss", "loss": "validation loss", "gap": "f(x) - f*"}


def write(outcome: Outcome, folder: Path) -> list[Path]:
    """Writes all files. The same outcome gives the same bytes in the tables."""
    plan = outcome.plan
    paths = [folder / "tuning.csv", folder / "curves.csv", folder / "summary.md"]
    with paths[0].open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["regime", "method", "choice", "seed", "seconds", "updates", f"final_{plan.objective}"])
        for result in outcome.tuning:
            job, seconds = result.job, result.curve[-1][0] if result.curve else 0.0
            choice = " ".join(job.overrides)
            writer.writerow([job.regime, job.method, choice, job.seed, seconds, result.updates, outcome.end(result)])
    with paths[1].open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["regime", "method", "choice", "seed", "objective", "seconds", "value"])
        for result in outcome.final:
            job, evaluated = result.job, "loss" if plan.objective == TRAIN_LOSS else plan.objective
            for name, curve in ((TRAIN_LOSS, result.train), (evaluated, result.curve)):
                for point in curve:
                    writer.writerow([job.regime, job.method, " ".join(job.overrides), job.seed, name, *point])
    paths[2].write_text(summary(outcome))
    paths += draw(outcome, folder, plan.name, outcome.drawn, plan.objective)
    if plan.objective == TRAIN_LOSS:
        paths += draw(outcome, folder, f"{plan.name}-validation", lambda result: result.curve, "loss")
    if plan.gaps:
        paths += gaps.write(outcome, folder)
    return paths


def _curves(outcome: Outcome, regime: str, method: str) -> list[Result]:
    return [r for r in outcome.final if (r.job.regime, r.job.method) == (regime, method)]


def _seconds_to(curve: Curve, target: float) -> float:
    return next((seconds for seconds, value in curve if value <= target), math.inf)


def summary(outcome: Outcome) -> str:
    """The ranking in each regime, and how long each method takes to reach the final objective of the worst."""
    plan = outcome.plan
    lines = [f"# {plan.name} ({plan.size}), winners with {plan.seeds} seeds", "", *claims.table(outcome)]
    for regime in plan.regimes:
        lines += _ranking(outcome, regime)
    if plan.gaps:
        lines += gaps.table(outcome)
    return "\n".join(lines)


def _ranking(outcome: Outcome, regime: str) -> list[str]:
    plan = outcome.plan
    reference = RADII if RADII in plan.grids else "ringmaster"
    ends = {m: [outcome.end(r) for r in _curves(outcome, regime, m)] for m in plan.grids}
    finals = {m: statistics.median(values) for m, values in ends.items()}
    ranked = sorted(finals, key=lambda m: finals[m])
    target = max((value for values in ends.values() for value in values if math.isfinite(value)), default=math.inf)
    times = {
        m: statistics.median(_seconds_to(outcome.drawn(r), target) for r in _curves(outcome, regime, m))
        for m in plan.grids
    }
    more = plan.objective == TRAIN_LOSS
    name = "training loss" if more else plan.objective
    lines = [
        f"## {_title(regime)}",
        "",
        f"Best first: {', '.join(ranked)}. Target: {name} {target:.4g}, what the last of them reaches. A star marks a "
        "value at the edge of its grid.",
        "",
        f"| method | chosen | median final {name} | range | seconds to target | x {reference} |"
        + (" validation loss | range | updates | waste | take part |" if more else ""),
        "|---|---|---|---|---|---|" + ("---|---|---|---|---|" if more else ""),
    ]
    for method in ranked:
        results, values = _curves(outcome, regime, method), ends[method]
        ratio = times[method] / times[reference] if times[reference] else math.nan
        words = choice_of(outcome.winners[regime, method], plan.grids[method])
        line = (
            f"| {method} | {words} | {finals[method]:.4g} | {min(values):.4g} to {max(values):.4g} | "
            f"{times[method]:.4g} | {ratio:.2f} |"
        )
        if more:
            losses = [r.final for r in results]
            line += (
                f" {statistics.median(losses):.4g} | {min(losses):.4g} to {max(losses):.4g} | "
                f"{statistics.median(r.updates for r in results):,.0f} | "
                f"{statistics.median(r.wasted for r in results):.0%} | "
                f"{statistics.median(r.taking_part for r in results):.0%} |"
            )
        lines.append(line)
    return [*lines, ""]


def _title(regime: str) -> str:
    profile, _, workers = regime.partition("-")
    return f"{profile} delays, {workers} workers" if workers else regime


@style.drawing()
def draw(
    outcome: Outcome, folder: Path, name: str, drawn: Callable[[Result], Curve], objective: str
) -> list[Path]:  # fmt: skip
    """Draws the paper's figure: the objective versus virtual time, a panel per regime, median and range over seeds."""
    import numpy as np

    plan = outcome.plan
    columns = 3 if plan.objective == TRAIN_LOSS else len(plan.regimes)
    rows = math.ceil(len(plan.regimes) / columns)
    figure = style.figure(5.0 * columns, rows * (3.4 + style.LEGEND_INCHES * len(plan.grids)))
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat[len(plan.regimes) :]:
        axis.set_visible(False)
    for axis, regime in zip(axes.flat, plan.regimes, strict=False):
        for method in plan.grids:
            curves = [drawn(r) for r in _curves(outcome, regime, method) if drawn(r)]
            if not curves:
                continue
            seconds = np.array([time for time, _ in min(curves, key=len)])
            values = np.array([np.interp(seconds, *np.array(curve).T) for curve in curves])  # (seeds, seconds)
            words = choice_of(outcome.winners[regime, method], plan.grids[method])
            axis.plot(seconds, np.median(values, axis=0), color=_COLOURS[method], label=f"{method} ({words})")
            axis.fill_between(seconds, values.min(0), values.max(0), color=_COLOURS[method], alpha=0.2, linewidth=0)
        known = {**_TITLES, **{geometry: f"geometry={geometry}" for geometry in GEOMETRIES}}
        axis.set_title(known.get(regime, _title(regime) if "-" in regime else f"{regime} delays"))
        axis.set_xlabel("virtual seconds")
        style.legend_below(axis)
        if objective == "gap":
            axis.set_yscale("log")
        else:  # a curve that rises above its beginning would hide the differences at the end
            shown = [drawn(r) for r in outcome.final if r.job.regime == regime and drawn(r)]
            lowest = min(value for curve in shown for _, value in curve)
            axis.set_ylim(lowest - 0.1, 0.1 + max(curve[0][1] for curve in shown))
    for row in axes:
        row[0].set_ylabel(_WORDS[objective])
    paths = [folder / f"{name}.png", folder / f"{name}.pdf"]
    style.save(figure, paths)
    return paths
