"""Who races in ``ringmaster bench time-to-loss``, on which clusters, and from which grids their settings come.

A trial is one run until a target loss. Its key is a hash of all its settings, so a trial that was run is found again.
"""

from __future__ import annotations

import hashlib
import json
import math
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
        Cluster("equal", "8 workers of the same speed", 8,
                (*_SMALL, "cluster.profile=similar", "cluster.unit_seconds=0.2"), 3.8, 60.0),
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
