"""The time to a gap, with every method tuned for that gap: the table and the figure.

The setting that reaches a gap first with the tuning's seed runs again with other seeds. The figure's lines show, for
every gap, the time of the setting that is the quickest for it with the tuning's seed. Its points are the other seeds.
"""

from __future__ import annotations

import csv
import math
import statistics
from pathlib import Path

import numpy as np

from ringmaster_dist.experiment.claims import times
from ringmaster_dist.experiment.curves import seconds_to_each
from ringmaster_dist.experiment.plan import chosen
from ringmaster_dist.experiment.runner import Outcome
from ringmaster_dist.observe import style

_POINTS = 60  # of a line


def table(outcome: Outcome) -> list[str]:
    plan = outcome.plan
    lines = []
    for regime in plan.regimes:
        lines += [
            f"## Seconds to a gap, {regime} delays",
            "",
            "| method | " + " | ".join(f"gap {gap:g} | chosen" for gap in plan.gaps) + " |",
            "|---|" + "---|---|" * len(plan.gaps),
        ]
        found = {gap: times(outcome, regime, gap) for gap in plan.gaps}
        for method in sorted(plan.grids, key=lambda m: [statistics.median(found[gap][m]) for gap in plan.gaps[::-1]]):
            cells = []
            for gap in plan.gaps:
                seconds, job = found[gap][method], outcome.quickest[regime, method, gap]
                cells += [_spread(seconds), chosen(job, plan.grids[method])]
            lines.append(f"| {method} | {' | '.join(cells)} |")
        lines.append("")
    return lines


def _spread(seconds: list[float]) -> str:
    low, middle, high = (_words(value) for value in (min(seconds), statistics.median(seconds), max(seconds)))
    return f"{middle} ({low} to {high})" if low != high else middle


def _words(seconds: float) -> str:
    return f"{seconds:.4g}" if math.isfinite(seconds) else "never"


def write(outcome: Outcome, folder: Path) -> list[Path]:
    """The times of every seed, and the figure."""
    path = folder / "gaps.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["regime", "method", "gap", "choice", "seconds_by_seed"])
        for (regime, method, gap), job in outcome.quickest.items():
            seconds = " ".join(f"{value:.5g}" for value in times(outcome, regime, gap)[method])
            writer.writerow([regime, method, gap, " ".join(job.overrides), seconds])
    return [path, *_draw(outcome, folder)]


@style.drawing()
def _draw(outcome: Outcome, folder: Path) -> list[Path]:
    """Draws the time to each gap: a line of the quickest setting, and a dot for each seed of the tuned ones."""
    plan = outcome.plan
    figure = style.figure(4.2 * len(plan.regimes), 3.6 + style.LEGEND_INCHES * len(plan.grids))
    axes = figure.subplots(1, len(plan.regimes), squeeze=False)
    most = max(value for result in outcome.tuning for _, value in result.curve[:1])
    levels = np.geomspace(0.5 * most, 0.3 * min(plan.gaps), _POINTS).tolist()
    for axis, regime in zip(axes[0], plan.regimes, strict=True):
        for number, method in enumerate(plan.grids):
            curves = [r.curve for r in outcome.tuning if (r.job.regime, r.job.method) == (regime, method)]
            quickest = np.array([seconds_to_each(curve, levels) for curve in curves]).min(axis=0)  # (levels,)
            look = style.line(number)
            axis.plot(quickest, levels, **look._asdict(), label=method)
            for gap in plan.gaps:
                seconds = times(outcome, regime, gap)[method]
                axis.plot(seconds, [gap] * len(seconds), color=look.color, marker="o", ms=3, lw=0)
        axis.set_title(f"{regime} delays")
        axis.set_xlabel("virtual seconds to this gap")
        axis.set_xscale("log")
        axis.set_yscale("log")
        style.legend_below(axis)
    axes[0][0].set_ylabel("f(x) - f*, each method tuned for it")
    paths = [folder / f"{plan.name}-gaps.{suffix}" for suffix in ("png", "pdf")]
    style.save(figure, paths)
    return paths
