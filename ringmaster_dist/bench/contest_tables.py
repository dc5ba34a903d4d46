"""The results of ``ringmaster bench time-to-loss``: one line of runs.csv for each run, and the tables that they make.

A part of the races can be run at a time. Its results replace those of the same contenders on the same clusters, and the
others stay. So runs.csv has all that was measured, and the tables and the figure are made from it.
"""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ringmaster_dist.bench.contest import (
    BASELINE,
    CLUSTERS,
    CONTENDERS,
    OURS,
    VIRTUAL,
    Cluster,
    Point,
    Trial,
    arrival,
)
from ringmaster_dist.config.errors import UserError

COLUMNS = ["seconds", "x ringmaster", "updates", "rows used", "waste", "bytes", "setting"]


class Result(NamedTuple):
    """A run in brief."""

    cluster: str
    contender: str
    setting: str
    clock: str
    seed: int
    date: str
    machine: str
    lowest_loss: float
    reached: Point | None  # the state at the target; None if the target was not reached

    @classmethod
    def of(cls, trial: Trial, curve: Sequence[Point], date: str, machine: str) -> Result:
        lowest = min((point.loss for point in curve), default=math.inf)
        names = (trial.cluster.name, trial.contender.name, trial.words(), trial.clock, trial.seed)
        return cls(*names, date, machine, lowest, arrival(curve, trial.cluster.target))

    @property
    def seconds(self) -> float:
        return math.inf if self.reached is None else self.reached.seconds

    def to_row(self) -> dict[str, Any]:
        """A line of runs.csv. The figures of a run that did not reach the target are empty."""
        figures = dict.fromkeys(Point._fields, "") if self.reached is None else self.reached._asdict()
        return {**dict(zip(_FACTS, self, strict=False)), **figures}

    @classmethod
    def from_row(cls, row: Mapping[str, str]) -> Result:
        cluster, contender, setting, clock, seed, day, machine, lowest = (row[name] for name in _FACTS)
        reached = Point(*(float(row[name]) for name in Point._fields)) if row["seconds"] else None
        if cluster not in CLUSTERS or contender not in CONTENDERS:
            raise ValueError(f"nobody is called {contender} on {cluster}")
        return cls(cluster, contender, setting, clock, int(seed), day, machine, float(lowest), reached)


_FACTS = [field for field in Result._fields if field != "reached"]
_COLUMNS_OF_RUNS = [*_FACTS, *Point._fields]


def read(path: Path) -> list[Result]:
    """The results in a runs.csv, none if there is no such file. Raises UserError if it cannot be read."""
    if not path.exists():
        return []
    try:
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            if reader.fieldnames != _COLUMNS_OF_RUNS:
                raise ValueError("its columns are others")
            return [Result.from_row(row) for row in reader]
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path} has no results of this version ({error}): use another dir=, or remove it") from error


def write(path: Path, results: Iterable[Result]) -> None:
    hidden = path.with_name(f".{path.name}")
    with hidden.open("w", newline="") as file:
        writer = csv.DictWriter(file, _COLUMNS_OF_RUNS)
        writer.writeheader()
        writer.writerows(result.to_row() for result in results)
    hidden.replace(path)


def merged(earlier: Iterable[Result], new: Iterable[Result]) -> list[Result]:
    """All results, in the order of the clusters and contenders. New ones replace earlier ones of the same pair."""
    new = list(new)
    raced = {(result.cluster, result.contender) for result in new}
    kept = [result for result in earlier if (result.cluster, result.contender) not in raced]
    order = (list(CLUSTERS), list(CONTENDERS))
    return sorted([*kept, *new], key=lambda each: (order[0].index(each.cluster), order[1].index(each.contender)))


# --- tables ------------------------------------------------------------------------------------------------------


class Table(NamedTuple):
    """What was found on a cluster."""

    cluster: Cluster
    rows: list[dict[str, Any]]
    words: str  # that name the quickest contender
    seconds: dict[str, list[float]]  # of each seed by contender, infinite where the target was not reached
    origin: str  # where and when the runs were made


def tables(results: Iterable[Result], clusters: Mapping[str, Cluster] = CLUSTERS) -> list[Table]:
    """A table for each cluster that has results. Its rows are in the order of the results."""
    by_cluster: dict[str, dict[str, list[Result]]] = {}
    for result in results:
        by_cluster.setdefault(result.cluster, {}).setdefault(result.contender, []).append(result)
    return [_table(clusters[name], named) for name, named in by_cluster.items()]


