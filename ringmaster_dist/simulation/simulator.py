"""Drives a server core with a virtual clock.

A worker computes, arrives, gets its verdict and continues at once. Communication takes no time, as in the paper. An
arrival at the instant at which the budget ends still counts. With interruption, a computation that has become stale is
restarted at the newest iterate in the same instant, even if it was about to arrive.

Gradients are *lazy*. A gradient is computed when the core accepts its arrival, at the stored iterate of its version. An
iterate is forgotten as soon as no computation that could still be accepted uses it. One thread runs all of this.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch

from ringmaster_dist.problems import Interrupted, Problem, gradient_of
from ringmaster_dist.protocol import Receipt, Snapshot
from ringmaster_dist.server.core import ServerCore
from ringmaster_dist.simulation.arrivals import IDLE, Arrivals
from ringmaster_dist.simulation.speeds import Floats, Ints, Speeds


class Observer(Protocol):
    """What the simulator reports to."""

    def arrival(
        self, time: float, worker: int, sequence: int, gradient_version: int, receipt: Receipt,
        loss: float | None, compute_seconds: float, rows: int,
    ) -> None:  # fmt: skip
        """A gradient has arrived. The loss is None if the gradient was not needed and therefore not computed.

        ``rows`` are those of the gradient; 0 if the core does not assign rows.
        """
        ...

    def sample(self, time: float) -> None:
        """The clock has reached a time, or the core a version, at which a measurement is due."""
        ...


class _Cohort:
    """The computations at one version. Owns their iterate and counts how many are in flight."""

    __slots__ = ("in_flight", "snapshot")

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self.in_flight = 0


class Stalled(Exception):
    """No computation in flight will ever finish."""


class Simulator:
    """One simulated run. Call `run` again with a larger budget to continue it."""

    engine = "core"

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
        self.wasted_seconds: Floats = np.zeros(speeds.num_workers)  # by worker, on work that was not accepted
        self.used_seconds: Floats = np.zeros(speeds.num_workers)  # and on work that was
        self.delivered_seconds: Floats = np.zeros(speeds.num_workers)  # on gradients that arrived
        self._seed = seed
        self._interrupt = interrupt
        self._should_stop = should_stop
        self._observer = observer
        self._report_arrival = observer.arrival if observer is not None and record_arrivals else None
        self._sample_seconds, self._next_sample_seconds = sample_seconds, 0.0
        self._sample_updates, self._next_sample_updates = sample_updates, 0.0
        self._arrivals, self._speeds = Arrivals(speeds), speeds
        self._row_counts: Ints = np.zeros(speeds.num_workers, dtype=np.int64)  # by worker, of its newest computation
        self._delivered: Ints = np.zeros(speeds.num_workers, dtype=np.int64)
        self._waiting: list[int] = []  # workers that continue only from the next version
        self._cohorts: dict[int, _Cohort] = {}
        self._oldest = core.version  # no cohort is older
        # Of the arrival that the core is judging:
        self._wanted: tuple[torch.Tensor, int, int] | None = None  # iterate, worker and sequence
        self._loss: float | None = None  # None until the gradient is computed

        workers = np.array([core.join() for _ in range(speeds.num_workers)], dtype=np.int64)
        if workers[0] != 0 or workers[-1] != len(workers) - 1:
            raise ValueError("the core has members already; a simulation brings its own workers")
        self._cohorts[core.version] = _Cohort(core.snapshot)
        self._begin_many(workers)

    @property
    def interrupted(self) -> Ints:
        """By worker, how many computations were begun and neither delivered nor left in flight."""
        arrivals = self._arrivals
        begun, in_flight = arrivals.sequence + 1, arrivals.version != IDLE
        interrupted: Ints = begun - self._delivered - in_flight
        return interrupted

    def run(self, *, updates: float = math.inf, seconds: float = math.inf) -> None:
        """Runs until the version or the clock reaches its budget, or until ``should_stop`` says so."""
        core, arrivals = self.core, self._arrivals
        while core.version < updates and not self._should_stop():
            arrival = arrivals.pop()
            if arrival is None or arrival.time > seconds:
                if seconds == math.inf:
                    raise Stalled(f"at {self.now:g} s no worker will ever finish a gradient")
                if arrival is not None:  # it stays in flight
                    arrivals.put_back(arrival)
                self._sample_up_to(seconds)
                self.now = seconds
                return
            if arrival.time > self._next_sample_seconds:
                self._sample_up_to(arrival.time)
            self.now = arrival.time
            try:
                self._deliver(arrival.worker, arrival.sequence)
            except Interrupted:  # nothing was delivered yet, and the loop ends
                arrivals.put_back(arrival)

    def _deliver(self, worker: int, sequence: int) -> None:
        core, now = self.core, self.now
        gradient_version = int(self._arrivals.version[worker])
        compute_seconds = now - float(self._arrivals.start[worker])
        cohort = self._cohorts.get(gradient_version)
        rows = int(self._row_counts[worker])
        self._wanted = None if cohort is None else (cohort.snapshot.iterate, worker, sequence)
        self._loss = None
        receipt = core.push(worker, sequence, gradient_version, self._gradient, None, compute_seconds, rows)
        if receipt.verdict.value == "accepted":
            self.used_seconds[worker] += compute_seconds
        else:
            self.wasted_seconds[worker] += compute_seconds
        self.delivered_seconds[worker] += compute_seconds
        if self._report_arrival is not None:
            self._report_arrival(now, worker, sequence, gradient_version, receipt, self._loss, compute_seconds, rows)
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
        """Computes the gradient that has just arrived. The core calls this only if it accepts the delay."""
        assert self._wanted is not None, "the iterate of an accepted gradient was forgotten"
        iterate, worker, sequence = self._wanted
        rows = int(self._row_counts[worker])
        gradient, self._loss = gradient_of(self.problem, iterate, self._seed, worker, sequence, self._should_stop, rows)
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
        """Gives the iterate of a version back to the core, which may write over it."""
        self.core.recycle(self._cohorts.pop(version).snapshot)

    def _begin(self, worker: int) -> None:
        version = self.core.version
        cohort = self._cohorts[version]
        cohort.in_flight += 1
        self._take_rows(worker)
        self._arrivals.begin(worker, version, self.now)

    def _begin_many(self, workers: Ints) -> None:
        version = self.core.version
        cohort = self._cohorts[version]
        cohort.in_flight += len(workers)
        if self.core.rows is not None:
            for worker in workers.tolist():
                self._take_rows(worker)
        self._arrivals.begin_many(workers, version, self.now)

    def _take_rows(self, worker: int) -> None:
        """The computation that this worker begins takes the rows that the core has assigned, if it assigns any."""
        assigned = self.core.rows
        if assigned is not None:
            self._row_counts[worker] = rows = assigned.rows_of(worker)
            self._speeds.share[worker] = assigned.weight(rows)

    def _sample_up_to(self, time: float) -> None:
        """Takes the samples that are due before ``time``. Nothing changes until then."""
        while self._next_sample_seconds < time:
            self._sample(self._next_sample_seconds)

    def _sample(self, time: float) -> None:
        if self._observer is not None:
            self._observer.sample(time)
        while self._next_sample_seconds <= time:
            self._next_sample_seconds += self._sample_seconds
        while self._next_sample_updates <= self.core.version:
            self._next_sample_updates += self._sample_updates
