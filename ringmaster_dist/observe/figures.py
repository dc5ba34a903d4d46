"""The PNG figures of a report, drawn from the values of `page_data`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ringmaster_dist.observe import style
from ringmaster_dist.observe.records import VERDICTS
from ringmaster_dist.observe.timeline import KINDS

NAMES = ("loss.png", "delays.png", "workers.png")
_WIDTH = 11.0
_MOST_TIMELINES = 4  # runs whose workers are drawn


def draw(data: dict[str, Any], folder: Path) -> list[Path]:
    """Writes the figures and returns their paths."""
    paths = [folder / name for name in NAMES]
    with style.drawing():
        for path, drawn in zip(paths, (_loss, _delays, _workers), strict=True):
            style.save(drawn(data), [path])
    return paths


def _panels(columns: int) -> Any:
    figure = style.figure(_WIDTH, 3.6)
    return figure, figure.subplots(1, columns)


def _plot(axis: Any, x: list[Any], y: list[Any], look: style.Line, label: str, **more: Any) -> None:
    kept = [(a, b) for a, b in zip(x, y, strict=False) if a is not None and b is not None]
    if kept:
        axis.plot(*zip(*kept, strict=True), label=label, **{**look._asdict(), **more})


def _legend(axis: Any, least: int = 2) -> None:
    if len(axis.get_legend_handles_labels()[0]) >= least:
        axis.legend()


def _loss(data: dict[str, Any]) -> Any:
    from matplotlib.ticker import EngFormatter

    runs = data["runs"]
    gap = all(run["objective"] == "gap" for run in runs)
    shown = [("time", "seconds"), ("updates", "updates")]
    if any("tokens" in run["training"] for run in runs):
        shown.append(("tokens", "tokens"))
    figure, axes = _panels(len(shown))
    for axis, (key, unit) in zip(axes, shown, strict=True):
        for place, run in enumerate(runs):
            training, evaluation, alone = run["training"], run["evaluation"], len(runs) == 1
            if not gap:
                label = "training" if alone else run["label"]
                _plot(axis, training.get(key, []), training["value"], style.line(place), label, lw=1.2)
            if gap:
                label = "f(x) - f*" if alone else run["label"]
                _plot(axis, evaluation.get(key, []), evaluation["value"], style.line(place), label)
            elif alone:
                marks = {"marker": "o", "ms": 3.5} if len(evaluation["value"]) <= 40 else {}
                _plot(axis, evaluation.get(key, []), evaluation["value"], style.line(1), "validation", **marks)
        axis.set_yscale("log" if gap and axis.lines else "linear")
        axis.set_xlabel(unit)
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))
        axis.set_title(f"{'objective gap' if gap else 'loss'} versus {key}")
        _legend(axis, 1)
    return figure


def _delays(data: dict[str, Any]) -> Any:
    runs = data["runs"]
    figure, (accept, bars, delay) = _panels(3)
    for place, run in enumerate(runs):
        look, over_time = style.line(place), run["over_time"]
        _plot(accept, over_time["time"], over_time.get("accepted", []), look, run["label"])
        if len(runs) > 1:
            _plot(delay, over_time["time"], over_time.get("delay_mean", []), look, run["label"])
            counts = [sum(column) for column in zip(*(run["delays"][name] for name in VERDICTS), strict=True)]
            shares = [count / max(1, sum(counts)) for count in counts]
            bars.step(run["delays"]["low"], shares, where="mid", label=run["label"], **look._asdict())
    accept.set(title="share of arriving gradients accepted", xlabel="seconds", ylim=(0, 1.03))
    bars.set(title="gradients by delay", xlabel="delay (updates)")
    delay.set(title="delay over time", xlabel="seconds")
    if len(runs) == 1:
        _delay_bars(bars, runs[0]["delays"])
        over_time, limit = runs[0]["over_time"], runs[0]["threshold"]
        for place, name in enumerate(("mean", "p95", "max")):
            _plot(delay, over_time["time"], over_time.get(f"delay_{name}", []), style.line(place), name, lw=1.4)
        _plot(delay, limit["time"], limit["value"], style.Line(style.SOFT, (0, (1, 2))), "threshold R")
    for axis in (accept, bars, delay):
        _legend(axis)
    delay.set_ylim(bottom=0)
    return figure


def _delay_bars(axis: Any, delays: dict[str, Any]) -> None:
    base, width = [0.0] * len(delays["low"]), delays["width"]
    for name in VERDICTS:
        axis.bar(delays["low"], delays[name], width=0.85 * width, bottom=base, label=name,
                 align="edge" if width > 1 else "center", color=style.kind_colour(name))  # fmt: skip
        base = [a + b for a, b in zip(base, delays[name], strict=True)]


def _workers(data: dict[str, Any]) -> Any:
    runs = [run for run in data["runs"] if run["timeline"]["workers"]][:_MOST_TIMELINES]
    heights = [max(1.3, 0.16 * len(run["timeline"]["workers"]) + 0.5) for run in runs] or [1.3]
    figure = style.figure(_WIDTH, sum(heights) + 0.9)
    grid = figure.subplots(len(heights), 2, squeeze=False, width_ratios=[4, 1], height_ratios=heights)
    for (axis, bars), run in zip(grid, runs, strict=False):
        draw_timeline(axis, run)
        shown = {worker: row for row, worker in enumerate(run["timeline"]["workers"])}
        listed = [worker for worker in run["workers"] if worker["worker"] in shown]
        bars.barh([shown[w["worker"]] for w in listed], [100 * w["share"] for w in listed],
                  color=style.kind_colour("accepted"))  # fmt: skip
        bars.set(title="share of accepted, %", xlim=(0, 100), ylim=axis.get_ylim(), yticks=[])
        bars.grid(visible=False, axis="y")
    grid[-1][0].set_xlabel("seconds")
    figure.legend(handles=kind_handles(KINDS), loc="outside lower center", ncols=len(KINDS))
    return figure


def kind_handles(kinds: Sequence[str]) -> list[Any]:
    """What a legend shows for each kind of work."""
    from matplotlib.patches import Patch

    return [Patch(color=style.kind_colour(kind), label=style.kind_name(kind)) for kind in kinds]


def draw_timeline(axis: Any, run: dict[str, Any]) -> None:
    """Draws a row for each worker: the shares of each moment that it spent on each kind of work."""
    import numpy as np

    timeline = run["timeline"]
    for row, shares in enumerate(timeline["shares"]):
        edges = np.linspace(0.0, timeline["seconds"], len(shares[0]) + 1)
        base = np.full(len(shares[0]), row + 0.42)
        for kind, share in zip(KINDS, shares, strict=True):
            top = base - 0.84 * np.array(share, dtype=float)
            axis.stairs(top, edges, baseline=base, fill=True, color=style.kind_colour(kind), lw=0)
            base = top
    workers = timeline["workers"]
    axis.set(
        xlim=(0, timeline["seconds"]), ylim=(len(workers) - 0.5, -0.5), title=f"{run['label']}: what each worker did"
    )
    step = max(1, len(workers) // 16)
    axis.set_yticks(range(0, len(workers), step), [str(worker) for worker in workers[::step]])
    axis.set_ylabel("worker")
    axis.grid(visible=False)
