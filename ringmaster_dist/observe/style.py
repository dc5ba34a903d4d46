"""The look of every figure: colours, line styles and text sizes, for the page and for matplotlib.

The lines have the colours of Okabe and Ito, which people with a colour vision deficiency can tell apart, and lighter
ones on a dark page. Each line also has a pattern of dashes of its own, so no figure relies on colour alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

# What became of a worker's time: on a light page, and on a dark one.
KINDS = {
    "accepted": ("#009e73", "#2ec49b"),
    "stale": ("#e69f00", "#f2c230"),
    "invalid": ("#a50f15", "#ef5350"),
    "interrupted": ("#8073ac", "#8f7fd6"),
    "waiting": ("#d5dae2", "#3a4452"),
}
KIND_NAMES = {"interrupted": "stopped early"}  # a kind that is not listed is named as it is
LINES = (
    ("#0072b2", "#56b4e9"),
    ("#d55e00", "#ff7f2a"),
    ("#009e73", "#1fae86"),
    ("#cc79a7", "#f0a3d3"),
    ("#3d434d", "#eef1f5"),
    ("#e69f00", "#f2d14a"),
    ("#56b4e9", "#3f7fe0"),
)
# Lengths of the strokes and gaps of each line, in points. An empty pattern is a solid line.
DASHES: tuple[tuple[float, ...], ...] = (
    (), (7, 3), (2, 2.5), (10, 3, 2, 3), (4, 2), (13, 4), (7, 2.5, 2, 2.5, 2, 2.5),
)  # fmt: skip
SOFT = "#667085"  # of what is not a measurement: a limit, a comparison
LEGEND_POINTS, LEGEND_INCHES = 9.0, 0.2  # the smallest text of a figure, and the height of a row of a legend

_MATPLOTLIB: dict[Any, Any] = {
    "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": "#98a2b3", "axes.labelcolor": "#344054",
    "axes.titlelocation": "left", "axes.titlesize": 11, "axes.titleweight": "bold", "axes.labelsize": 10,
    "axes.grid": True, "axes.axisbelow": True, "grid.color": "#e3e7ed", "grid.linewidth": 0.8,
    "xtick.color": "#475467", "ytick.color": "#475467", "xtick.labelsize": LEGEND_POINTS,
    "ytick.labelsize": LEGEND_POINTS, "font.size": 10, "text.color": "#1c2430", "legend.frameon": False,
    "legend.fontsize": LEGEND_POINTS, "legend.handlelength": 3.2, "lines.linewidth": 1.8, "lines.scale_dashes": False,
    "figure.constrained_layout.use": True, "savefig.facecolor": "white", "savefig.dpi": 130,
}  # fmt: skip


class Line(NamedTuple):
    """How the line of one place in an order looks, in keywords of matplotlib."""

    color: str
    linestyle: Any


def line(place: int) -> Line:
    """The colour and dashes of a line. Lines at different places differ in at least one of them, up to 49 lines."""
    dashes = DASHES[(place + place // len(LINES)) % len(DASHES)]
    return Line(LINES[place % len(LINES)][0], (0, dashes) if dashes else "solid")


def kind_colour(kind: str) -> str:
    return KINDS[kind][0]


def kind_name(kind: str) -> str:
    return KIND_NAMES.get(kind, kind)


def css() -> str:
    """The colours as CSS variables, such as ``--accepted`` and ``--line-0``, for a light and a dark page."""
    names = [*KINDS, *(f"line-{place}" for place in range(len(LINES)))]
    light, dark = (
        " ".join(f"--{name}: {colours[shade]};" for name, colours in zip(names, (*KINDS.values(), *LINES), strict=True))
        for shade in (0, 1)
    )
    return f":root {{ {light} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n"


@contextmanager
def drawing() -> Iterator[None]:
    """What is drawn with matplotlib inside has the common look. Figures are for files, and no window opens."""
    from matplotlib import rc_context
    from matplotlib.rcsetup import cycler

    looks = [line(place) for place in range(len(LINES))]
    cycle = cycler(color=[look.color for look in looks], linestyle=[look.linestyle for look in looks])
    rc: Any = {**_MATPLOTLIB, "axes.prop_cycle": cycle}
    with rc_context(rc):
        yield


def figure(width: float, height: float) -> Any:
    """An empty figure of this many inches, to be used inside `drawing`."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height))


def legend_below(axis: Any) -> None:
    """Puts the legend of a panel under it, where it covers no line, and gives each line the dashes of its colour.

    It suits a panel whose lines were drawn in colours by place ("C0" is the first). An entry takes `LEGEND_INCHES`.
    """
    from matplotlib.colors import to_hex

    places = {light: place for place, (light, _) in enumerate(LINES)}
    for drawn in axis.lines:
        drawn.set_linestyle(line(places.get(to_hex(drawn.get_color()), 0)).linestyle)
    axis.legend(loc="upper left", bbox_to_anchor=(0.0, -0.22), borderaxespad=0.0)


def save(made: Any, paths: Sequence[Path]) -> None:
    """Writes the figure, in the format that each path ends with. Raises OSError, and ValueError for another format."""
    for path in paths:
        made.savefig(path, metadata={"CreationDate": None} if path.suffix == ".pdf" else None)
