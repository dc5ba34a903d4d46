"""What the same six machines do before and after the automatic choices, in one picture, the first of the README.

Both runs are in virtual time and differ in nothing else. Their directories stay, for ``ringmaster report``.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

from ringmaster_dist.experiment import curves
from ringmaster_dist.experiment.plan import AUTOMATIC
from ringmaster_dist.experiment.runner import Progress
from ringmaster_dist.observe import style
from ringmaster_dist.observe.records import MetricsRow, objective_of

_COMMON = ("problem=nanochat", "geometry=scion", "cluster.workers=6", "cluster.profile=linear",
           "cluster.unit_seconds=0.1", "budget.seconds=20", "run.samples=40", "eval.every=1")  # fmt: skip
_BEFORE = ("method=ringmaster", "method.threshold=8")
_BLUE, _GREY = style.LINES[0][0], style.SOFT


class Side(NamedTuple):
    """One of the two runs, as the picture shows it."""

    name: str
    choices: str
    run: dict[str, Any]  # of `page_data`
    slowness: list[float]  # of each machine, in multiples of the time of the first
    useful: list[float]  # the share of each machine's compute time that went into accepted gradients
    wasted: float  # of the compute time of all
    curve: list[tuple[float, float]]  # virtual seconds, validation loss

    @property
    def num_contributing(self) -> int:
        return sum(share >= 0.1 for share in self.useful)


def make(folder: Path, progress: Progress = lambda fraction, text: None) -> Path:
    """Makes both runs and draws the picture. Returns its path."""
    after = [automatic.overrides for automatic in AUTOMATIC.values() if "scion" in automatic.problems][-1]
    first = play(folder / "before", (*_COMMON, *_BEFORE), lambda f, text: progress(f / 2, text))
    second = play(folder / "after", (*_COMMON, *after), lambda f, text: progress((1 + f) / 2, text))
    return draw(first, second, folder / "six.png")


def play(folder: Path, overrides: tuple[str, ...], progress: Progress) -> Side:
    """Makes one run in the folder. A run that is there is replaced."""
    import torch

    from ringmaster_dist.config.compose import compose, to_typed
    from ringmaster_dist.config.describe import annotated
    from ringmaster_dist.observe.page_data import page_data
    from ringmaster_dist.observe.run_directory import RunDirectory
    from ringmaster_dist.observe.run_files import Recording
    from ringmaster_dist.simulation.session import simulate

    torch.set_num_threads(1)  # the bits of a gradient depend on it
    directory = RunDirectory(str(folder), name=folder.name, overwrite=True)
    composed = compose([*overrides, f"run.dir={folder}"])
    directory.write_config(annotated(composed) + "\n")
    summary = simulate(to_typed(composed), directory, progress)
    workers = [summary.per_worker[str(index)] for index in range(summary.num_workers)]
    return Side(
        folder.name,
        ", ".join(word for word in overrides if word.startswith(("method.threshold", "cluster.batch"))),
        page_data([Recording(directory.path)])["runs"][0],
        [worker.base_seconds / workers[0].base_seconds for worker in workers],
        [worker.used_seconds / (worker.used_seconds + worker.wasted_seconds) for worker in workers],
        summary.wasted_fraction,
        [(row.time, _objective(row)) for row in directory.metrics() if row.evaluation],
    )


def _objective(row: MetricsRow) -> float:
    value = row.evaluation[objective_of(row.evaluation)]
    return math.nan if value is None else value


@style.drawing()
def draw(before: Side, after: Side, path: Path) -> Path:
    from matplotlib.patches import Patch

    from ringmaster_dist.observe.figures import draw_timeline
    from ringmaster_dist.observe.timeline import KINDS

    figure = style.figure(11.0, 6.0)
    grid = figure.subplots(3, 2, width_ratios=[5, 1], height_ratios=[1, 1, 1.1])
    for (axis, bars), side in zip(grid, (before, after), strict=False):
        draw_timeline(axis, side.run)
        title = f"{side.choices}: {side.num_contributing} of {len(side.useful)} machines contribute, "
        axis.set_title(f"{title}{side.wasted:.0%} of the compute is discarded", fontweight="normal", fontsize=10)
        axis.text(0.0, 1.22, side.name, transform=axis.transAxes, fontsize=12, fontweight="bold")
        axis.set_yticks(range(len(side.slowness)), [_pace(slowness) for slowness in side.slowness])
        axis.set_ylabel("")
        axis.tick_params(labelbottom=False)
        rows = range(len(side.useful))
        bars.barh(rows, [100.0] * len(side.useful), color=style.kind_colour("waiting"), height=0.7)
        bars.barh(rows, [100.0 * share for share in side.useful], color=style.kind_colour("accepted"), height=0.7)
        bars.set(ylim=axis.get_ylim(), yticks=[], xlim=(0, 100), xticks=[0, 50, 100])
        bars.set_title("compute that counts, %", fontsize=10)
        bars.grid(visible=False)
    loss, corner = grid[2]
    _draw_loss(loss, before, after)
    shown = [kind for code, kind in enumerate(KINDS) if any(_has(side, code) for side in (before, after))]
    names = {"accepted": "gradient accepted", "interrupted": "stopped early", "stale": "arrived too late"}
    handles = [Patch(color=style.kind_colour(kind), label=names.get(kind, kind)) for kind in shown]
    corner.legend(handles=handles, loc="center")
    corner.axis("off")
    style.save(figure, [path])
    return path


def _pace(slowness: float) -> str:
    return "the fastest" if slowness == 1.0 else f"{slowness:.2g} x slower"


def _has(side: Side, code: int) -> bool:
    return any(sum(value or 0.0 for value in shares[code]) > 0.05 for shares in side.run["timeline"]["shares"])


def _draw_loss(axis: Any, before: Side, after: Side) -> None:
    """Draws both curves, and how much sooner one of them has the loss at which the other ends."""
    ends = {side.name: curves.last(side.curve) for side in (before, after)}
    end, goal = before.curve[-1][0], max(ends.values())
    for side, colour in ((before, _GREY), (after, _BLUE)):
        axis.plot(*zip(*side.curve, strict=True), color=colour, lw=2)
        place = (4, 5 if ends[side.name] == goal else -5)  # in points, so that the names do not overlap
        axis.annotate(side.name, (end, side.curve[-1][1]), xytext=place, textcoords="offset points", color=colour,
                      va="center", fontsize=9, annotation_clip=False)  # fmt: skip
    sooner = min(curves.seconds_to(side.curve, goal) for side in (before, after))
    if sooner < 0.98 * end:
        axis.annotate("", (sooner, goal), (end, goal), arrowprops={"arrowstyle": "->", "color": "0.3"})
        axis.annotate(f"{end - sooner:.1f} s sooner", ((sooner + end) / 2, goal), xytext=(0, 6), ha="center",
                      textcoords="offset points", fontsize=9)  # fmt: skip
    early = curves.value_at(before.curve, 0.1 * end)
    axis.set_ylim(min(ends.values()) - 0.1 * (early - goal), early)
    axis.set_xlim(0, end)
    axis.set_xlabel("seconds")
    axis.set_ylabel("validation loss")