def _table(cluster: Cluster, named: Mapping[str, Sequence[Result]]) -> Table:
    seconds = {name: [result.seconds for result in own] for name, own in named.items()}
    medians = {name: median_seconds(own) for name, own in seconds.items()}
    rows = [{"contender": CONTENDERS[name].title, **standing(cluster, own, medians.get(BASELINE)),
             "setting": own[0].setting} for name, own in named.items()]  # fmt: skip
    every = [result for own in named.values() for result in own]
    days, machines = sorted({result.date for result in every}), sorted({result.machine for result in every})
    origin = f"{' and '.join(days)}, {max(map(len, named.values()))} seeds, {' and '.join(machines)}"
    return Table(cluster, rows, verdict(medians), seconds, origin)


def standing(cluster: Cluster, results: Sequence[Result], ours: float | None) -> dict[str, Any]:
    """The figures of a contender in the table, from one run for each seed.

    ``ours`` is the median of the baseline's seconds. A seed that did not reach the target counts as infinitely late,
    and the other figures are medians over the seeds that did.
    """
    reached = [result.reached for result in results if result.reached is not None]
    seconds = sorted(result.seconds for result in results)
    median = median_seconds(seconds)
    if median is None:
        lowest = min(result.lowest_loss for result in results)
        count = f", {len(reached)} of {len(results)} did" if reached else f", lowest loss {lowest:.2f}"
        where = " in virtual time" if results[0].clock == VIRTUAL else ""
        empty = dict.fromkeys(("x ringmaster", "updates", "rows used", "waste", "bytes"), "")
        return {"seconds": f"not in {cluster.limit_seconds:g}{count}{where}", **empty}
    spread = f" ({_shown(seconds[0])} to {_shown(seconds[-1])})" if len(seconds) > 1 else ""
    return {
        "seconds": f"{_shown(median)}{spread}",
        "x ringmaster": f"{median / ours:.2f}" if ours else "",
        "updates": f"{statistics.median(point.updates for point in reached):,.0f}",
        "rows used": f"{statistics.median(point.rows for point in reached):,.0f}",
        "waste": f"{statistics.median(waste(point, cluster.workers) for point in reached):.0%}",
        "bytes": _size(statistics.median(point.num_bytes for point in reached)),
    }


def waste(point: Point, workers: int) -> float:
    """The share of the workers' seconds that went into no used gradient: discarded work, and waiting."""
    return max(0.0, 1.0 - point.used_seconds / (workers * point.seconds))


def median_seconds(by_seed: Sequence[float]) -> float | None:
    """The median over the seeds. None if it is not finite."""
    median = statistics.median_high(by_seed) if by_seed else math.inf
    return median if math.isfinite(median) else None


def verdict(medians: Mapping[str, float | None]) -> str:
    """A sentence that names the quickest contender. ``medians`` are the seconds by contender."""
    by_side: dict[bool, list[tuple[float, str]]] = {True: [], False: []}
    for name, seconds in medians.items():
        by_side[CONTENDERS[name].kind == OURS].append((math.inf if seconds is None else seconds, name))
    if not by_side[True] or not by_side[False]:
        return ""
    (ours, our_name), (theirs, their_name) = min(by_side[True]), min(by_side[False])
    if not math.isfinite(min(ours, theirs)):
        return "Nobody reached the target."
    if not math.isfinite(theirs):
        return f"The quickest of ours is {our_name}. No rival reached the target."
    if theirs < ours:
        lead = f"{ours / theirs:.2f} times as long" if math.isfinite(ours) else "longer than the limit"
        return f"We lose here: {their_name} is quickest, and the quickest of ours, {our_name}, takes {lead}."
    lead = f"{theirs / ours:.2f} times as long"
    return f"The quickest of ours is {our_name}. The quickest rival, {their_name}, takes {lead}."


def markdown(made: Sequence[Table]) -> str:
    """The tables for a document."""
    parts = ["Made by `ringmaster bench time-to-loss`.\n"]
    for table in made:
        parts.append(f"### {table.cluster.title}, to a loss of {table.cluster.target:g}\n")
        parts.append("| | " + " | ".join(COLUMNS) + " |\n|" + "---|" * (len(COLUMNS) + 1))
        parts += [
            f"| {row['contender']} | " + " | ".join(str(row[column]) for column in COLUMNS) + " |" for row in table.rows
        ]
        parts.append(f"\n{table.words} ({table.origin})\n")
    return "\n".join(parts)


def _shown(seconds: float) -> str:
    return f"{seconds:.1f}" if math.isfinite(seconds) else "never"


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"
