"""The figures of ``ringmaster bench time-to-loss``: a panel of all contenders for each cluster, and an overview."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ringmaster_dist.bench.contest import CONTENDERS, OURS, Cluster
from ringmaster_dist.observe import style

_WIDTH, _ROW, _AROUND = 9.5, 0.27, 0.75  # inches: of the figure, for a contender, and around those of a cluster
_MAIN = ("rows", "ddp", "diloco-scaled")  # the contenders in the overview

Seconds = Sequence[tuple[Cluster, Mapping[str, Sequence[float]]]]  # of each seed by contender, infinite if it missed


def draw(seconds: Seconds, path: Path) -> None:
    heights = [_AROUND + _ROW * len(named) for _, named in seconds]
    with style.drawing():
        figure = style.figure(_WIDTH, sum(heights))
        axes = figure.subplots(len(seconds), 1, squeeze=False, height_ratios=heights)
        for axis, (cluster, named) in zip(axes[:, 0], seconds, strict=True):
            _panel(axis, cluster, named)
        axes[-1, 0].set_xlabel("seconds to the same validation loss, on paced workers")
        style.save(figure, [path])


def draw_overview(seconds: Seconds, path: Path) -> None:
    """Bars for each cluster: the medians of our automatic choices and of the main rivals."""
    found = [{name: statistics.median_high(named[name]) for name in _MAIN if name in named} for _, named in seconds]
    right = 1.12 * max((value for own in found for value in own.values() if math.isfinite(value)), default=1.0)
    thickness = 0.8 / len(_MAIN)
    with style.drawing():
        figure = style.figure(_WIDTH, _AROUND + 0.55 * len(seconds))
        axis = figure.subplots()
        for place, name in enumerate(_MAIN):
            rows = [row for row, own in enumerate(found) if name in own]
            lengths = [min(found[row][name], right) for row in rows]
            bars = axis.barh([row + (place - 1) * thickness for row in rows], lengths, 0.9 * thickness,
                             color=style.line(place).color, label=CONTENDERS[name].title)  # fmt: skip
            texts = [f"{length:.1f}" if length < right else f"not in {seconds[row][0].limit_seconds:g}"
                     for row, length in zip(rows, lengths, strict=True)]  # fmt: skip
            axis.bar_label(bars, texts, padding=3, fontsize=style.LEGEND_POINTS)
        axis.set_yticks(range(len(seconds)), [cluster.title for cluster, _ in seconds])
        axis.set_ylim(len(seconds) - 0.5, -0.5)
        axis.set_xlim(0, right)
        axis.grid(axis="y", visible=False)
        axis.set_xlabel("seconds to the same validation loss, median of the seeds")
        figure.legend(loc="outside upper left", ncols=len(_MAIN), handlelength=1.0)
        style.save(figure, [path])


def _panel(axis: Any, cluster: Cluster, named: Mapping[str, Sequence[float]]) -> None:
    """A dot for the median of each contender, and a line from its first to its last seed. Ours are filled."""
    finite = [value for own in named.values() for value in own if math.isfinite(value)]
    right = 1.12 * max(finite, default=cluster.limit_seconds)
    for row, (name, own) in enumerate(named.items()):
        is_ours = CONTENDERS[name].kind == OURS
        colour = style.line(0 if is_ours else 1).color
        median = statistics.median_high(own)
        axis.plot([min(own), min(max(own), right)], [row, row], color=colour, linestyle="solid", lw=2.5, alpha=0.5)
        if math.isfinite(median):
            axis.plot(
                median, row, marker="o" if is_ours else "s", ms=7, color=colour, mfc=colour if is_ours else "white"
            )
            axis.annotate(f"{median:.1f}", (max(own) if math.isfinite(max(own)) else right, row), xytext=(8, 0),
                          textcoords="offset points", va="center", fontsize=style.LEGEND_POINTS)  # fmt: skip
        else:
            axis.annotate(f"not in {cluster.limit_seconds:g} s", (right, row), ha="right", va="center", color=colour,
                          fontsize=style.LEGEND_POINTS)  # fmt: skip
    axis.set_yticks(range(len(named)), [CONTENDERS[name].title for name in named])
    axis.set_ylim(len(named) - 0.5, -0.5)
    axis.set_xlim(0, right)
    axis.grid(axis="y", visible=False)
    axis.set_title(cluster.title, fontsize=10)
