"""The server's state and verdicts. This is the only place that decides and updates (Algorithm 1).

The core is a plain object without clock, thread, socket or file. The real server and the simulator drive the same one.
Deciding and computing are separate. `judge` and `count_out` decide, and advance the version. `apply_next` computes the
oldest update that was decided. `push` and `leave` do both at once. Invariants:

- every push gets exactly one verdict, and ``accepted + stale + invalid`` is the number of pushes counted;
- a repeated ``(worker, sequence)`` gets its first answer again and changes nothing, not even a counter;
- a gradient whose delay has reached the threshold is never applied, and no gradient is applied twice;
- an iterate in a snapshot is never written again, unless its holder returns the memory (`recycle`).

Iterate, momentum and sum are on the device of the update. Gradients arrive in host memory.

Callers serialise their calls, with one exception: one thread may be in `apply_next` while others judge. Only
`apply_next` touches iterate, momentum and sum, and only the others touch version, counters and ledger.

Each start of a server is a *term*. A server that starts from a checkpoint continues the history at the version of the
checkpoint, and what an earlier term computed beyond that version is lost. ``begins`` holds the version at which each
term began. So the core knows whether a gradient, which names its term and version, belongs to this history.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ringmaster_dist import quantized
from ringmaster_dist.algorithm.methods import Method, is_stale
from ringmaster_dist.algorithm.rows import RowsBySpeed, weighted
from ringmaster_dist.algorithm.update import Update
from ringmaster_dist.protocol import Receipt, Snapshot, Verdict

# A gradient as it arrives, or a function that computes it. The function is called only if the delay admits the push.
Gradient = torch.Tensor | Callable[[], torch.Tensor]

NOT_FINITE = "the gradient contains NaN or Inf"  # the reason of a refusal
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

    @property
    def pushes(self) -> int:
        return self.accepted + self.stale + self.invalid


class _Decided(NamedTuple):
    """Arithmetic that is left to do: add the gradient, and apply the mean of ``num_averaged`` if that is an update."""

    gradient: torch.Tensor | None  # as it arrived, or None if the departure of a worker completed a round
    num_averaged: int  # 0 if the gradient is only added to the sum
    eta: float
    alpha: float
    weight: float = 1.0  # of the gradient, in the mean
    total_weight: float = 1.0  # of all the gradients that are averaged


@dataclass(frozen=True)
class CoreState:
    """Everything that a core of the same configuration needs to continue bit for bit.

    The terms are not part of it. They are facts about the starts of the server, which an earlier state cannot know.
    """

    iterate: torch.Tensor  # (size,)
    momentum: torch.Tensor  # (size,)
    sum: torch.Tensor | None  # (size,), of the gradients received for the next update
    num_summed: int
    version: int
    method: dict[str, Any]
    counters: list[int]  # accepted, stale, invalid
    workers: list[list[Any]]  # worker, sequence, last receipt, accepted, stale, invalid
    live: list[int]
    next_worker_id: int
    rows: dict[str, Any] | None = None  # the state of `RowsBySpeed`
    summed_weight: float = 0.0  # of the gradients received for the next update


class ServerCore:
    """Iterate, momentum, version and method behind `join`, `leave`, `fetch` and `push`."""

    def __init__(
        self, initial: torch.Tensor, method: Method, update: Update, gradient_dtype: torch.dtype | None = None,
        rows: RowsBySpeed | None = None,
    ) -> None:  # fmt: skip
        """``rows`` assigns the rows of gradients. Without it, gradients of all workers count the same."""
        expected = (update.layout.size,)
        if tuple(initial.shape) != expected or initial.dtype != update.dtype:
            raise ValueError(
                f"the initial iterate is {tuple(initial.shape)} {initial.dtype}, "
                f"the layout needs {expected} {update.dtype}"
            )
        self.method = method
        self.rows = rows
        self.update = update
        self.version = 0  # the number of updates decided; the snapshot may be behind
        self.begins = [0]  # the version at which each term began; the last is the current term's
        self.gradient_dtype = gradient_dtype or update.dtype  # as gradients arrive
        self.gradient_size = quantized.length(update.layout.size, self.gradient_dtype)
        self.snapshot = Snapshot(0, initial.detach().to(update.device, copy=True))
        self.momentum = torch.zeros_like(self.snapshot.iterate)
        self.accepted = 0
        self.stale = 0
        self.invalid = 0
        self.workers: dict[int, WorkerRecord] = {}
        self.live: set[int] = set()
        self.decided: deque[_Decided] = deque()
        self._sum: torch.Tensor | None = None  # of the gradients taken in for the next update
        self._num_summed = 0
        self._summed_weight = 0.0  # of the gradients decided for the next update
        self._next_worker_id = 0
        self._spare: list[torch.Tensor] = []  # recycled memory for the next iterates

    @property
    def term(self) -> int:
        return len(self.begins) - 1

    @property
    def pushes(self) -> int:
        return self.accepted + self.stale + self.invalid

    @property
    def stale_before(self) -> int:
        """Gradients of versions below this can never be accepted any more: work on them may stop."""
        threshold = self.method.threshold(self.version)
        return 0 if threshold > self.version else int(self.version - threshold + 1)

    def rows_of(self, worker_id: int) -> int:
        """The rows that this worker's next gradient takes; 0 if the configuration says it."""
        return 0 if self.rows is None else self.rows.rows_of(worker_id)

    def enter_term(self, begins: Sequence[int]) -> None:
        """Continues in the last of these terms, each given by the version at which it began."""
        assert not self.decided, "a term begins with nothing left to apply"
        self.begins = list(begins)
        self.snapshot = self.snapshot._replace(term=self.term)

    def shared_version(self, term: int, version: int) -> int:
        """The last version up to ``version`` of that term's line of history that this history contains."""
        return min(version, *self.begins[term + 1 :]) if term < self.term else version

    def join(self, worker_id: int | None = None) -> int:
        """Admits a new worker, or readmits an earlier one, whose sequences continue. Returns its id."""
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
        self.count_out(worker_id)
        self.settle()

    def count_out(self, worker_id: int) -> None:
        """Does what `leave` does, and leaves the arithmetic to `apply_next`."""
        if worker_id not in self.live:
            return
        self.live.discard(worker_id)
        completes = self.method.complete_without(self.live)
        if completes:
            self._decide(None, completes, delay=0)

    def fetch(self, known_version: int | None = None) -> Snapshot | None:
        """Returns the newest snapshot, or None if the caller has it."""
        return None if known_version == self.snapshot.version else self.snapshot

    def recycle(self, snapshot: Snapshot) -> None:
        """Returns the memory of an old iterate. The caller promises that no thread reads it any more."""
        assert snapshot.version < self.snapshot.version, "the current iterate is in use"
        self._spare.append(snapshot.iterate)

    def push(
        self, worker_id: int, sequence: int, gradient_version: int, gradient: Gradient, term: int | None = None,
        compute_seconds: float = 0.0, rows: int = 0,
    ) -> Receipt:  # fmt: skip
        """Gives one verdict on one gradient, and computes the update if the method says so."""
        receipt = self.judge(worker_id, sequence, gradient_version, gradient, term, compute_seconds, rows=rows)
        self.settle()
        return receipt

    def settle(self) -> None:
        """Computes everything that was decided."""
        while self.decided:
            self.apply_next()

    def judge(
        self,
        worker_id: int,
        sequence: int,
        gradient_version: int,
        gradient: Gradient,
        term: int | None = None,
        compute_seconds: float = 0.0,
        fault: str | None = None,
        rows: int = 0,
    ) -> Receipt:
        """Gives one verdict on one gradient, and decides an update if the method says so.

        The sequences of a worker increase from push to push. Gaps are allowed, because work may be interrupted.
        ``fault`` is the answer of `gradient_fault`, if the caller has asked already. ``rows`` are those of the
        gradient, in a run that assigns rows.
        """
        record = self.workers.get(worker_id)
        if record is not None and sequence == record.sequence and record.receipt is not None:
            return record.receipt
        version = self.version
        shared = gradient_version if term is None else self.shared_version(term, gradient_version)
        delay = version - shared
        problem = self._refusal(record, worker_id, sequence, gradient_version, delay, term)
        if not problem:
            problem = self._rows_refusal(rows)
        if problem:
            return self._refuse(record, sequence, delay, problem)
        assert record is not None
        if is_stale(delay, self.method.threshold(version)) or shared < gradient_version:
            self._observe(worker_id, compute_seconds, rows, accepted=False)
            self.stale += 1
            record.stale += 1
            return self._answer(record, sequence, Receipt(_STALE, delay, version, version))
        if not isinstance(gradient, torch.Tensor):
            gradient = gradient()
        problem = self.gradient_fault(gradient) if fault is None else fault
        if problem:
            return self._refuse(record, sequence, delay, problem)
        self._observe(worker_id, compute_seconds, rows, accepted=True)
        self.method.inspect(gradient, shared)
        self.accepted += 1
        record.accepted += 1
        weight = 1.0 if self.rows is None else self.rows.weight(rows)
        self._decide(gradient, self.method.admit(worker_id, self.live), delay, weight)
        continue_at = version + 1 if self.method.waits else self.version
        return self._answer(record, sequence, Receipt(_ACCEPTED, delay, version, continue_at))

    def _observe(self, worker_id: int, compute_seconds: float, rows: int, *, accepted: bool) -> None:
        """Tells what may decide by compute times about one."""
        self.method.observe(worker_id, compute_seconds)
        if self.rows is not None:
            version, method = self.version, self.method
            self.rows.observe(
                worker_id, rows, compute_seconds, self.live, version=version, accepted=accepted,
                threshold=math.inf if method.averages else method.threshold(version),
            )  # fmt: skip

    def _refusal(
        self, record: WorkerRecord | None, worker_id: int, sequence: int, gradient_version: int, delay: int,
        term: int | None,
    ) -> str:  # fmt: skip
        """Says what is wrong with a push apart from its gradient. Empty if nothing is."""
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
        if term is not None and not 0 <= term <= self.term:
            return f"term {term} is unknown, the server is in term {self.term}"
        return self.method.refusal(worker_id)

    def _rows_refusal(self, rows: int) -> str:
        if self.rows is not None:
            return self.rows.refusal(rows)
        return f"it says that it has {rows} rows, and this run does not assign rows" if rows else ""

    def gradient_fault(self, gradient: torch.Tensor) -> str:
        """Says what is wrong with a gradient. Empty if nothing is. Any thread may call this."""
        if gradient.shape != (self.gradient_size,):
            return f"the gradient has shape {tuple(gradient.shape)}, not {(self.gradient_size,)}"
        if gradient.dtype != self.gradient_dtype:
            return f"the gradient is {gradient.dtype}, not {self.gradient_dtype}"
        if gradient.requires_grad or gradient.layout is not torch.strided:
            return f"the gradient is not a plain tensor of numbers ({gradient.layout}, {gradient.requires_grad=})"
        if gradient.device.type != "cpu":
            return f"the gradient is on {gradient.device}: gradients have to be in host memory"
        if gradient.dtype == quantized.DTYPE:
            return "" if quantized.is_finite(gradient, self.update.layout.size) else NOT_FINITE
        # The sum is one cheap pass: it is not finite if an element is not. It can also overflow, so look again then.
        if not math.isfinite(float(gradient.sum())) and not bool(torch.isfinite(gradient).all()):
            return NOT_FINITE
        return ""

    def _refuse(self, record: WorkerRecord | None, sequence: int, delay: int, reason: str) -> Receipt:
        self.invalid += 1
        receipt = Receipt(_INVALID, delay, self.version, self.version, reason)
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

    def _decide(self, gradient: torch.Tensor | None, num_averaged: int, delay: int, weight: float = 1.0) -> None:
        """Version k -> k + 1 if the gradient completes an update; the arithmetic is left to `apply_next`."""
        version, method = self.version, self.method
        eta, alpha = method.eta(version, delay, len(self.live)) if num_averaged else 0.0, method.alpha(version)
        self._summed_weight = total = self._summed_weight + (0.0 if gradient is None else weight)
        if num_averaged:
            eta, alpha = weighted(eta, alpha, total / num_averaged)
            self._summed_weight = 0.0
            self.version = version + 1
        self.decided.append(_Decided(gradient, num_averaged, eta, alpha, weight, total))

    def apply_next(
        self,
        out: torch.Tensor | None = None,
        rounded: torch.Tensor | None = None,
        copied: torch.Tensor | None = None,
    ) -> None:
        """Computes the oldest thing decided, on the device of the update.

        ``copied`` is its gradient, (gradient_size,), if the caller has copied it to the device. The next iterate is
        written to ``out``, of shape (size,), or to memory of the core's own: the current iterate may be in use.
        ``rounded`` gets the next iterate too, in the dtype of that tensor. Neither is written if the gradient does not
        complete an update.
        """
        gradient, num_averaged, eta, alpha, weight, total_weight = self.decided[0]
        if gradient is not None:
            gradient = gradient.to(self.update.device) if copied is None else copied
        mean = gradient
        if num_averaged != 1 or self._num_summed or gradient is None:
            if gradient is not None:
                self._take_in(gradient, weight)
            if num_averaged:
                assert self._sum is not None
                assert self._num_summed == num_averaged
                self._num_summed = 0
                mean = self._sum.div_(total_weight)
        if num_averaged:
            assert mean is not None
            version, iterate, term = self.snapshot
            if out is None:
                out = self._spare.pop() if self._spare else torch.empty_like(iterate)
            self.update.apply(iterate, self.momentum, mean, eta=eta, alpha=alpha, out=out, rounded=rounded)
            self.snapshot = Snapshot(version + 1, out, term)
        self.decided.popleft()

    def _take_in(self, gradient: torch.Tensor, weight: float) -> None:
        if self._sum is None:
            self._sum = torch.empty_like(self.momentum)
        for low, high, piece in self.update.pieces(gradient):
            total = self._sum[low:high]
            if self._num_summed:
                total.add_(piece, alpha=weight)
            else:
                total.copy_(piece)
                if weight != 1.0:
                    total.mul_(weight)
        self._num_summed += 1

    def take_over(
        self, version: int, iterate: torch.Tensor, momentum: torch.Tensor, counters: Sequence[int]
    ) -> None:  # fmt: skip
        """Continues from results that other code has computed by the rules of this core, from the current state on.

        ``iterate`` and ``momentum`` are (size,), and belong to the core from now on. ``counters`` are the pushes that
        were accepted, stale and invalid. The counts of each worker are in ``workers``.
        """
        self.version = version
        self.snapshot = Snapshot(version, iterate, self.term)
        self.momentum = momentum
        self.accepted, self.stale, self.invalid = counters

    def state(self) -> CoreState:
        """All tensors are in host memory. They are copies, but for an iterate that is in host memory already: it is
        shared, since a snapshot is never written again."""
        assert not self.decided, "there are decided updates left to apply"
        return CoreState(
            iterate=self.snapshot.iterate.cpu(),
            momentum=self.momentum.to("cpu", copy=True),
            sum=self._sum.to("cpu", copy=True) if self._sum is not None and self._num_summed else None,
            num_summed=self._num_summed,
            version=self.version,
            method=self.method.state_dict(),
            counters=[self.accepted, self.stale, self.invalid],
            workers=[
                [worker_id, r.sequence, _plain(r.receipt), r.accepted, r.stale, r.invalid]
                for worker_id, r in self.workers.items()
            ],
            live=sorted(self.live),
            next_worker_id=self._next_worker_id,
            rows=None if self.rows is None else self.rows.state_dict(),
            summed_weight=self._summed_weight,
        )

    def load(self, state: CoreState) -> None:
        """Continues from a state. Raises ValueError if it is of another model."""
        if state.iterate.shape != self.snapshot.iterate.shape:
            raise ValueError(
                f"the state holds {state.iterate.numel()} parameters, this model has {self.update.layout.size}"
            )
        self.version = state.version
        device = self.update.device
        self.snapshot = Snapshot(self.version, state.iterate.to(device, copy=True), self.term)
        self.momentum = state.momentum.to(device, copy=True)
        self._sum = None if state.sum is None else state.sum.to(device, copy=True)
        self._num_summed = state.num_summed
        self._summed_weight = state.summed_weight or float(state.num_summed)  # older states have no weights
        self.method.load_state_dict(state.method)
        if self.rows is not None and state.rows is not None:
            self.rows.load_state_dict(state.rows)
        self.accepted, self.stale, self.invalid = state.counters
        self.workers = {}
        for worker_id, sequence, receipt, accepted, stale, invalid in state.workers:
            record = self.workers[worker_id] = WorkerRecord()
            record.sequence = sequence
            record.receipt = None if receipt is None else Receipt(Verdict(receipt[0]), *receipt[1:])
            record.accepted, record.stale, record.invalid = accepted, stale, invalid
        self.live = set(state.live)
        self._next_worker_id = state.next_worker_id


def _plain(receipt: Receipt | None) -> list[Any] | None:
    return None if receipt is None else [receipt.verdict.value, *receipt[1:]]
