"""Drives a server core with a virtual clock.

Workers compute, arrive, get their verdict and go on at once: communication takes no time, as in the paper. An
arrival at the instant the budget ends still counts. With interruption, a computation that has become stale is
restarted at the newest iterate in the same instant, even if it was about to arrive.

Gradients are *lazy*: computed when the core accepts the arrival, at the stored iterate of its version. An
iterate is forgotten as soon as no computation that could still be accepted is using it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch

from ringmaster_dist.problems import Problem
from ringmaster_dist.protocol import Receipt, Snapshot
from ringmaster_dist.server.core import ServerCore
from ringmaster_dist.simulation.arrivals import IDLE, Arrivals
from ringmaster_dist.simulation.speeds import Floats, Ints, Speeds


class Observer(Protocol):
    """Told of everything that happens."""

    def arrival(
        self, time: float, worker: int, sequence: int, gradient_version: int, receipt: Receipt,
        loss: float | None, compute_seconds: float,
    ) -> None:  # fmt: skip
        """A gradient arrived. The loss is None where the gradient was not needed, so not computed."""
        ...

    def sample(self, time: float) -> None:
        """The clock has reached a time, or the core a version, at which a measurement is due."""
        ...


class _Cohort:
    """The computations at one version: their iterate, and how many are in flight."""

    __slots__ = ("in_flight", "snapshot")

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self.in_flight = 0


class Stalled(Exception):
    """No computation in flight will ever finish."""


class Simulator:
    """One simulated run. `run` may be called again with a larger budget to go on."""

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
        self.core = core
        self.problem = problem
        self.now = 0.0
        self.wasted_seconds: Floats = np.zeros(speeds.num_workers)  # spent on work that was not accepted
        self.used_seconds: Floats = np.zeros(speeds.num_workers)  # spent on work that was
        self._seed = seed
        self._interrupt = interrupt
        self._should_stop = should_stop
        self._observer = observer
        self._tell_arrivals = observer.arrival if observer is not None and record_arrivals else None
        self._sample_seconds, self._next_sample_seconds = sample_seconds, 0.0
        self._sample_updates, self._next_sample_updates = sample_updates, 0.0
        self._arrivals = Arrivals(speeds)
        self._delivered: Ints = np.zeros(speeds.num_workers, dtype=np.int64)
        self._waiting: list[int] = []
        self._cohorts: dict[int, _Cohort] = {}
        self._oldest = core.version  # no cohort is older
        self._wanted: tuple[torch.Tensor, int, int] | None = None
        self._loss: float | None = None

        workers = np.array([core.join() for _ in range(speeds.num_workers)], dtype=np.int64)
        if workers[0] != 0 or workers[-1] != len(workers) - 1:
            raise ValueError("the core has members already; a simulation brings its own workers")
        self._cohorts[core.version] = _Cohort(core.snapshot)
        self._begin_many(workers)

    @property
    def interrupted(self) -> Ints:
        """By worker, how many of its computations were begun, not delivered, and are not in flight."""
        arrivals = self._arrivals
        begun, in_flight = arrivals.sequence + 1, arrivals.version != IDLE
        interrupted: Ints = begun - self._delivered - in_flight
        return interrupted

    def run(self, *, updates: float = math.inf, seconds: float = math.inf) -> None:
        """Until the core's version or the clock reaches its budget, or somebody asks to stop, whichever comes first."""
        core, arrivals = self.core, self._arrivals
        while core.version < updates and not self._should_stop():
            arrival = arrivals.pop()
            if arrival is None or arrival.time > seconds:
                if seconds == math.inf:
                    raise Stalled(f"at {self.now:g} s no worker will ever finish a gradient")
                if arrival is not None:  # not yet: leave it in flight
                    arrivals.put_back(arrival)
                self._sample_up_to(seconds)
                self.now = seconds
                return
            if arrival.time > self._next_sample_seconds:
                self._sample_up_to(arrival.time)
            self.now = arrival.time
            self._deliver(arrival.worker, arrival.sequence)

    def _deliver(self, worker: int, sequence: int) -> None:
        core, now = self.core, self.now
        gradient_version = int(self._arrivals.version[worker])
        compute_seconds = now - float(self._arrivals.start[worker])
        cohort = self._cohorts.get(gradient_version)
        self._wanted = None if cohort is None else (cohort.snapshot.iterate, worker, sequence)
        self._loss = None
        receipt = core.push(worker, sequence, gradient_version, self._gradient, None, compute_seconds)
        if receipt.verdict.value == "accepted":
            self.used_seconds[worker] += compute_seconds
        else:
            self.wasted_seconds[worker] += compute_seconds
        if self._tell_arrivals is not None:
            self._tell_arrivals(now, worker, sequence, gradient_version, receipt, self._loss, compute_seconds)
        self._arrivals.version[worker] = IDLE
        self._delivered[worker] += 1
        if cohort is not None:
            cohort.in_flight -= 1
            if cohort.in_flight == 0 and gradient_version != core.version:
                self._forget(gradient_version)
        if core.version != receipt.version:
            self._version_advanced(receipt.version)
        if receipt.continue_at > core.version:
            self._waiting.append(worker)
        else:
            self._begin(worker)

    def _gradient(self) -> torch.Tensor:
        """The gradient that has just arrived: called by the core, only if it accepts."""
        assert self._wanted is not None, "a gradient was accepted whose iterate was forgotten"
        iterate, worker, sequence = self._wanted
        gradient, self._loss = self.problem.gradient(iterate, self._seed, worker, sequence)
        return gradient.detach() if gradient.requires_grad else gradient

    def _version_advanced(self, previous: int) -> None:
        core = self.core
        self._cohorts[core.version] = _Cohort(core.snapshot)
        before = self._cohorts.get(previous)
        if before is not None and before.in_flight == 0:
            self._forget(previous)
        if self._waiting:
            released = np.array(self._waiting, dtype=np.int64)
            self._waiting.clear()
            self._begin_many(released)
        stale_before = core.stale_before
        while self._oldest < stale_before:
            cohort = self._cohorts.get(self._oldest)
            if cohort is not None:
                if self._interrupt and cohort.in_flight:
                    self._restart(self._oldest)
                self._forget(self._oldest)
            self._oldest += 1
        if core.version >= self._next_sample_updates:
            self._sample(self.now)

    def _restart(self, version: int) -> None:
        """Interrupts the computations at a version and starts their workers again at the newest."""
        arrivals = self._arrivals
        members = np.flatnonzero(arrivals.version == version)
        self.wasted_seconds[members] += self.now - arrivals.start.take(members)
        self._begin_many(members)

    def _forget(self, version: int) -> None:
        """Nobody needs this version's iterate any more: the core may write over it."""
        self.core.recycle(self._cohorts.pop(version).snapshot)

    def _begin(self, worker: int) -> None:
        version = self.core.version
        cohort = self._cohorts[version]
        cohort.in_flight += 1
        self._arrivals.begin(worker, version, self.now)

    def _begin_many(self, workers: Ints) -> None:
        version = self.core.version
        cohort = self._cohorts[version]
        cohort.in_flight += len(workers)
        self._arrivals.begin_many(workers, version, self.now)

    def _sample_up_to(self, time: float) -> None:
        """Takes the samples due before ``time``: until then nothing changes."""
        while self._next_sample_seconds < time:
            self._sample(self._next_sample_seconds)

    def _sample(self, time: float) -> None:
        if self._observer is not None:
            self._observer.sample(time)
        while self._next_sample_seconds <= time:
            self._next_sample_seconds += self._sample_seconds
        while self._next_sample_updates <= self.core.version:
            self._next_sample_updates += self._sample_updates
