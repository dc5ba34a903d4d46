"""`Simulator`, played by the compiled lane: same construction, same `run`, same attributes.

The core given is the one that ends up with the result: it lends its method's schedule and rules to the lane and
takes back iterate, momentum, version, counts and ledger whenever somebody may look.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch

from ringmaster_dist import randomness
from ringmaster_dist.algorithm.geometry import COEFFICIENTS
from ringmaster_dist.algorithm.methods import DelayAdaptive, Rennala, Synchronous
from ringmaster_dist.algorithm.schedules import Constant
from ringmaster_dist.problems import Problem
from ringmaster_dist.problems.quadratic import Quadratic
from ringmaster_dist.protocol import Receipt, Snapshot, Verdict
from ringmaster_dist.server.core import ServerCore
from ringmaster_dist.simulation import kernels, lane
from ringmaster_dist.simulation.simulator import Observer, Stalled
from ringmaster_dist.simulation.speeds import Floats, Ints, Speeds

_MOST_UPDATES = 4096  # played before Python looks again
_RECORDS = 4096
_VERDICTS = {lane.ACCEPTED: Verdict.ACCEPTED, lane.STALE: Verdict.STALE, lane.INVALID: Verdict.INVALID}
_ORACLES = {"none": kernels.PLAIN, "euclidean": kernels.NORMALIZED, "row": kernels.NORMALIZED,
            "sign": kernels.SIGN, "column": kernels.SIGN}  # fmt: skip


def supports(problem: Problem, speeds: Speeds) -> bool:
    """Whether the lane can play this: a quadratic whose gradients are not clipped, at speeds that do not change."""
    return isinstance(problem, Quadratic) and problem.clip is None and speeds.rates is None


class CompiledSimulator:
    def __init__(
        self,
        core: ServerCore,
        problem: Problem,
        speeds: Speeds,
        *,
        seed: int = 0,
        interrupt: bool = True,
        observer: Observer | None = None,
        record_arrivals: bool = True,
        should_stop: Callable[[], bool] = lambda: False,
        sample_seconds: float = math.inf,
        sample_updates: float = math.inf,
    ) -> None:
        assert isinstance(problem, Quadratic), "the compiled lane plays the quadratic only"
        assert speeds.rates is None, "the compiled lane has constant speeds only"
        if core.pushes or core.workers:
            raise ValueError("the core has a history already; the compiled lane starts fresh runs only")
        self.core = core
        self.problem = problem
        self._observer = observer
        self._should_stop = should_stop
        self._sample_seconds, self._next_sample_seconds = sample_seconds, 0.0
        self._sample_updates, self._next_sample_updates = sample_updates, 0.0
        for _ in range(speeds.num_workers):
            core.join()
        self._rules = _rules(core, problem, speeds, interrupt)
        self._state = _state(core, problem, speeds, seed, self._rules)
        num_records = _RECORDS if observer is not None and record_arrivals else 0
        self._whole = np.empty((num_records, 5), dtype=np.int64)
        self._reals = np.empty((num_records, 3))
        self._planned = range(0)
        s = self._state
        lane.begin_all(s.workers, s.slots, s.times, s.heap, s.counters, self._rules.jitter)

    @property
    def now(self) -> float:
        return float(self._state.clock[0])

    @property
    def interrupted(self) -> Ints:
        return np.asarray(self._state.workers["interrupted"])

    @property
    def used_seconds(self) -> Floats:
        return np.asarray(self._state.workers["used"])

    @property
    def wasted_seconds(self) -> Floats:
        return np.asarray(self._state.workers["wasted"])

    def run(self, *, updates: float = math.inf, seconds: float = math.inf) -> None:
        counters = self._state.counters
        while (version := int(counters[lane.VERSION])) < updates and not self._should_stop():
            stop = min(version + _MOST_UPDATES, updates, max(version + 1, self._next_sample_updates))
            until = min(seconds, self._next_sample_seconds)
            why = self._play(version, math.ceil(stop) - version, until)
            if why == lane.REACHED_TIME:
                if self._state.times[0] == math.inf and seconds == math.inf:
                    raise Stalled(f"at {self.now:g} s no worker will ever finish a gradient")
                if self._next_sample_seconds < seconds:
                    self._sample(self._next_sample_seconds)
                    continue
                self._state.clock[0] = seconds
                break
            if counters[lane.VERSION] >= self._next_sample_updates:
                self._sample(self.now)
        self._settle()

    def _play(self, version: int, num_updates: int, until: float) -> int:
        """One call of the lane, with room made for it, and its records passed on."""
        if version + num_updates > self._planned.stop or version < self._planned.start:
            self._plan(version)
        low, high = version - self._planned.start, version - self._planned.start + num_updates
        etas, alphas, thresholds = self._etas[low:high], self._alphas[low:high], self._thresholds[low : high + 1]
        if self._rules.bounded:
            self._state = _with_recent(self._state, int(thresholds.max()) + 2)
        why, num_records = lane.advance(
            self._state, self._rules, version, etas, alphas, thresholds, until, self._whole, self._reals
        )
        if why == lane.SLOTS_FULL:
            self._state = _with_more_slots(self._state)
        if num_records:
            self._report(num_records)
        return int(why)

    def _plan(self, version: int) -> None:
        """Asks the method for its schedule over the versions to come."""
        method = self.core.method
        self._planned = versions = range(version, version + 2 * _MOST_UPDATES)
        if isinstance(method.schedule, Constant):
            self._etas = np.full(len(versions), method.schedule.eta_value)
            self._alphas = np.full(len(versions), method.schedule.alpha_value)
            self._thresholds = np.full(len(versions) + 1, float(method.threshold(version)))
        else:
            self._etas = np.array([method.schedule.eta(k) for k in versions])
            self._alphas = np.array([method.alpha(k) for k in versions])
            thresholds = [method.threshold(k) for k in range(versions.start, versions.stop + 1)]
            self._thresholds = np.array(thresholds, dtype=np.float64)

    def _report(self, num_records: int) -> None:
        assert self._observer is not None
        method = self.core.method
        wholes, reals = self._whole[:num_records].tolist(), self._reals[:num_records].tolist()
        following = [row[3] for row in wholes[1:]] + [int(self._state.counters[lane.VERSION])]
        for row, row_of_reals, next_version in zip(wholes, reals, following, strict=True):
            worker, sequence, gradient_version, version, verdict = row
            time, loss, compute_seconds = row_of_reals
            accepted = verdict == lane.ACCEPTED
            continue_at = version + 1 if accepted and method.waits else next_version
            receipt = Receipt(_VERDICTS[verdict], version - gradient_version, version, continue_at)
            self._observer.arrival(
                time, worker, sequence, gradient_version, receipt,
                None if verdict == lane.STALE else loss, compute_seconds,
            )  # fmt: skip

    def _sample(self, time: float) -> None:
        self._settle(ledger=False)
        if self._observer is not None:
            self._observer.sample(time)
        while self._next_sample_seconds <= time:
            self._next_sample_seconds += self._sample_seconds
        while self._next_sample_updates <= self.core.version:
            self._next_sample_updates += self._sample_updates

    def _settle(self, ledger: bool = True) -> None:
        """Brings the core up to date."""
        state, core = self._state, self.core
        counters = state.counters
        iterate = torch.from_numpy(state.iterates[counters[lane.CURRENT]].copy())
        core.version = int(counters[lane.VERSION])
        core.snapshot = Snapshot(core.version, iterate)
        core.momentum = torch.from_numpy(state.momentum.copy())
        core.accepted = int(counters[lane.ACCEPTED])
        core.stale = int(counters[lane.STALE])
        core.invalid = int(counters[lane.INVALID])
        if ledger:
            tally = state.workers[["accepted", "stale", "invalid"]].tolist()
            for record, counts in zip(core.workers.values(), tally, strict=True):
                record.accepted, record.stale, record.invalid = counts


def _rules(core: ServerCore, problem: Quadratic, speeds: Speeds, interrupt: bool) -> lane.Rules:
    method, update = core.method, core.update
    (block,) = update.layout.blocks
    coefficients = COEFFICIENTS.get(update.orthogonalization)
    if block.geometry != "spectral":
        oracle = _ORACLES[block.geometry]
    else:
        oracle = kernels.NORMALIZED if coefficients is None else kernels.POLYNOMIAL
    batch = 1
    if isinstance(method, Rennala):
        batch = method.batch
    elif isinstance(method, Synchronous):
        batch = speeds.num_workers
    return lane.Rules(
        jitter=float(speeds.jitter),
        noise=float(problem.noise),
        interrupt=interrupt,
        bounded=math.isfinite(method.threshold(0)),
        adaptive=isinstance(method, DelayAdaptive),
        batch=batch,
        waits=method.waits,
        nesterov=update.nesterov,
        radius=float(block.radius),
        weight_decay=float(block.weight_decay),
        oracle=oracle,
        coefficients=np.array(coefficients or [(0.0, 0.0, 0.0)]),
    )


def _state(core: ServerCore, problem: Quadratic, speeds: Speeds, seed: int, rules: lane.Rules) -> lane.State:
    num_workers, dim, num_slots = speeds.num_workers, problem.dim, 16

    def whole(size: int) -> Ints:
        return np.zeros(size, dtype=np.int64)

    workers = np.zeros(num_workers, dtype=lane.WORKER)
    workers["base"] = speeds.base
    workers["jitter_key"] = speeds.keys
    workers["noise_key"] = randomness.worker_keys(seed, randomness.STREAM_NOISE, num_workers)
    workers["sequence"] = workers["slot"] = -1
    workers["place"] = np.arange(num_workers)
    slots = _empty_slots(num_slots)
    slots[0]["version"] = 0
    iterates = np.zeros((num_slots, dim))
    iterates[0] = core.snapshot.iterate.numpy()
    counters = whole(9)
    counters[lane.NUM_FREE] = num_slots - 1
    return lane.State(
        workers=workers,
        slots=slots,
        iterates=iterates,
        free=np.arange(num_slots - 1, -1, -1, dtype=np.int64),  # the current slot 0 comes last and is not free
        recent=whole(2),
        times=np.zeros(num_workers),
        heap=np.arange(num_workers, dtype=np.int64),
        waiting=whole(num_workers if rules.waits else 1),
        momentum=np.zeros(dim),
        gradient=np.zeros(dim),
        direction=np.zeros(dim),
        total=np.zeros(dim if rules.batch > 1 else 1),
        counters=counters,
        clock=np.zeros(1),
    )


def _empty_slots(count: int) -> np.ndarray:
    slots = np.zeros(count, dtype=lane.SLOT)
    slots["version"] = slots["first"] = -1
    return slots


def _with_recent(state: lane.State, capacity: int) -> lane.State:
    """Room for the slots of this many versions back."""
    if len(state.recent) >= capacity:
        return state
    capacity = max(capacity, 2 * len(state.recent))
    recent = np.zeros(capacity, dtype=np.int64)
    versions = state.slots["version"]
    for slot in np.flatnonzero(versions >= state.counters[lane.OLDEST]):
        recent[versions[slot] % capacity] = slot
    return state._replace(recent=recent)


def _with_more_slots(state: lane.State) -> lane.State:
    """Twice the iterates. Copies them, which doubling makes rare."""
    old = len(state.free)
    fresh = np.arange(2 * old - 1, old - 1, -1, dtype=np.int64)
    state.counters[lane.NUM_FREE] = old
    return state._replace(
        slots=np.concatenate([state.slots, _empty_slots(old)]),
        iterates=np.concatenate([state.iterates, np.zeros_like(state.iterates)]),
        free=np.concatenate([fresh, np.zeros(old, dtype=np.int64)]),
    )
