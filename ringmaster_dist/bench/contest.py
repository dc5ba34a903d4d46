"""Who races in ``ringmaster bench time-to-loss``, on which clusters, and from which grids their settings come.

A trial is one run until a target loss. Its key is a hash of all its settings, so a trial that was run is found again.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

from ringmaster_dist.config.errors import UserError

TUNING_SEED = 0  # the trials that a table shows have the seeds from 1 on
VIRTUAL, REAL = "virtual", "real"
OURS, DDP, DILOCO, RAY = "ours", "ddp", "diloco", "ray"  # kinds of contenders
BASELINE = "ringmaster"  # the contender that the others are compared with

# A gradient of this model takes a few milliseconds, so two cores can play all workers at their pace.
_SMALL = ("problem=nanochat", "data=stdlib", "model.n_layer=1", "model.n_head=1", "model.n_kv_head=1",
          "model.n_embd=32", "model.sequence_len=32", "model.vocab_size=512",
          "problem.validation_rows=128")  # fmt: skip
_LINEAR = ("cluster.profile=linear", "cluster.unit_seconds=0.1")


class Cluster(NamedTuple):
    """A model on paced workers, and the loss that ends a trial."""

    name: str
    title: str
    workers: int
    overrides: tuple[str, ...]
    target: float
    limit_seconds: float  # a trial that has not reached the target by then is ended
    kill_seconds: float = 0.0  # this often one of the processes that compute gradients is killed; 0 means never

    @property
    def common(self) -> tuple[str, ...]:
        return (*self.overrides, f"cluster.workers={self.workers}")


CLUSTERS = {
    cluster.name: cluster
    for cluster in (
        Cluster("linear8", "8 workers, linear: the slowest is 8 times slower", 8, (*_SMALL, *_LINEAR), 3.8, 120.0),
        Cluster("linear32", "32 workers, linear: the slowest is 32 times slower", 32,
                (*_SMALL, "cluster.profile=linear", "cluster.unit_seconds=0.2"), 4.0, 180.0),
        Cluster(
            "two-speeds", "8 workers, 2 of them 8 times slower", 8,
            (*_SMALL, "cluster.profile=file", "cluster.times=[0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.8, 0.8]"), 3.8, 120.0,
        ),
        Cluster(
            "change", "8 workers, linear; the quickest becomes 8 times slower after 8 seconds", 8,
            (*_SMALL, *_LINEAR, "cluster.phases=[{start_seconds: 8, rate: 0.125, workers: [0]}]"), 3.8, 120.0,
        ),
        Cluster(
            "kills", "8 workers, linear; one of them is killed every 10 seconds", 8, (*_SMALL, *_LINEAR), 3.8, 120.0,
            kill_seconds=10.0,
        ),
    )
}  # fmt: skip


class Contender(NamedTuple):
    """A way to train, with the grid of its settings."""

    name: str
    title: str
    kind: str
    grid: Mapping[str, Sequence[float]]
    overrides: tuple[str, ...] = ()  # of our own; a rival has none
    optimizer: str = ""  # of a rival: sgd or adamw for what is not a matrix
    scaled: bool = False  # DiLoCo: quick replicas take more local steps
    package: str = ""  # that has to be installed
    everywhere: bool = False  # whether it races on every cluster, or on the first one only


_ETAS = (0.0025, 0.005, 0.01, 0.02, 0.04, 0.08)
_FACTORS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)  # of the rates in `rivals`


def _ours(name: str, title: str, *overrides: str, everywhere: bool = False, scale: float = 1.0,
          **more: Sequence[float]) -> Contender:  # fmt: skip
    second = {f"method.{key}": values for key, values in more.items()}
    grid = {"method.eta": [scale * eta for eta in _ETAS], **second}
    return Contender(name, title, OURS, grid, ("geometry=scion", *overrides), everywhere=everywhere)


CONTENDERS = {
    contender.name: contender
    for contender in (
        _ours("ringmaster", "ringmaster, a fixed threshold", "method=ringmaster", threshold=(8, 16, 32, 128),
              everywhere=True),
        _ours("auto", "ringmaster, method.threshold=auto", "method=ringmaster", "method.threshold=auto",
              everywhere=True),
        _ours("rows", "ringmaster, auto, cluster.batch=auto", "method=ringmaster", "method.threshold=auto",
              "cluster.batch=auto", everywhere=True),
        _ours("ringmaster_agnostic", "ringmaster_agnostic", "method=ringmaster_agnostic", scale=25.0),
        _ours("rennala", "rennala", "method=rennala", batch=(4, 8)),
        _ours("delay_adaptive", "delay_adaptive", "method=delay_adaptive"),
        _ours("asynchronous", "asynchronous", "method=asynchronous"),
        _ours("synchronous", "synchronous", "method=synchronous"),
        Contender("ddp", "DDP (gloo), Muon + AdamW", DDP, {"factor": _FACTORS}, optimizer="adamw", everywhere=True),
        Contender("ddp-sgd", "DDP (gloo), Muon + SGD", DDP, {"factor": _FACTORS}, optimizer="sgd"),
        Contender("diloco", "torchft DiLoCo, equal local steps", DILOCO, {"factor": _FACTORS, "steps": (1, 4, 16, 64)},
                  optimizer="adamw", package="torchft", everywhere=True),
        Contender("diloco-scaled", "torchft DiLoCo, local steps by speed", DILOCO,
                  {"factor": _FACTORS, "steps": (1, 4, 16)}, optimizer="adamw", scaled=True, package="torchft",
                  everywhere=True),
        Contender("ray", "Ray actors, synchronous, Muon + AdamW", RAY, {"factor": _FACTORS}, optimizer="adamw",
                  package="ray"),
    )
}  # fmt: skip


class Trial(NamedTuple):
    """One run until the target. ``setting`` is the choice from the grid."""

    cluster: Cluster
    contender: Contender
    setting: tuple[tuple[str, float], ...]
    seed: int
    clock: str

    @property
    def key(self) -> str:
        """A hash of what decides the outcome. In virtual time nobody is killed, and Ray makes the same steps as DDP."""
        cluster, contender = self.cluster, self.contender
        kind = DDP if self.clock == VIRTUAL and contender.kind == RAY else contender.kind
        kills = cluster.kill_seconds if self.clock == REAL else 0.0
        settings = [cluster.common, cluster.target, cluster.limit_seconds, kills, kind, contender.overrides,
                    contender.optimizer, contender.scaled, self.setting, self.seed, self.clock]  # fmt: skip
        return hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16]

    @property
    def chosen(self) -> dict[str, float]:
        return dict(self.setting)

    @property
    def our_overrides(self) -> list[str]:
        """The configuration of a run of our own."""
        chosen = [f"{key}={value:.10g}" for key, value in self.setting]
        return [*self.cluster.common, *self.contender.overrides, *chosen, f"run.seed={self.seed}", "eval.every=1"]

    @property
    def rival_overrides(self) -> list[str]:
        """The configuration that says a rival's model, data and pace."""
        return [*self.cluster.common, f"run.seed={self.seed}"]

    def words(self) -> str:
        return ", ".join(f"{key.removeprefix('method.')} {value:g}" for key, value in self.setting)


