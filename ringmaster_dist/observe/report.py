"""The report of one or several runs: one HTML page that needs nothing else, and PNG figures of the same values."""

from __future__ import annotations

import html
import json
import logging
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from ringmaster_dist.observe.console import print_summary
from ringmaster_dist.observe.page_data import page_data
from ringmaster_dist.observe.run_files import Recording, RunDirectoryError, RunFiles

log = logging.getLogger(__name__)

FOLDER = "report"  # in a run directory
_ASSETS = Path(__file__).parent / "assets"
COLOURS = {"accepted": "#1f9e89", "stale": "#e69f00", "invalid": "#d1495b", "interrupted": "#9467bd",
            "waiting": "#d5dae2"}  # fmt: skip
_PALETTE = ("#3b7dd8", "#e69f00", "#1f9e89", "#cc79a7", "#d55e00", "#56b4e9", "#8c6d31", "#7f7f7f")
_MOST_TIMELINES = 4  # runs whose workers are drawn
NAMES = ("loss.png", "delays.png", "workers.png")


def write_report(directories: Sequence[Path], folder: Path) -> list[Path]:
    """Writes the page and the figures and returns their paths. Raises RunDirectoryError if there is nothing to show."""
    data = page_data([Recording(directory) for directory in directories])
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "report.html"
        temporary = folder / ".report.html"
        temporary.write_text(page(data))
        temporary.replace(path)  # a reader never sees half a page
        return [path, *draw(data, folder)]
    except OSError as error:
        raise RunDirectoryError(
            f"{folder} cannot be written ({error.strerror or error}): choose another --out"
        ) from error


def show_summary(files: RunFiles, *, report: bool) -> int:
    """Says how a run has ended and draws the report if wanted. Returns the exit code, which is 1 if it has diverged."""
    summary = files.outcome()
    print_summary(Console(file=sys.stdout), files, summary)
    if report:
        show_report(files.path)
    return 1 if summary.diverged else 0


def show_report(directory: Path) -> None:
    """Draws the report of a run that has ended and says where it is. A failure to draw does not change the outcome."""
    try:
        print(f"  report: {write_report([directory], directory / FOLDER)[0]}", flush=True)
    except Exception as error:
        log.debug("the report could not be drawn", exc_info=True)
        print(
            f"ringmaster: the report could not be drawn ({error}): see ringmaster report {directory}", file=sys.stderr
        )


def page(data: dict[str, Any], refresh_seconds: float = 0.0) -> str:
    """The page that shows the data. With ``refresh_seconds`` it asks for ``data.json`` that often."""
    # In a script element only "</" and "<!--" could end or change it.
    text = as_json(data).replace("<", "\\u003c")
    parts = {
        "@TITLE@": html.escape(", ".join(run["name"] for run in data["runs"])[:100]),
        "@STYLE@": _asset("style.css"),
        "@REFRESH@": f"{refresh_seconds:g}",
        "@CHARTS@": _asset("charts.js"),
        "@PAGE@": _asset("page.js"),
        "@DATA@": text,
    }
    # One pass over the template: a run whose name looks like a mark is not replaced again.
    return re.sub("@[A-Z]+@", lambda mark: parts[mark[0]], _asset("page.html"))


def as_json(data: dict[str, Any]) -> str:
    return json.dumps(data, allow_nan=False, separators=(",", ":"))


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text()


