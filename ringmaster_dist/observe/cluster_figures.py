"""The figures of ``ringmaster theory`` and ``ringmaster advise``, drawn from the numbers that the commands compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ringmaster_dist.observe import style

_BARS_WITH_NAMES = 24


def draw_theory(
    path: Path, means: Sequence[float], thresholds: Sequence[int], totals: Sequence[float], updates: int, waiting: float
) -> None:
    """Draws H_m, and the bound of ``updates`` updates for each threshold. Raises OSError or ValueError."""
    from matplotlib.ticker import LogLocator

    with style.drawing():
        figure = style.figure(10.0, 3.8)
        left, right = figure.subplots(1, 2)
        left.plot(range(1, len(means) + 1), means, marker="o" if len(means) <= 32 else "", ms=4)
        left.set(title="the m quickest workers together", xlabel="m", ylabel="harmonic mean H_m, seconds")
        left.set_ylim(bottom=0)
        right.plot(thresholds, totals, marker="o", ms=5, label="at most, with threshold R")
        right.axhline(waiting, label="waiting for all", **style.line(1)._asdict())
        right.set(title=f"time of {updates:,} updates", xlabel="threshold R", ylabel="seconds", xscale="log",
                  yscale="log")  # fmt: skip
        right.set_xticks(thresholds, [str(threshold) for threshold in thresholds], minor=False)
        right.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        right.yaxis.set_major_formatter("{x:g}")
        right.minorticks_off()
        right.legend()
        style.save(figure, [path])


def draw_advice(
    path: Path, work_per_second: Mapping[str, float], wasted: Mapping[str, float], chosen: str, useful: Sequence[float]
) -> None:
    """Draws what each candidate would do, and the share of each worker's work that the chosen one would accept.

    Raises OSError or ValueError.
    """
    with style.drawing():
        figure = style.figure(11.0, max(3.4, 0.34 * len(work_per_second) + 1.4))
        work, waste, shares = figure.subplots(1, 3, width_ratios=[3, 2, 3])
        rows = range(len(work_per_second))
        colours = [style.kind_colour("accepted") if name == chosen else style.SOFT for name in work_per_second]
        work.barh(rows, list(work_per_second.values()), color=colours)
        names = [f"{name} (advised)" if name == chosen else name for name in work_per_second]
        work.set_yticks(rows, names)
        work.set(title="accepted gradients per second")
        waste.barh(rows, [100 * wasted[name] for name in work_per_second], color=style.kind_colour("interrupted"))
        waste.set(title="compute wasted, %", xlim=(0, 100), yticks=[])
        for axis in (work, waste):
            axis.set_ylim(len(rows) - 0.5, -0.5)
            axis.grid(visible=False, axis="y")
        shares.bar(range(len(useful)), [100 * share for share in useful], color=style.kind_colour("accepted"))
        shares.set(title="work of each worker that counts, %", xlabel="worker, the quickest first", ylim=(0, 100))
        if len(useful) <= _BARS_WITH_NAMES:
            shares.set_xticks(range(len(useful)))
        shares.grid(visible=False, axis="x")
        style.save(figure, [path])
