"""The server's state and verdicts: the only place that decides and updates (Algorithm 1).

A plain object without clock, thread, socket or file. The real server and the simulator drive the same one.
Callers serialise their calls. Invariants:

- every push gets exactly one verdict, and ``accepted + stale + invalid`` is the number of pushes counted;
- a repeated ``(worker, sequence)`` gets its first answer again and changes nothing, not even a counter;
- a gradient whose delay has reached the threshold is never applied, and no gradient is applied twice;
- an iterate handed out in a snapshot is never written again, unless its holder gives it back (`recycle`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ringmaster_dist.algorithm.methods import Method
from ringmaster_dist.algorithm.update import Update
from ringmaster_dist.protocol import Receipt, Snapshot, Verdict

# A gradient, or a way to get it: the latter is called only if the delay admits the push.
Gradient = torch.Tensor | Callable[[], torch.Tensor]

_ACCEPTED, _STALE, _INVALID = Verdict.ACCEPTED, Verdict.STALE, Verdict.INVALID


class WorkerRecord:
    """What the server remembers of a worker: its last answer and its counts."""

    __slots__ = ("accepted", "invalid", "receipt", "sequence", "stale")

    def __init__(self) -> None:
        self.sequence = -1  # of the last push that was answered
        self.receipt: Receipt | None = None
        self.accepted = 0
        self.stale = 0
        self.invalid = 0


class ServerCore:
    """Iterate, momentum, version and method behind `join`, `leave`, `fetch` and `push`."""

    def __init__(self, initial: torch.Tensor, method: Method, update: Update) -> None:
        expected = (update.layout.size,)
        if tuple(initial.shape) != expected or initial.dtype != update.dtype:
            raise ValueError(
                f"the initial iterate is {tuple(initial.shape)} {initial.dtype}, "
                f"the layout needs {expected} {update.dtype}"
            )
        self.method = method
        self.update = update
        self.snapshot = Snapshot(0, initial.detach().clone())
        self.momentum = torch.zeros_like(self.snapshot.iterate)
        self.accepted = 0
        self.stale = 0
        self.invalid = 0
        self.workers: dict[int, WorkerRecord] = {}
        self.live: set[int] = set()
        self._next_worker_id = 0
        self._spare: list[torch.Tensor] = []  # memory for iterates to come

    @property
    def version(self) -> int:
        """The number of updates applied."""
        return self.snapshot.version

    @property
    def pushes(self) -> int:
        return self.accepted + self.stale + self.invalid

    @property
    def stale_before(self) -> int:
        """Gradients of versions below this can never be accepted any more: work on them may stop."""
        version = self.snapshot.version
        threshold = self.method.threshold(version)
        return 0 if threshold > version else int(version - threshold + 1)

    def join(self, worker_id: int | None = None) -> int:
        """Admits a new worker, or again one that was here before (its sequences go on); returns its id."""
        if worker_id is None:
            worker_id = self._next_worker_id
        elif worker_id < 0:
            raise ValueError(f"worker_id is {worker_id}; ids are not negative")
        self._next_worker_id = max(self._next_worker_id, worker_id + 1)
        self.workers.setdefault(worker_id, WorkerRecord())
        self.live.add(worker_id)
        return worker_id

    def leave(self, worker_id: int) -> None:
        """Counts a worker out. A synchronous round that waited only for it is completed, which is an update."""
        if worker_id not in self.live:
            return
        self.live.discard(worker_id)
        mean = self.method.complete_without(self.live)
        if mean is not None:
            self._apply(mean, delay=0)

    def fetch(self, known_version: int | None = None) -> Snapshot | None:
        """The newest snapshot, or None when the caller has it."""
        return None if known_version == self.snapshot.version else self.snapshot

    def recycle(self, snapshot: Snapshot) -> None:
        """Gives an old iterate's memory back. The caller promises that nobody reads it any more."""
        assert snapshot.version < self.version, "the current iterate is in use"
        self._spare.append(snapshot.iterate)

    def push(self, worker_id: int, sequence: int, gradient_version: int, gradient: Gradient) -> Receipt:
        """One verdict on one gradient; applies an update when the method says so.

        Sequences of a worker increase from push to push; gaps are allowed (work that was interrupted).
        """
        record = self.workers.get(worker_id)
        if record is not None and sequence == record.sequence and record.receipt is not None:
            return record.receipt
        version = self.snapshot.version
        delay = version - gradient_version
        problem = self._refusal(record, worker_id, sequence, gradient_version, delay)
        if problem:
            return self._refuse(record, sequence, delay, problem)
        assert record is not None
        if delay >= self.method.threshold(version):
            self.stale += 1
            record.stale += 1
            return self._answer(record, sequence, Receipt(_STALE, delay, version, version))
        if not isinstance(gradient, torch.Tensor):
            gradient = gradient()
        problem = self._gradient_fault(gradient)
        if problem:
            return self._refuse(record, sequence, delay, problem)
        self.accepted += 1
        record.accepted += 1
        to_apply = self.method.collect(worker_id, gradient, self.live)
        if to_apply is not None:
            self._apply(to_apply, delay)
        continue_at = version + 1 if self.method.waits else self.snapshot.version
        return self._answer(record, sequence, Receipt(_ACCEPTED, delay, version, continue_at))

    def _refusal(
        self, record: WorkerRecord | None, worker_id: int, sequence: int, gradient_version: int, delay: int
    ) -> str:
        """What is wrong with a push, whatever its gradient; empty if nothing is."""
        if record is None or worker_id not in self.live:
            return f"worker {worker_id} is not a member of this run: join first"
        if sequence <= record.sequence:
            if sequence < 0:
                return f"sequence {sequence} is negative"
            return f"sequence {sequence} comes after {record.sequence}: sequences must increase"
        if delay < 0:
            return f"gradient version {gradient_version} is in the future, the server is at {self.version}"
        if gradient_version < 0:
            return f"gradient version {gradient_version} is negative"
        return self.method.refusal(worker_id)

    def _gradient_fault(self, gradient: torch.Tensor) -> str:
        """What is wrong with a gradient; empty if nothing is."""
        iterate = self.snapshot.iterate
        if gradient.shape != iterate.shape:
            return f"the gradient has shape {tuple(gradient.shape)}, the iterate {tuple(iterate.shape)}"
        if gradient.dtype != iterate.dtype:
            return f"the gradient is {gradient.dtype}, the iterate {iterate.dtype}"
        if gradient.device != iterate.device:
            return f"the gradient is on {gradient.device}, the iterate on {iterate.device}"
        # One cheap pass: a NaN or Inf always spoils the sum. A sum can also overflow, so ask again if it did.
        if not math.isfinite(float(gradient.sum())) and not bool(torch.isfinite(gradient).all()):
            return "the gradient contains NaN or Inf"
        return ""

    def _refuse(self, record: WorkerRecord | None, sequence: int, delay: int, reason: str) -> Receipt:
        self.invalid += 1
        version = self.snapshot.version
        receipt = Receipt(_INVALID, delay, version, version, reason)
        if record is not None:
            record.invalid += 1
            if sequence > record.sequence:
                self._answer(record, sequence, receipt)
        return receipt

    @staticmethod
    def _answer(record: WorkerRecord, sequence: int, receipt: Receipt) -> Receipt:
        record.sequence = sequence
        record.receipt = receipt
        return receipt

    def _apply(self, gradient: torch.Tensor, delay: int) -> None:
        """Version k -> k + 1. The next iterate goes to memory of its own: the current one may be in use."""
        version, iterate = self.snapshot
        method = self.method
        out = self._spare.pop() if self._spare else torch.empty_like(iterate)
        eta = method.eta(version, delay, len(self.live))
        self.update.apply(iterate, self.momentum, gradient, eta=eta, alpha=method.alpha(version), out=out)
        self.snapshot = Snapshot(version + 1, out)

    def state_dict(self) -> dict[str, Any]:
        """Everything a core of the same configuration needs to continue bit for bit."""
        return {
            "version": self.version,
            "iterate": self.snapshot.iterate,
            "momentum": self.momentum.clone(),
            "method": self.method.state_dict(),
            "counters": (self.accepted, self.stale, self.invalid),
            "workers": {
                worker_id: (r.sequence, r.receipt and tuple(r.receipt), r.accepted, r.stale, r.invalid)
                for worker_id, r in self.workers.items()
            },
            "live": sorted(self.live),
            "next_worker_id": self._next_worker_id,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["iterate"].shape != self.snapshot.iterate.shape:
            raise ValueError(
                f"the state holds {state['iterate'].numel()} parameters, this model has {self.update.layout.size}"
            )
        self.snapshot = Snapshot(state["version"], state["iterate"].clone())
        self.momentum = state["momentum"].clone()
        self.method.load_state_dict(state["method"])
        self.accepted, self.stale, self.invalid = state["counters"]
        self.workers = {}
        for worker_id, (sequence, receipt, accepted, stale, invalid) in state["workers"].items():
            record = self.workers[worker_id] = WorkerRecord()
            record.sequence = sequence
            record.receipt = None if receipt is None else Receipt(Verdict(receipt[0]), *receipt[1:])
            record.accepted, record.stale, record.invalid = accepted, stale, invalid
        self.live = set(state["live"])
        self._next_worker_id = state["next_worker_id"]