def draw(data: dict[str, Any], folder: Path) -> list[Path]:
    """Writes the figures and returns their paths."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    style: dict[Any, Any] = {
        "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25,
        "font.size": 9, "axes.titlesize": 10, "axes.titlelocation": "left", "legend.frameon": False,
    }  # fmt: skip
    paths = []
    with rc_context(style):
        for name, drawn in zip(NAMES, (_loss, _delays, _workers), strict=True):
            figure: Figure = drawn(data)
            figure.savefig(folder / name, dpi=120, facecolor="white")
            paths.append(folder / name)
    return paths


def _figure(rows: int, columns: int, height: float) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.0, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def _plot(axis: Any, x: list[Any], y: list[Any], **style: Any) -> None:
    kept = [(a, b) for a, b in zip(x, y, strict=False) if a is not None and b is not None]
    if kept:
        axis.plot(*zip(*kept, strict=True), **style)


def _legend(axis: Any, most: int = 1) -> None:
    if len(axis.get_legend_handles_labels()[0]) > most:
        axis.legend(fontsize=7)


def _loss(data: dict[str, Any]) -> Any:
    from matplotlib.ticker import EngFormatter

    runs = data["runs"]
    gap = all(run["objective"] == "gap" for run in runs)
    axes_shown = [("time", "seconds"), ("updates", "updates")]
    if any("tokens" in run["training"] for run in runs):
        axes_shown.append(("tokens", "tokens"))
    figure, axes = _figure(1, len(axes_shown), 3.4)
    for axis, (key, unit) in zip(axes[0], axes_shown, strict=True):
        for index, run in enumerate(runs):
            colour = _PALETTE[index % len(_PALETTE)]
            label = run["label"] if len(runs) > 1 else "training"
            if not gap:
                _plot(axis, run["training"].get(key, []), run["training"]["value"], color=colour, alpha=0.6, lw=1,
                      label=label)  # fmt: skip
            if gap or len(runs) == 1:
                shown = label if gap and len(runs) > 1 else "f(x) - f*" if gap else "validation"
                _plot(axis, run["evaluation"].get(key, []), run["evaluation"]["value"], color=colour, label=shown)
        axis.set_yscale("log" if gap and axis.lines else "linear")
        axis.set_xlabel(unit)
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))
        axis.set_title(f"{'objective gap' if gap else 'loss'} against {key}")
        _legend(axis, 0)
    return figure


def _delays(data: dict[str, Any]) -> Any:
    runs = data["runs"]
    figure, axes = _figure(1, 3, 3.4)
    accept, bars, delay = axes[0]
    for index, run in enumerate(runs):
        colour, times = _PALETTE[index % len(_PALETTE)], run["over_time"]["time"]
        _plot(accept, times, run["over_time"].get("accepted", []), color=colour, label=run["label"])
        if len(runs) > 1:
            _plot(delay, times, run["over_time"].get("delay_mean", []), color=colour, label=run["label"])
            total = max(1, sum(sum(run["delays"][name]) for name in ("accepted", "stale", "invalid")))
            shares = [
                sum(t) / total for t in zip(*(run["delays"][n] for n in ("accepted", "stale", "invalid")), strict=True)
            ]
            bars.step(run["delays"]["low"], shares, where="mid", color=colour, label=run["label"])
    accept.set(title="share of arriving gradients accepted", xlabel="seconds", ylim=(0, 1.03))
    bars.set(title="gradients by delay", xlabel="delay (updates)")
    delay.set(title="delay over time", xlabel="seconds")
    if len(runs) == 1:
        run = runs[0]
        low, base = run["delays"]["low"], [0.0] * len(run["delays"]["low"])
        for name in ("accepted", "stale", "invalid"):
            bars.bar(low, run["delays"][name], width=0.85 * run["delays"]["width"], bottom=base, align="edge" if
                     run["delays"]["width"] > 1 else "center", color=COLOURS[name], label=name)  # fmt: skip
            base = [a + b for a, b in zip(base, run["delays"][name], strict=True)]
        for name, colour in (("mean", _PALETTE[0]), ("p95", COLOURS["stale"]), ("max", COLOURS["invalid"])):
            _plot(delay, run["over_time"]["time"], run["over_time"].get(f"delay_{name}", []), color=colour, lw=1.2,
                  label=name)  # fmt: skip
        _plot(delay, run["threshold"]["time"], run["threshold"]["value"], color="0.5", ls=":", label="threshold R")
    for axis in (accept, bars, delay):
        _legend(axis)
    delay.set_ylim(bottom=0)
    return figure


def _workers(data: dict[str, Any]) -> Any:
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    runs = [run for run in data["runs"] if run["timeline"]["workers"]][:_MOST_TIMELINES]
    heights = [max(1.3, 0.16 * len(run["timeline"]["workers"]) + 0.5) for run in runs] or [1.3]
    figure = Figure(figsize=(11.0, sum(heights) + 0.9), layout="constrained")
    grid = figure.subplots(len(heights), 2, squeeze=False, width_ratios=[4, 1], height_ratios=heights)
    for (axis, bars), run in zip(grid, runs, strict=False):
        draw_timeline(axis, run, data["kinds"])
        shown = {worker: row for row, worker in enumerate(run["timeline"]["workers"])}
        listed = [worker for worker in run["workers"] if worker["worker"] in shown]
        bars.barh([shown[w["worker"]] for w in listed], [100 * w["share"] for w in listed], color=COLOURS["accepted"])
        bars.set(title="share of accepted, %", ylim=axis.get_ylim(), yticks=[])
        bars.grid(visible=True, axis="x", alpha=0.25)
    grid[-1][0].set_xlabel("seconds")
    handles = [Patch(color=COLOURS[kind], label="stopped early" if kind == "interrupted" else kind)
               for kind in data["kinds"]]  # fmt: skip
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8)
    return figure


def draw_timeline(axis: Any, run: dict[str, Any], kinds: tuple[str, ...]) -> None:
    """Draws a row for each worker: the shares of each moment that it spent on each kind of work."""
    import numpy as np

    timeline = run["timeline"]
    for row, shares in enumerate(timeline["shares"]):
        edges = np.linspace(0.0, timeline["seconds"], len(shares[0]) + 1)
        base = np.full(len(shares[0]), row + 0.42)
        for kind, share in zip(kinds, shares, strict=True):
            top = base - 0.84 * np.array(share, dtype=float)
            axis.stairs(top, edges, baseline=base, fill=True, color=COLOURS[kind], lw=0)
            base = top
    workers = timeline["workers"]
    axis.set(
        xlim=(0, timeline["seconds"]), ylim=(len(workers) - 0.5, -0.5), title=f"{run['label']}: what each worker did"
    )
    step = max(1, len(workers) // 16)
    axis.set_yticks(range(0, len(workers), step), [str(worker) for worker in workers[::step]])
    axis.set_ylabel("worker")
    axis.grid(visible=False)