def settings_of(contender: Contender) -> Iterator[tuple[tuple[str, float], ...]]:
    """Every combination of the values in the grid of a contender."""
    for values in product(*contender.grid.values()):
        yield tuple(zip(contender.grid, values, strict=True))


def races(clusters: Sequence[str] | None, contenders: Sequence[str] | None) -> list[tuple[Cluster, list[Contender]]]:
    """Who races where. Without names, all contenders race on the first cluster, and the main ones on the others."""
    chosen = [_named(CLUSTERS, name, "clusters", clusters) for name in clusters or CLUSTERS]
    first = next(iter(CLUSTERS))
    if contenders:
        named = [_named(CONTENDERS, name, "contenders", contenders) for name in contenders]
        return [(cluster, named) for cluster in chosen]
    return [(c, [each for each in CONTENDERS.values() if each.everywhere or c.name == first]) for c in chosen]


def _named(known: Mapping[str, Any], name: str, setting: str, given: Sequence[str] | None) -> Any:
    if name not in known:
        raise UserError(f"{setting}={','.join(given or ())}: {name!r} is not one of {', '.join(known)}")
    return known[name]


# --- outcomes ----------------------------------------------------------------------------------------------------


class Point(NamedTuple):
    """The state of a trial at an evaluation. All but the loss are totals since its start."""

    seconds: float
    loss: float
    updates: float = 0.0
    rows: float = 0.0  # of text, in gradients that were used
    used_seconds: float = 0.0  # that workers spent on gradients that were used
    num_bytes: float = 0.0  # that were sent by anyone


def arrival(curve: Sequence[Point], target: float) -> Point | None:
    """The first time at the target, interpolated between two evaluations. None if the loss never was so low."""
    before: Point | None = None
    for point in curve:
        if point.loss <= target:
            if before is None or not math.isfinite(before.loss):
                return point
            part = (before.loss - target) / (before.loss - point.loss)
            return Point(*(a + part * (b - a) for a, b in zip(before, point, strict=True)))
        before = point
    return None


def waste(point: Point, workers: int) -> float:
    """The share of the workers' seconds that went into no used gradient: discarded work, and waiting."""
    return max(0.0, 1.0 - point.used_seconds / (workers * point.seconds))


def standing(cluster: Cluster, curves: Sequence[Sequence[Point]], ours: float | None) -> dict[str, Any]:
    """The figures of a contender in the table, from one curve for each seed.

    ``ours`` is the median of the baseline's seconds. A seed that did not reach the target counts as infinitely late,
    and the other figures are medians over the seeds that did.
    """
    reached = [point for curve in curves if (point := arrival(curve, cluster.target)) is not None]
    seconds = sorted(seconds_by_seed(cluster, curves))
    median = median_seconds(seconds)
    if median is None:
        best = min((point.loss for curve in curves for point in curve), default=math.inf)
        count = f", {len(reached)} of {len(curves)} did" if reached else f", lowest loss {best:.2f}"
        empty = dict.fromkeys(("x ringmaster", "updates", "rows used", "waste", "bytes"), "")
        return {"seconds": f"not in {cluster.limit_seconds:g}{count}", **empty}
    spread = f" ({_shown(seconds[0])} to {_shown(seconds[-1])})" if len(seconds) > 1 else ""

    def middle(values: Sequence[float]) -> float:
        return statistics.median(values)

    return {
        "seconds": f"{_shown(median)}{spread}",
        "x ringmaster": f"{median / ours:.2f}" if ours else "",
        "updates": f"{middle([point.updates for point in reached]):,.0f}",
        "rows used": f"{middle([point.rows for point in reached]):,.0f}",
        "waste": f"{middle([waste(point, cluster.workers) for point in reached]):.0%}",
        "bytes": _size(middle([point.num_bytes for point in reached])),
    }


def seconds_by_seed(cluster: Cluster, curves: Sequence[Sequence[Point]]) -> list[float]:
    """The seconds to the target, infinite where it was not reached."""
    found = [arrival(curve, cluster.target) for curve in curves]
    return [math.inf if point is None else point.seconds for point in found]


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


def _shown(seconds: float) -> str:
    return f"{seconds:.1f}" if math.isfinite(seconds) else "never"


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"
