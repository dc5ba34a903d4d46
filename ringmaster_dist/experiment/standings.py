"""The results of a race: the table, the figure of ratios, and a summary in words."""

from __future__ import annotations

import csv
import math
import statistics
from pathlib import Path
from typing import Any, NamedTuple

from ringmaster_dist.experiment.curves import seconds_to, smoothed
from ringmaster_dist.experiment.machines import Cell
from ringmaster_dist.experiment.plan import AUTOMATIC, short
from ringmaster_dist.experiment.race import TARGET_AT, Race, target
from ringmaster_dist.observe import style

LIMIT = 1.05  # an automatic contender holds in a cell if it takes at most this many times as long as the best other
_NAMES = {"scion": "NanoChat with radii", "muon": "NanoChat, the paper's geometry", "quadratic": "quadratic"}
_SPEEDS = {"two_speeds": "two speeds", "change": "speeds change"}
_SHORT = {"ringmaster": "fixed R", "ringmaster_agnostic": "agnostic", "delay_adaptive": "delay-adaptive"}
_GREYS = {"ringmaster": "s", "asynchronous": "^", "delay_adaptive": "v", "rennala": "P", "ringmaster_agnostic": "X"}
_GOOD, _BAD, _GREY = style.kind_colour("accepted"), style.kind_colour("invalid"), style.SOFT


class Standing(NamedTuple):
    """A contender in a cell: medians over the seeds."""

    cell: Cell
    contender: str
    choice: str  # from its grid
    by_seed: list[float]  # seconds to the target, infinite where it is not reached
    wasted: float
    taking_part: float

    @property
    def seconds(self) -> float:
        return statistics.median(self.by_seed)

    @property
    def label(self) -> str:
        return f"{_SHORT.get(self.contender, self.contender)} ({self.choice})"


class Line(NamedTuple):
    """An automatic contender versus the best of the others, in one cell."""

    own: Standing
    best: Standing
    goal: float

    @property
    def ratio(self) -> float:
        return self.own.seconds / self.best.seconds

    @property
    def holds(self) -> bool:
        return self.ratio <= LIMIT

    @property
    def by_seed(self) -> list[float]:
        """The ratio of each seed. A seed with which the best other does not reach the target gives none."""
        pairs = zip(self.own.by_seed, self.best.by_seed, strict=True)
        return [own / best for own, best in pairs if math.isfinite(best)]


def standings(race: Race, cell: Cell) -> tuple[float, dict[str, Standing]]:
    """The target of a cell and how every contender stands."""
    goal = target(cell, [r for r in race.final if r.job.regime == cell.name])
    found = {}
    for contender in cell.grids:
        results = race.of(cell, contender)
        words = (short(word) for word in race.winners[cell.name, contender].overrides)
        found[contender] = Standing(
            cell, contender, ", ".join(words).replace("threshold", "R").replace("batch", "B"),
            [seconds_to(r.curve, goal) for r in results],
            statistics.median(r.wasted for r in results), statistics.median(r.taking_part for r in results),
        )  # fmt: skip
    return goal, found


def lines(race: Race) -> list[Line]:
    found = []
    for cell in race.plan.cells:
        goal, standing = standings(race, cell)
        best = min((s for name, s in standing.items() if name not in AUTOMATIC), key=lambda s: s.seconds)
        found += [Line(standing[name], best, goal) for name in AUTOMATIC if name in standing]
    return found


def write(race: Race, folder: Path) -> list[Path]:
    """Writes all files. The same race gives the same bytes in the tables."""
    paths = [folder / name for name in ("machines.csv", "tuning.csv", "curves.csv", "summary.md")]
    _table(paths[0], race)
    with paths[1].open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["cell", "contender", "choice", "budget_seconds", "updates", "smoothed_objective"])
        for r in race.tuning:
            seconds, values = smoothed(r.curve)
            choice = " ".join(r.job.overrides)
            writer.writerow([r.job.regime, r.job.method, choice, seconds[-1], r.updates, values[-1]])
    with paths[2].open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["cell", "contender", "choice", "seed", "seconds", "objective"])
        for r in race.final:
            for point in r.curve:
                writer.writerow([r.job.regime, r.job.method, " ".join(r.job.overrides), r.job.seed, *point])
    paths[3].write_text(summary(race))
    return [*paths, draw(race, folder)]


def _table(path: Path, race: Race) -> None:
    """All contenders in all cells."""
    columns = ["workers", "speeds", "problem", "contender", "choice", "target", "budget_seconds", "seconds",
               "seconds_by_seed", "ratio_to_best_other", "wasted", "taking_part"]  # fmt: skip
    best = {line.own.cell.name: line.best for line in lines(race)}
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        for cell in race.plan.cells:
            goal, found = standings(race, cell)
            for name, s in found.items():
                by_seed = " ".join(f"{seconds:.5g}" for seconds in s.by_seed)
                figures = [f"{value:.5g}" for value in (goal, cell.seconds, s.seconds)]
                ratio = s.seconds / best[cell.name].seconds
                writer.writerow([cell.workers, cell.speeds, cell.problem, name, s.choice, *figures, by_seed,
                                 f"{ratio:.4f}", f"{s.wasted:.4f}", f"{s.taking_part:.4f}"])  # fmt: skip


