"""The runs of ``ringmaster experiment machines``: the automatic contenders versus the best of the others, cell by cell.

A cell is a problem on a cluster. In every cell, every contender chooses from the same small grid of eta. The methods
with a second number, a fixed threshold or a batch, choose that too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringmaster_dist.experiment.plan import AUTOMATIC, PROBLEMS, Job, choices, matching, num_kept
from ringmaster_dist.profiles import base_seconds

SPEEDS = ("similar", "sublinear", "linear", "two_speeds", "change")
CHANGE_AT = 0.25  # of the budget, when the quickest quarter of the workers slows down
_SLOWER = 8  # times, for the slow quarter of two_speeds and for the workers that slow down
SHORT = 1 / 3  # of the budget. The first look at every setting lasts this long.
_AGNOSTIC = 25.0  # the steps of this method shrink with the updates, so its grid of eta is that much larger
_THRESHOLDS = {8: (2, 4, 8, 16), 32: (2, 8, 16, 32, 128)}  # by the number of workers
_BATCHES = {8: (1, 2, 8), 32: (1, 4, 16)}
_ETAS = {
    "scion": [0.0025, 0.005, 0.01, 0.02, 0.04, 0.08],
    "muon": [0.5, 1.0, 2.0, 4.0, 8.0],
    "quadratic": [0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64],
}
# A gradient of this model takes a few milliseconds.
_MODEL = ("problem=nanochat", "model.n_layer=1", "model.n_head=1", "model.n_kv_head=1", "model.n_embd=32",
          "model.sequence_len=32", "model.vocab_size=512", "problem.batch=4", "problem.validation_rows=64",
          "problem.final_tokens=32", "eval.every=1")  # fmt: skip
_PROBLEMS = {
    "scion": (*_MODEL, "geometry=scion"),
    "muon": (*_MODEL, "geometry=muon"),
    "quadratic": ("problem.dim=300",),
}
_TUNING_SEEDS = (0, 10, 11)  # where runs are quick; elsewhere the first
_GRADIENTS = {"scion": 1000, "muon": 1000, "quadratic": 2000}  # that all workers together compute within the budget
_SAMPLES = 48


class Cell(NamedTuple):
    """A problem on a cluster, with the grids of its contenders."""

    problem: str
    workers: int
    speeds: str
    gradients: int  # that all workers together compute within the budget
    samples: int  # evaluations over the budget
    is_long: bool  # whether its runs take so long that settings are dropped after a first look
    grids: dict[str, dict[str, list[float]]]

    @property
    def name(self) -> str:
        return f"{self.problem}-{self.workers}-{self.speeds}"

    @property
    def seconds(self) -> float:
        """The budget in virtual seconds. The quickest worker needs one second for a gradient."""
        before, after = self._rate(_times(self)), self._rate(_times(self, changed=True))
        return float(f"{self.gradients / (CHANGE_AT * before + (1 - CHANGE_AT) * after):.6g}")

    @staticmethod
    def _rate(times: NDArray[np.float64]) -> float:
        return float((1.0 / times).sum())

    @property
    def tuning_seeds(self) -> tuple[int, ...]:
        return _TUNING_SEEDS[:1] if self.is_long else _TUNING_SEEDS

    def jobs(self, contender: str) -> list[Job]:
        """A run of the whole budget for every setting of a contender."""
        return [Job(self.name, contender, chosen, 0, self._common()) for chosen in choices(self.grids[contender])]

    @property
    def cost(self) -> float:
        """About how long a run takes, relative to others."""
        return 1.0 if self.is_long else 0.05

    def num_whole(self, contender: str) -> int:
        """How many settings of a contender run the whole budget."""
        settings = math.prod(map(len, self.grids[contender].values()))
        return num_kept(settings) if self.is_long else settings

    def drops_some(self, contender: str) -> bool:
        return self.num_whole(contender) < math.prod(map(len, self.grids[contender].values()))

    def short(self, job: Job) -> Job:
        """The same run, up to its first look."""
        return job._replace(common=self._common(SHORT))

    def _common(self, part: float = 1.0) -> tuple[str, ...]:
        budget = (f"budget.seconds={part * self.seconds:.6g}", f"run.samples={round(part * self.samples)}")
        cluster = (f"cluster.workers={self.workers}", *self._cluster())
        return (*_PROBLEMS[self.problem], *cluster, *budget, "run.trace=false")

    def _cluster(self) -> tuple[str, ...]:
        if self.speeds == "two_speeds":
            return ("cluster.profile=file", f"cluster.times=[1, 1, 1, {_SLOWER}]")
        if self.speeds != "change":
            return (f"cluster.profile={self.speeds}",)
        quickest, start = list(range(self.workers // 4)), CHANGE_AT * self.seconds
        phase = f"{{start_seconds: {start:.6g}, rate: {1 / _SLOWER:g}, workers: {quickest}}}"
        return ("cluster.profile=linear", f"cluster.phases=[{phase}]")


def _times(cell: Cell, *, changed: bool = False) -> NDArray[np.float64]:
    """Seconds per gradient of each worker, of shape (workers,)."""
    if cell.speeds == "two_speeds":
        return np.resize(np.array([1.0, 1.0, 1.0, _SLOWER]), cell.workers)
    times = base_seconds("linear" if cell.speeds == "change" else cell.speeds, cell.workers, 1.0)
    if changed and cell.speeds == "change":
        times[: cell.workers // 4] *= _SLOWER
    return times


class Machines(NamedTuple):
    """The experiment."""

    size: str
    cells: tuple[Cell, ...]
    seeds: int

    def only(self, words: Sequence[str] | None) -> Machines:
        """The cells whose names have all parts of a word, such as ``linear`` or ``scion-32``; all without words."""
        kept = matching([cell.name for cell in self.cells], words)
        return self._replace(cells=tuple(cell for cell in self.cells if cell.name in kept))

    def final(self, job: Job) -> Iterator[Job]:
        """The setting that a contender has chosen again, with other seeds than that of the tuning."""
        for seed in range(1, self.seeds + 1):
            yield job._replace(seed=seed)


def machines(size: str, seeds: int) -> Machines:
    """``full`` has 30 cells: three problems, 8 and 32 workers, five kinds of speeds. ``smoke`` is the same in small."""
    if size == "smoke":
        made = [_small(problem, speeds) for problem in PROBLEMS for speeds in ("linear", "change")]
    else:
        made = [_cell(problem, n, speeds) for problem in PROBLEMS for n in (8, 32) for speeds in SPEEDS]
    return Machines(size, tuple(made), seeds)


def _cell(problem: str, workers: int, speeds: str) -> Cell:
    bare = Cell(problem, workers, speeds, _GRADIENTS[problem], _SAMPLES, problem != "quadratic", {})
    times = _times(bare)
    most = float((1.0 / times).sum() * times.max())  # the delay of the slowest worker if everything is accepted
    etas = {"method.eta": _ETAS[problem]}
    grids: dict[str, dict[str, list[float]]] = {
        "ringmaster": {**etas, "method.threshold": [float(r) for r in _THRESHOLDS[workers] if r <= most]},
        "asynchronous": etas,
        "delay_adaptive": etas,
        "rennala": {**etas, "method.batch": [float(batch) for batch in _BATCHES[workers]]},
        "ringmaster_agnostic": {"method.eta": [_AGNOSTIC * eta for eta in _ETAS[problem]]},
        **{name: etas for name, automatic in AUTOMATIC.items() if problem in automatic.problems},
    }
    return bare._replace(grids=grids)


def _small(problem: str, speeds: str) -> Cell:
    """A cell of the same kind that takes seconds."""
    etas = {"method.eta": _ETAS[problem][1:3]}
    grids = {
        "ringmaster": {**etas, "method.threshold": [2.0, 4.0]},
        "asynchronous": etas,
        **{name: etas for name, automatic in AUTOMATIC.items() if problem in automatic.problems},
    }
    return Cell(problem, 4, speeds, 30, 12, True, grids)
