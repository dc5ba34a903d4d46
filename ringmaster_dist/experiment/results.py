"""The results of an experiment: tables, the figure, and a short summary in words."""

from __future__ import annotations

import csv
import math
import statistics
from pathlib import Path

from ringmaster_dist.experiment.plan import AUTO, BASELINE, CHANGE, GEOMETRIES, ONE_ETA, RADII
from ringmaster_dist.experiment.runner import Outcome, Result

_COLOURS = {"ringmaster": "C0", "ringmaster_agnostic": "C1", "rennala": "C2", "delay_adaptive": "C3", AUTO: "C4",
            "synchronous": "C5", "asynchronous": "C6", RADII: "C0", ONE_ETA: "C1", BASELINE: "C3"}  # fmt: skip
_TITLES = {CHANGE: "12 of 16 slow down at 200 s", "sequential": "one worker", "delayed": "8 workers, linear delays"}


def write(outcome: Outcome, folder: Path) -> list[Path]:
    """Writes all files. The same outcome gives the same bytes in the tables."""
    paths = [folder / "tuning.csv", folder / "curves.csv", folder / "summary.md"]
    with paths[0].open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["regime", "method", "choice", "seed", "updates", f"final_{outcome.plan.objective}"])
        for result in outcome.tuning:
            job = result.job
            writer.writerow([job.regime, job.method, " ".join(job.overrides), job.seed, result.updates, result.final])
    with paths[1].open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["regime", "method", "choice", "seed", "seconds", outcome.plan.objective])
        for result in outcome.final:
            job = result.job
            for seconds, value in result.curve:
                writer.writerow([job.regime, job.method, " ".join(job.overrides), job.seed, seconds, value])
    paths[2].write_text(summary(outcome))
    return [*paths, *draw(outcome, folder)]


def _curves(outcome: Outcome, regime: str, method: str) -> list[Result]:
    return [r for r in outcome.final if (r.job.regime, r.job.method) == (regime, method)]


def _seconds_to(result: Result, target: float) -> float:
    return next((seconds for seconds, value in result.curve if value <= target), math.inf)


def summary(outcome: Outcome) -> str:
    """The ranking in each regime, and how long each method takes to reach the final objective of the worst."""
    plan = outcome.plan
    reference = RADII if RADII in plan.grids else "ringmaster"
    lines = [f"# {plan.name} ({plan.size}), winners with {plan.seeds} seeds", ""]
    for regime in plan.regimes:
        finals = {m: statistics.median(r.final for r in _curves(outcome, regime, m)) for m in plan.grids}
        ranked = sorted(finals, key=lambda m: finals[m])
        every = [r.final for r in outcome.final if r.job.regime == regime]
        target = max((value for value in every if math.isfinite(value)), default=math.inf)
        times = {m: statistics.median(_seconds_to(r, target) for r in _curves(outcome, regime, m)) for m in plan.grids}
        lines += [
            f"## {regime}",
            "",
            f"Best first: {', '.join(ranked)}. Target: {plan.objective} {target:.4g}, what the last of them reaches.",
            "",
            f"| method | chosen | median final {plan.objective} | range | seconds to target | x {reference} |",
            "|---|---|---|---|---|---|",
        ]
        for method in ranked:
            chosen = " ".join(short(word) for word in outcome.winners[regime, method].overrides)
            ratio = times[method] / times[reference] if times[reference] else math.nan
            ends = [r.final for r in _curves(outcome, regime, method)]
            lines.append(
                f"| {method} | {chosen} | {finals[method]:.4g} | {min(ends):.4g} to {max(ends):.4g} | "
                f"{times[method]:.4g} | {ratio:.2f} |"
            )
        lines.append("")
    return "\n".join(lines)


def short(word: str) -> str:
    """``embedding=60`` for ``geometry.radius.embedding=60``."""
    return word.partition("=")[0].rpartition(".")[2] + "=" + word.partition("=")[2]


def draw(outcome: Outcome, folder: Path) -> list[Path]:
    """Draws the paper's figure: the objective versus virtual time, a panel per regime, median and range over seeds."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    plan = outcome.plan
    figure, axes = plt.subplots(1, len(plan.regimes), figsize=(4.2 * len(plan.regimes), 3.6), squeeze=False)
    for axis, regime in zip(axes[0], plan.regimes, strict=True):
        for method in plan.grids:
            curves = [r.curve for r in _curves(outcome, regime, method) if r.curve]
            if not curves:
                continue
            seconds = np.array([time for time, _ in min(curves, key=len)])
            values = np.array([np.interp(seconds, *np.array(curve).T) for curve in curves])  # (seeds, seconds)
            chosen = ", ".join(short(word) for word in outcome.winners[regime, method].overrides)
            axis.plot(seconds, np.median(values, axis=0), color=_COLOURS.get(method), label=f"{method} ({chosen})")
            axis.fill_between(seconds, values.min(0), values.max(0), color=_COLOURS.get(method), alpha=0.2, linewidth=0)
        axis.set_title(_TITLES.get(regime, f"geometry={regime}" if regime in GEOMETRIES else f"{regime} delays"))
        axis.set_xlabel("virtual seconds")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=6, loc="upper right")
        if plan.objective == "gap":
            axis.set_yscale("log")
        else:  # a curve that rises above its beginning would hide the differences at the end
            lowest = min(value for r in outcome.final if r.job.regime == regime for _, value in r.curve)
            axis.set_ylim(lowest - 0.1, 0.1 + max(r.curve[0][1] for r in outcome.final if r.job.regime == regime))
    axes[0][0].set_ylabel("f(x) - f*" if plan.objective == "gap" else "validation loss")
    figure.tight_layout()
    paths = [folder / f"{plan.name}.png", folder / f"{plan.name}.pdf"]
    for path in paths:
        figure.savefig(path, dpi=150, metadata={"CreationDate": None} if path.suffix == ".pdf" else None)
    plt.close(figure)
    return paths