def summary(race: Race) -> str:
    """How many cells hold, which fail, and the table."""
    found = lines(race)
    text = [f"# machines ({race.plan.size}), winners with {race.plan.seeds} seeds", ""]
    for name in AUTOMATIC:
        mine = [line for line in found if line.own.contender == name]
        if not mine:
            continue
        failing = [line for line in mine if not line.holds]
        ratios = sorted(line.ratio for line in mine)
        text += [
            f"**{name}** reaches the target at most {LIMIT:g} times as late as the best other contender in "
            f"**{len(mine) - len(failing)} of {len(mine)} cells**. The median ratio is "
            f"{statistics.median_low(ratios):.2f}, and the largest is {_ratio(ratios[-1])}.",
            "",
            *([f"It fails in {', '.join(f'{_place(x.own.cell)} ({_ratio(x.ratio)})' for x in failing)}.", ""]
              if failing else []),
        ]  # fmt: skip
    text += [
        f"The target of a cell is the lowest loss that any of the other contenders has at {TARGET_AT:.0%} of the "
        "budget, as the median over the seeds. Curves are the gap, or the loss on a fixed set of validation rows, at "
        "regular virtual times, and are smoothed by a moving average. Waste is the share of compute time that went "
        "into gradients that were not accepted. A worker takes part if a tenth or more of its compute time went into "
        "accepted gradients.",
        "",
        "| problem | workers | speeds | target | best other | seconds | contender | seconds | ratio | by seed | "
        "waste | take part |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for line in found:
        own, best, cell = line.own, line.best, line.own.cell
        verdict = "" if line.holds else " **fails**"
        by_seed = [_ratio(ratio) for ratio in sorted(line.by_seed)]
        text.append(
            f"| {_NAMES[cell.problem]} | {cell.workers} | {_speeds(cell)} | {line.goal:.4g} | {best.label} | "
            f"{_seconds(best)} | {own.label} | {_seconds(own)} | {_ratio(line.ratio)}{verdict} | "
            f"{by_seed[0]} to {by_seed[-1]} | {own.wasted:.0%} | {own.taking_part:.0%} |"
        )
    return "\n".join([*text, ""])


def _speeds(cell: Cell) -> str:
    return _SPEEDS.get(cell.speeds, cell.speeds)


def _place(cell: Cell) -> str:
    return f"{_NAMES[cell.problem]}, {cell.workers} workers, {_speeds(cell)}"


def _ratio(ratio: float) -> str:
    return f"{ratio:.2f}" if math.isfinite(ratio) else "never"


def _seconds(standing: Standing) -> str:
    return f"{standing.seconds:.4g}" if math.isfinite(standing.seconds) else "never"


@style.drawing()
def draw(race: Race, folder: Path) -> Path:
    """Draws the seconds to the target of every contender over those of the best other: a panel per problem."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    problems = list(dict.fromkeys(cell.problem for cell in race.plan.cells))
    rows = list(dict.fromkeys((cell.workers, cell.speeds) for cell in race.plan.cells))
    figure = style.figure(max(8.4, 1.8 + 3.6 * len(problems)), 1.9 + 0.36 * len(rows))  # the legend needs 8
    axes = figure.subplots(1, len(problems), sharey=True, squeeze=False)
    automatic = [name for name in AUTOMATIC if any(name in cell.grids for cell in race.plan.cells)]
    for axis, problem in zip(axes[0], problems, strict=True):
        axis.axvspan(_LEFT, LIMIT, color=_GOOD, alpha=0.1, lw=0)
        axis.axvline(1.0, color="0.4", lw=1)
        for cell in (cell for cell in race.plan.cells if cell.problem == problem):
            _draw_cell(axis, race, cell, rows.index((cell.workers, cell.speeds)), automatic)
        axis.set_title(_NAMES[problem])
        axis.set_xscale("log")
        axis.set_xlim(_LEFT, _RIGHT)
        ticks = [0.4, 0.5, 0.6, 0.8, 1.0, 1.2, 1.5, _NEVER]
        axis.set_xticks(ticks, [*(f"{tick:g}" for tick in ticks[:-1]), "never"])
        axis.xaxis.minorticks_off()
        axis.grid(visible=False, axis="y")
    names = [f"{workers} workers, {_SPEEDS.get(speeds, speeds)}" for workers, speeds in rows]
    axes[0][0].set_yticks(range(len(rows)), names)
    axes[0][0].set_ylim(len(rows) - 0.5, -0.5)
    figure.supxlabel("seconds to the target loss, relative to the best method tuned for the cell")
    others = [name for name in _GREYS if any(name in cell.grids for cell in race.plan.cells)]
    handles: list[Any] = [
        Line2D([], [], ls="", marker=_MARKERS[index], ms=8, color=_GOOD, label=name)
        for index, name in enumerate(automatic)
    ]
    handles.append(Patch(color=_BAD, label=f"the same, above {LIMIT:g}"))
    handles += [
        Line2D([], [], ls="", marker=_GREYS[n], ms=5, color=_GREY, label=f"{_SHORT.get(n, n)}, tuned") for n in others
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=4)
    path = folder / "machines.png"
    style.save(figure, [path])
    return path


_LEFT, _NEVER, _RIGHT = 0.38, 1.9, 2.05  # of the axis of ratios
_MARKERS = ("o", "D", "*", "h")  # of the automatic contenders


def _draw_cell(axis: Any, race: Race, cell: Cell, row: int, automatic: list[str]) -> None:
    _, found = standings(race, cell)
    best = min(s.seconds for name, s in found.items() if name not in AUTOMATIC)
    shown = {name: min(_NEVER, max(_LEFT, s.seconds / best)) for name, s in found.items()}
    axis.axhline(row, color="0.92", lw=0.8, zorder=0)
    for name, marker in _GREYS.items():
        if name in shown:
            axis.plot(shown[name], row, marker=marker, ms=5, color=_GREY, alpha=0.8, lw=0, clip_on=False)
    for index, name in enumerate(automatic):
        if name in shown:
            colour = _GOOD if found[name].seconds / best <= LIMIT else _BAD
            axis.plot(shown[name], row, marker=_MARKERS[index], ms=9, color=colour, mec="white", lw=0, clip_on=False,
                      zorder=3)  # fmt: skip
