"""The runs of each experiment.

There are the paper's methods, grids and delay regimes at three sizes, the automatic threshold, and step sizes and radii
for language models, versus the optimizers that people use instead.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import NamedTuple

from ringmaster_dist.config.errors import UserError
from ringmaster_dist.profiles import base_seconds

REGIMES = ("similar", "sublinear", "linear")
TRAIN_LOSS = "train_loss"  # an objective: the mean loss of the accepted gradients since the point before
EVERY_ETA = "rennala, every eta"  # a contender that the paper does not have: its grid has one eta for rennala
AUTO = "ringmaster auto"  # a contender next to the methods: ringmaster with method.threshold=auto
CHANGE = "change"  # a regime next to the profiles: similar workers, of which three quarters slow down in mid-run
GEOMETRIES = ("muon", "scion", "euclidean", "sign")
ONE_ETA, RADII, BASELINE = "one eta", "radii", "Muon + AdamW"
RATE = "rate."  # the prefix of keys in the baseline's grid, the learning rates of the roles
_EQUAL = [f"geometry.radius.{role}=1" for role in ("matrix", "embedding", "output", "scalar")]
PROBLEMS = ("scion", "muon", "quadratic")  # of the experiment ``machines``: NanoChat in two geometries, the quadratic


class Automatic(NamedTuple):
    """A contender that chooses something itself during the run."""

    overrides: tuple[str, ...]
    problems: tuple[str, ...] = PROBLEMS  # where it makes sense


# Each line here is a contender of the experiment ``machines``, in its tables and in its figure.
AUTOMATIC = {
    AUTO: Automatic(("method=ringmaster", "method.threshold=auto")),
    "auto, rows by speed": Automatic(
        ("method=ringmaster", "method.threshold=auto", "cluster.batch=auto"), ("scion", "muon")
    ),
}
# The overrides of a contender whose name is not that of a method.
_CONTENDERS: dict[str, Sequence[str]] = {
    **{name: automatic.overrides for name, automatic in AUTOMATIC.items()},
    EVERY_ETA: ["method=rennala"],
    ONE_ETA: ["method=ringmaster", "method.threshold=8", "geometry=scion", *_EQUAL],
    RADII: ["method=ringmaster", "method.threshold=8", "geometry=scion"],
    BASELINE: ["method=ringmaster", "method.threshold=8", "geometry=scion", "method.eta=1"],
}
_PHASES = f"[{{start_seconds: 200, rate: 0.05, workers: {list(range(4, 16))}}}]"
# The overrides of a regime whose name is not that of a delay profile.
_REGIMES = {
    CHANGE: ["cluster.profile=similar", f"cluster.phases={_PHASES}"],
    "sequential": ["cluster.workers=1", "cluster.profile=similar"],
    "delayed": ["cluster.workers=8", "cluster.profile=linear"],
    **{name: [f"geometry={name}", "cluster.profile=linear"] for name in GEOMETRIES},
}


def _powers(low: int, high: int) -> list[float]:
    return [5.0**power for power in range(low, high + 1)]


def choices(grid: Mapping[str, Sequence[float]]) -> Iterator[tuple[str, ...]]:
    """Every combination of the values in a grid, as overrides."""
    for values in product(*grid.values()):
        yield tuple(f"{key}={value:.10g}" for key, value in zip(grid, values, strict=True))


def num_kept(settings: int) -> int:
    """How many settings of a method are kept after a look at all of them: the best third, and at least two."""
    return min(settings, max(2, math.ceil(settings / 3)))


def matching(names: Sequence[str], words: Sequence[str] | None) -> list[str]:
    """The names that have all parts of a word, such as ``linear`` or ``linear-32``; all without words."""
    kept: set[str] = set()
    for word in words or [""]:
        parts = set(filter(None, word.split("-")))
        found = {name for name in names if parts <= set(name.split("-"))}
        if not found:
            raise UserError(f"regimes={','.join(words or [])}: {word!r} is no part of {', '.join(names)}")
        kept |= found
    return [name for name in names if name in kept]


def short(word: str) -> str:
    """``embedding=60`` for ``geometry.radius.embedding=60``."""
    return word.partition("=")[0].rpartition(".")[2] + "=" + word.partition("=")[2]


class Job(NamedTuple):
    """One simulated run."""

    regime: str
    method: str
    overrides: tuple[str, ...]  # the choice from the grid
    seed: int
    common: tuple[str, ...]  # the overrides that all runs of the regime share

    @property
    def key(self) -> str:
        """A hash by which the result of this run is found again."""
        return hashlib.sha256(json.dumps(self).encode()).hexdigest()[:16]

    @property
    def all_overrides(self) -> list[str]:
        contender = _CONTENDERS.get(self.method, [f"method={self.method}"])
        chosen = [word for word in self.overrides if not word.startswith(RATE)]
        return [*self.common, *contender, *chosen, f"run.seed={self.seed}"]

    def shortened(self, part: float) -> Job:
        """The same run with this part of the virtual time, and with points at about the same times."""
        if part == 1.0:
            return self
        words = dict(word.split("=", 1) for word in self.common)
        words["budget.seconds"] = f"{part * float(words['budget.seconds']):.10g}"
        words["run.samples"] = str(max(1, round(part * int(words["run.samples"]))))
        return self._replace(common=tuple(f"{key}={value}" for key, value in words.items()))

    @property
    def gradients(self) -> float:
        """About how many gradients a run of a regime such as ``linear-32`` computes.

        While the quickest worker computes one, at most ``threshold`` or ``batch`` of all the others are accepted.
        """
        words = dict(word.split("=", 1) for word in (*self.common, *self.overrides))
        profile, _, workers = self.regime.partition("-")
        rate = float((1.0 / base_seconds(profile, int(workers), 1.0)).sum())
        most = float(words.get("method.threshold") or words.get("method.batch") or math.inf)
        return min(rate, most) * float(words["budget.seconds"]) / float(words.get("cluster.unit_seconds", 1.0))

    @property
    def rates(self) -> dict[str, float]:
        """The learning rates of the baseline by role. It is empty for our methods."""
        words = [word.removeprefix(RATE).split("=") for word in self.overrides if word.startswith(RATE)]
        return {role: float(value) for role, value in words}


def chosen(job: Job, grid: Mapping[str, Sequence[float]]) -> str:
    """The choice of a job in short. A star marks the smallest and the largest value of a grid with several."""
    words = []
    for word in job.overrides:
        key, _, value = word.partition("=")
        values = grid[key]
        is_edge = len(values) > 1 and float(value) in (float(f"{min(values):.10g}"), float(f"{max(values):.10g}"))
        words.append(short(word) + ("*" if is_edge else ""))
    return " ".join(words)


class Plan(NamedTuple):
    """An experiment. ``grids`` has, for each method, the values of each of its keys."""

    name: str
    size: str
    objective: str  # the column of metrics.jsonl that is drawn, or TRAIN_LOSS
    common: tuple[str, ...]
    grids: dict[str, dict[str, list[float]]]
    regimes: tuple[str, ...]
    seeds: int
    rungs: tuple[float, ...] = (1.0,)  # parts of the budget. After each one `num_kept` settings are kept
    gaps: tuple[float, ...] = ()  # each method is also tuned for the time to each of these

    def only(self, words: Sequence[str] | None) -> Plan:
        return self._replace(regimes=tuple(matching(self.regimes, words)))

    def cost(self, job: Job) -> float:
        """About how long a run takes, relative to others of the plan."""
        return job.gradients if self.objective == TRAIN_LOSS else 1.0

    def tuning(self) -> Iterator[Job]:
        for regime in self.regimes:
            for method, grid in self.grids.items():
                for chosen in choices(grid):
                    yield Job(regime, method, chosen, 0, self._shared(regime))

    def final(self, job: Job) -> Iterator[Job]:
        """The winner of a grid again, with other seeds than that of the tuning."""
        for seed in range(1, self.seeds + 1):
            yield job._replace(seed=seed)

    def _shared(self, regime: str) -> tuple[str, ...]:
        profile, _, workers = regime.partition("-")
        named = [f"cluster.profile={profile}", *([f"cluster.workers={workers}"] if workers else [])]
        trace = "true" if self.objective == TRAIN_LOSS else "false"  # the trace has the losses
        return (*self.common, *_REGIMES.get(regime, named), f"run.trace={trace}")


def quadratic(size: str, seeds: int) -> Plan:
    """n = 6174 workers, d = 1729 and 2000 virtual seconds. ``smoke`` is the same in small."""
    thresholds = [1.0, 2, 4, 6, 8, 16, 32]
    grids: dict[str, dict[str, list[float]]] = {
        "ringmaster": {"method.eta": _powers(-6, 1), "method.threshold": thresholds},
        "ringmaster_agnostic": {"method.eta": _powers(-4, 3)},
        "rennala": {"method.eta": _powers(-6, 1), "method.batch": thresholds},
        "delay_adaptive": {"method.eta": _powers(-8, -1)},
    }
    common: tuple[str, ...] = ("experiment=paper_quadratic", "run.samples=1000")
    gaps: tuple[float, ...] = (1.0, 0.1, 0.01)
    if size == "smoke":
        grids = {
            "ringmaster": {"method.eta": [0.04, 0.2], "method.threshold": [2.0, 8]},
            "ringmaster_agnostic": {"method.eta": [1.0, 5]},
            "rennala": {"method.eta": [0.04, 0.2], "method.batch": [2.0, 8]},
            "delay_adaptive": {"method.eta": [0.0016, 0.008]},
        }
        common, gaps = ("problem.dim=50", "cluster.workers=20", "budget.seconds=200"), (1.0, 0.1)
    return Plan("quadratic", size, "gap", common, grids, REGIMES, seeds, gaps=gaps)


def nanochat(size: str, seeds: int) -> Plan:
    """The paper's methods and grids on 8 and on 32 workers. ``cpu`` has a model whose gradients take milliseconds.

    In a run of a winner the quickest worker computes about 2000 gradients in ``cpu``, and 22000 in ``full``, as in the
    paper. The settings that are left in the end are compared after half of that.
    """
    etas, sizes = _powers(-2, 1), [1.0, 2, 4, 8, 16]
    grids: dict[str, dict[str, list[float]]] = {
        "ringmaster": {"method.eta": etas, "method.threshold": sizes},
        "ringmaster_agnostic": {"method.eta": _powers(-2, 2)},
        "rennala": {"method.eta": [5.0], "method.batch": sizes},
        "delay_adaptive": {"method.eta": etas},
        EVERY_ETA: {"method.eta": etas, "method.batch": sizes},
    }
    common: tuple[str, ...] = ("problem=nanochat", "eval.every=1")
    rungs: tuple[float, ...] = (1 / 16, 1 / 4, 1 / 2)
    regimes = tuple(f"{profile}-{n}" for n in (8, 32) for profile in REGIMES)
    if size == "full":
        common += ("run.samples=50", "model=nanochat_d6", "data=climbmix", "cluster.unit_seconds=0.02274",
                   "budget.seconds=500")  # fmt: skip
    elif size == "cpu":
        common += ("run.samples=50", "model=nanochat_mini", "data=stdlib", "budget.seconds=2000",
                   "problem.batch=4", "problem.validation_rows=64", "problem.final_tokens=32")  # fmt: skip
    else:
        grids = {
            "ringmaster": {"method.eta": [0.2, 1.0, 5], "method.threshold": [4.0]},
            "ringmaster_agnostic": {"method.eta": [5.0]},
            "rennala": {"method.eta": [5.0], "method.batch": [2.0]},
            "delay_adaptive": {"method.eta": [0.2]},
        }
        common += ("run.samples=8", "budget.seconds=16", "model=nanochat_mini", "problem.batch=1",
                   "problem.validation_rows=4", "problem.final_tokens=32")  # fmt: skip
        rungs, regimes = (1 / 2, 1.0), tuple(f"{profile}-3" for profile in REGIMES)
    return Plan("nanochat", size, TRAIN_LOSS, common, grids, regimes, seeds, rungs)


def auto(size: str, seeds: int) -> Plan:
    """The automatic threshold versus the best fixed one, in three regimes and one that changes in mid-run."""
    etas, thresholds = _powers(-5, -1), [1.0, 2, 4, 8, 16, 32]
    common = [
        "problem.dim=300",
        "problem.noise=0.3",  # so much that it pays to average many gradients
        "cluster.workers=16",
        "budget.seconds=400",
        "run.samples=100",
    ]
    if size == "smoke":
        etas, thresholds, common[0] = [0.04], [2.0], "problem.dim=20"
    grids = {"ringmaster": {"method.eta": etas, "method.threshold": thresholds}, AUTO: {"method.eta": etas}}
    return Plan("auto", size, "gap", tuple(common), grids, (*REGIMES, CHANGE), seeds)


_LANGUAGE = ("problem=nanochat", "budget.seconds=null", "method.decay=0.5", "problem.validation_rows=256",
             "problem.final_tokens=32768", "run.samples=8", "eval.every=1")  # fmt: skip
_SMALL = ("model.n_layer=1", "model.sequence_len=32", "problem.validation_rows=4", "problem.final_tokens=128",
          "budget.updates=8", "run.samples=2")  # fmt: skip


def radii(size: str, seeds: int) -> Plan:
    """A radius for every role versus one eta for all, and versus Muon + AdamW with a rate for every role."""
    etas = [0.01, 0.02, 0.04]
    grids: dict[str, dict[str, list[float]]] = {
        ONE_ETA: {"method.eta": [0.005, 0.01, 0.015, 0.02, 0.03, 0.04]},
        RADII: {
            "method.eta": etas,
            "geometry.radius.embedding": [30.0, 100],
            "geometry.radius.output": [0.2, 0.5],
            "geometry.radius.scalar": [0.5, 2.0],
        },
        BASELINE: {
            "rate.matrix": etas,
            "rate.embedding": [0.1, 0.3],
            "rate.output": [0.012, 0.03],
            "rate.scalar": [0.01, 0.04],
        },
    }
    common: tuple[str, ...] = (*_LANGUAGE, "budget.updates=400")
    if size == "smoke":
        grids = {name: {key: values[:1] for key, values in grid.items()} for name, grid in grids.items()}
        common = (*_LANGUAGE, *_SMALL)
    return Plan("radii", size, "loss", common, grids, ("sequential", "delayed"), seeds)


def steps(size: str, seeds: int) -> Plan:
    """The step size by method and geometry on a language model, which config/schema.py: suggested_eta gives.

    The methods that average (rennala, synchronous) are not run, because they take the step of ringmaster.
    """
    etas = [0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0]
    later = [25 * eta for eta in etas]  # for the agnostic schedule, which falls with the number of updates
    methods = ("ringmaster", "delay_adaptive", "asynchronous")
    grids = {"ringmaster_agnostic": {"method.eta": later}, **{name: {"method.eta": etas} for name in methods}}
    common: tuple[str, ...] = (*_LANGUAGE, "budget.updates=150", "cluster.workers=16", "problem.validation_rows=64",
                               "problem.final_tokens=8192", "run.samples=3")  # fmt: skip
    if size == "smoke":
        grids = {name: {"method.eta": grid["method.eta"][1:2]} for name, grid in grids.items()}
        common = (*_LANGUAGE, *_SMALL, "cluster.workers=3")
    return Plan("steps", size, "loss", common, grids, GEOMETRIES, seeds)
