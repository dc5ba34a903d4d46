"""The core behind RPC: who may call, who is alive, who waits, and when it is over.

Three kinds of thread enter. RPC threads call `join`, `fetch`, `push`, `await_stale` and `leave`. One thread of this
object's own (`_watch`) expires leases and ends the run by its seconds. Another (`_compute`) does the arithmetic of the
updates that were decided. All hold ``_lock`` to decide, none to compute: while an update is being computed, pushes are
judged, and who is rejected is answered. Futures are completed after the lock is released: that sends a message.

A worker that computes longer than its lease keeps it by its long poll, which is answered AGAIN every third of a lease
and asked anew.
"""

from __future__ import annotations

import hmac
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ringmaster_dist.algorithm.methods import Change
from ringmaster_dist.protocol import (
    PROTOCOL_VERSION,
    Interruptions,
    JoinRequest,
    Push,
    Receipt,
    Reply,
    Staleness,
    Verdict,
    Welcome,
)
from ringmaster_dist.server.core import ServerCore
from ringmaster_dist.server.life import Life
from ringmaster_dist.server.members import Member, Members
from ringmaster_dist.server.meter import Meter
from ringmaster_dist.server.waiting import Answers, Waiting
from ringmaster_dist.wire import Ends, Wire

log = logging.getLogger(__name__)

_TICK_SECONDS = 0.05
_MOST_SLOTS = 1_000_000


class Journal(Protocol):
    """Told of everything that a replay needs, in order, under the lock. Only `mark` may raise."""

    def arrival(self, time: float, worker: int, push: Push, receipt: Receipt) -> None: ...

    def membership(self, worker: int, event: str, pushes: int, slot: int) -> None: ...

    def change(self, time: float, change: Change) -> None: ...

    def flush(self) -> None: ...

    def mark(self) -> dict[str, int]:
        """Where its files end, with everything told so far in them. Raises OSError where that cannot be."""
        ...


@dataclass(frozen=True)
class Settings:
    """What the server grants: how long, how much, to whom."""

    config_text: str
    fingerprint: str  # of the model's parameters and the data: a worker's must be the same
    token: str
    max_updates: float
    max_seconds: float
    lease_seconds: float
    max_invalid: int  # a worker that sends this many invalid gradients in a row is evicted
    expected_workers: int = 1  # the run starts when they are there
    start_seconds: float = 0.0  # or this long after the first
    wire: Wire = Wire()  # noqa: RUF009  (immutable)


class Service:
    """Implements the transport's `Handlers`."""

    def __init__(
        self,
        core: ServerCore,
        settings: Settings,
        journal: Journal,
        *,
        state: Mapping[str, Any] | None = None,
        checkpoint_due: Callable[[int], bool] = lambda version: False,
        save: Callable[[dict[str, Any]], None] = lambda state: None,
        save_last: Callable[[dict[str, Any]], None] = lambda state: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``save`` gets the whole state when ``checkpoint_due`` says so, ``save_last`` at the end, before anybody is
        told of it: a server that is lost in between finds its workers still there. ``state`` is one of an earlier term.
        """
        self.core = core
        self.meter = Meter()
        self.ended = threading.Event()  # nothing changes any more
        self.failure: BaseException | None = None  # what has ended one of its threads, if anything: so it ended too
        self._settings, self._journal, self._clock = settings, journal, clock
        self._checkpoint_due, self._save, self._save_last = checkpoint_due, save, save_last
        self._wire = Ends(settings.wire, core.update.layout.size, core.update.dtype)
        core.allocate, core.allocate_rounded = self._wire.empty, self._wire.empty_rounded
        self._outgoing = self._wire.pack(core.snapshot)  # what is sent to workers
        self._life = Life(clock)
        self._first_join: float | None = None
        self._lock = threading.Lock()
        self._decided = threading.Condition(self._lock)
        self._members = Members(core, settings.token, journal.membership, clock)
        self._waiting = Waiting(self.meter)
        self._all_left = threading.Event()
        self._closing = threading.Event()
        self._threads = [
            threading.Thread(target=self._until_it_fails, args=(self._watch,), name="leases", daemon=True),
            threading.Thread(target=self._until_it_fails, args=(self._compute,), name="updates", daemon=True),
        ]
        if state is not None:
            self._restore(state)

    @property
    def workers(self) -> dict[int, Member]:
        """What is known of each worker that ever was here."""
        return self._members.by_worker

    @property
    def seconds(self) -> float:
        """Since the run began, until its end, over all terms."""
        return self._life.seconds

    @contextmanager
    def _deciding(self) -> Iterator[Answers]:
        """Holds the lock. The answers are sent when it is released, because a message may take time."""
        answers = Answers()
        with self._lock:
            yield answers
        answers.send()

    def start(self) -> None:
        with self._lock:
            if self.core.version >= self._settings.max_updates:  # it was over when the server was lost
                self._end()
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Ends the run. Who waits or calls is told when the last update is computed and saved; then `ended` is set."""
        with self._lock:
            self._end()

    def wait_until_all_left(self, timeout_seconds: float) -> bool:
        """After the end: whether every live worker has heard of it and left."""
        return self._all_left.wait(timeout_seconds)

    def close(self) -> None:
        with self._lock:
            self._closing.set()
            self._decided.notify()
        for thread in self._threads:
            thread.join()

    # --- the state -------------------------------------------------------------------------------------------

    def capture(self) -> dict[str, Any]:
        """Everything a server started later needs, for who drives this object without its threads."""
        assert not self._threads[1].is_alive(), "somebody else is computing"
        with self._lock:
            return self._capture()

    def _capture(self) -> dict[str, Any]:
        """What was decided is computed first, with the pushes held back."""
        self.core.settle()
        service = {
            "seconds": self.seconds,
            "ended": self._life.is_ending,
            "workers": self._members.state(),
        }
        return {**self.core.state_dict(), "service": service, "files": self._journal.mark()}

    def _try_to_capture(self) -> dict[str, Any] | None:
        try:
            state = self._capture()
        except OSError as error:
            log.warning("server v=%d: no checkpoint: %s", self.core.version, error)
            state = None
        self._publish()
        return state

    def _publish(self) -> None:
        if self.core.outgoing.version > self._outgoing.version:
            self._outgoing = self.core.outgoing

    def _restore(self, state: Mapping[str, Any]) -> None:
        service = state["service"]
        self._members.restore(service["workers"], ended=service["ended"])
        self._life.resume(service["seconds"], ended=service["ended"])
        self._outgoing = self._wire.pack(self.core.snapshot)

    # --- the calls -------------------------------------------------------------------------------------------

    def join(self, request: JoinRequest) -> torch.futures.Future[Welcome]:
        """Answered at once in a run that goes on; before, when everybody expected is there (see `_watch`)."""
        future: torch.futures.Future[Welcome] = torch.futures.Future()
        with self._deciding() as answers:
            welcome, life = self._admit(request), self._life
            if (welcome.session and not life.has_begun) or (welcome.ended and not life.is_over):
                self._waiting.add_join(future, welcome)
                self._start_if_due(answers)
            else:
                answers.add(future, welcome)
        return future

    def fetch(self, session: str, term: int, known_version: int, interruptions: Interruptions) -> Reply:
        """The newest snapshot for a worker that has stopped what it did. ``interruptions`` is its total so far."""
        with self._lock:
            worker = self._caller(session)
            if worker is None:
                return Reply(None, None, self._life.is_over, unknown=True)
            if not (isinstance(interruptions, Interruptions) and interruptions.is_well_formed()):
                return Reply(None, None, evicted="what it fetched with is not a count of interruptions")
            self.workers[worker].interruptions = interruptions
            known = (term, known_version) == (self._outgoing.term, self._outgoing.version)
            if not known:
                self.meter.sent(self._outgoing)
            return Reply(None, None if known else self._outgoing, self._life.is_over)

    def push(self, session: str, push: Push) -> torch.futures.Future[Reply]:
        """Answered with the verdict and the snapshot to go on from.

        Who was accepted waits for its update (with `synchronous`: its round); who was rejected waits only if every
        snapshot there is would be stale.
        """
        future: torch.futures.Future[Reply] = torch.futures.Future()
        fault = None
        if not (isinstance(push, Push) and push.is_well_formed()):
            future.set_result(Reply(None, None, evicted="what it pushed is not a push"))
            return future
        if push.gradient_version >= self.core.stale_before:  # else it will be rejected anyway
            fault = self.core.gradient_fault(push.gradient)  # a pass over the gradient, outside the lock
        asked = time.perf_counter()
        with self._deciding() as answers:
            self.meter.pushed(time.perf_counter() - asked, push.gradient.nbytes)
            worker = self._caller(session)
            if worker is None or self._life.is_over:
                answers.add(future, Reply(None, None, self._life.is_over, unknown=worker is None))
            elif self._life.is_ending:
                self._waiting.add_late(future)
            elif self._came_late(worker, push):
                answers.add(future, Reply(None, self._outgoing))
            else:
                self._judge(worker, push, fault, future, answers)
        return future

    def await_stale(self, session: str, term: int, version: int) -> torch.futures.Future[Staleness]:
        future: torch.futures.Future[Staleness] = torch.futures.Future()
        with self._deciding() as answers:
            worker = self._caller(session) if type(term) is type(version) is int else None
            if self._life.is_over:
                answers.add(future, Staleness.ENDED)
            elif worker is None:
                answers.add(future, Staleness.UNKNOWN)
            else:
                self._waiting.add_poll(worker, term, version, future, self._clock(), answers)
                self._waiting.answer_poll(worker, self.core, self._outgoing, answers)
        return future

    def leave(self, session: str) -> None:
        with self._deciding() as answers:
            worker = self._caller(session)
            if worker is not None:
                self._remove(worker, "left", answers)
                self._members.forget_session(worker)

    # --- under the lock --------------------------------------------------------------------------------------

    def _caller(self, session: str) -> int | None:
        """The worker of this session; None for a session that is not valid.

        A worker gets its session when the run begins. So a valid session is proof that the run has begun, also for a
        server that was lost before its first checkpoint.
        """
        worker = self._members.caller(session)
        if worker is not None:
            self._life.begin()
        return worker

    def _admit(self, request: JoinRequest) -> Welcome:
        if not (isinstance(request, JoinRequest) and request.is_well_formed()):
            return _refused("what it joined with is not a request to join")
        if request.protocol_version != PROTOCOL_VERSION:
            return _refused(f"the worker speaks protocol {request.protocol_version}, the server {PROTOCOL_VERSION}")
        if not hmac.compare_digest(request.token.encode(), self._settings.token.encode()):
            log.warning("a join with a wrong token was refused")
            return _refused("the token is not that of this run")
        if self._life.is_ending:
            return Welcome("", "the run is over", True, -1, "", "", None)
        if not -1 <= request.slot < _MOST_SLOTS:
            return _refused(f"slot {request.slot} is not a place of a delay profile: 0 to {_MOST_SLOTS - 1}")
        worker, session = self._members.admit(request.slot)
        if self._first_join is None:
            self._first_join = self._clock()
        self.meter.num_joined += 1
        self.meter.sent(self._outgoing)
        settings = self._settings
        return Welcome(session, "", False, worker, settings.config_text, settings.fingerprint, self._outgoing)

    def _start_if_due(self, answers: Answers) -> None:
        """Begins the run for all workers at once, when every expected worker has joined or the time is up."""
        if self._life.is_ending or not self._waiting.num_joins:
            return
        if not self._life.has_begun:
            now, settings = self._clock(), self._settings
            waited = now - (self._first_join or now)
            if self._waiting.num_joins < settings.expected_workers and waited < settings.start_seconds:
                return
            self._life.begin()
            self._members.renew_all(now)
        self._waiting.answer_joins(answers)

    def _came_late(self, worker: int, push: Push) -> bool:
        """Whether it has been answered before: a worker goes on to its next sequence only then. This one was under way
        on a connection that the worker has given up, and nobody waits for its answer."""
        record = self.core.workers.get(worker)
        return record is not None and 0 <= push.sequence < record.sequence

    def _judge(
        self, worker: int, push: Push, fault: str | None, future: torch.futures.Future[Reply], answers: Answers
    ) -> None:
        core, member = self.core, self.workers[worker]
        version, pushes = core.version, core.pushes
        receipt = core.judge(
            worker, push.sequence, push.gradient_version, push.gradient, push.term, push.compute_seconds, fault
        )
        if core.pushes > pushes:  # not the repetition of an answered one
            self._journal.arrival(self.seconds, worker, push, receipt)
            for change in core.method.changes():
                log.info("server v=%d threshold %d: %s", change.version, change.threshold, change.reason)
                self._journal.change(self.seconds, change)
            if receipt.verdict is Verdict.ACCEPTED:
                member.used_seconds += push.compute_seconds
            else:
                member.wasted_seconds += push.compute_seconds
            if receipt.verdict is Verdict.INVALID:
                level = logging.INFO if member.invalid_in_a_row else logging.WARNING  # the first of a row is enough
                log.log(level, "worker-%d v=%d sent an invalid gradient: %s", worker, version, receipt.reason)
                member.invalid_in_a_row += 1
            elif receipt.verdict is Verdict.ACCEPTED:  # a stale one was not looked at
                member.invalid_in_a_row = 0
        if member.invalid_in_a_row >= self._settings.max_invalid:
            reason = f"{member.invalid_in_a_row} invalid gradients in a row, the last because {receipt.reason}"
            answers.add(future, Reply(receipt, None, evicted=reason))
            log.warning("worker-%d v=%d is evicted: %s", worker, version, reason)
            self._remove(worker, "was evicted", answers)
            self._members.forget_session(worker)
            return
        self._waiting.add_push(future, receipt)
        self._after_change(answers)

    def _after_change(self, answers: Answers) -> None:
        """Answers whoever can be answered now that a version, a snapshot or the membership may be new."""
        if self.core.version >= self._settings.max_updates:
            self._end()
        if self.core.decided:
            self._decided.notify()
        if not self._life.is_ending:  # else everybody is answered when the last update is computed
            self._waiting.answer(self.core, self._outgoing, answers)

    def _remove(self, worker: int, why: str, answers: Answers) -> None:
        self._waiting.put_off(worker, answers)
        if self._members.remove(worker, why):
            self._after_change(answers)
        self._check_all_left()

    def _check_all_left(self) -> None:
        if self._members.all_left:
            self._all_left.set()

    def _end(self) -> None:
        if not self._life.is_ending:
            self._life.end()
            self._members.closed = True
            self._decided.notify()

    # --- the threads -----------------------------------------------------------------------------------------

    def _until_it_fails(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            log.exception("server v=%d: a thread has failed", self.core.version)
            self.failure = error
            self.ended.set()

    def _compute(self) -> None:
        while not self.ended.is_set():
            with self._lock:
                while not (self.core.decided or self._life.is_ending or self._closing.is_set()):
                    self._decided.wait()
                if self._closing.is_set():
                    return
            self.compute()

    def compute(self) -> None:
        """Computes what was decided, checkpoints when it is time, and finishes the run when it is ending."""
        core = self.core
        while core.decided:
            before, began = core.snapshot, time.perf_counter()
            core.apply_next()
            self.meter.applied(before, core.snapshot, time.perf_counter() - began)
            state = None
            with self._deciding() as answers:
                self._publish()
                if self._checkpoint_due(core.snapshot.version):
                    state = self._try_to_capture()
                self._after_change(answers)
            if state is not None:
                self._save(state)
        with self._lock:
            if not self._life.is_ending or core.decided or self._life.is_over:
                return
            self._life.stop_clock()
            state = self._try_to_capture()
        if state is not None:
            self._save_last(state)
        with self._deciding() as answers:
            self._life.tell()
            self._waiting.finish(answers)
            self._check_all_left()
            self.ended.set()

    def _watch(self) -> None:
        while not self._closing.wait(_TICK_SECONDS):
            self.tick()

    def tick(self) -> None:
        """What is due by the clock: the start, the end, leases, and polls that have been kept long enough."""
        with self._deciding() as answers:
            now, lease_seconds = self._clock(), self._settings.lease_seconds
            self._journal.flush()
            self._start_if_due(answers)
            if self.seconds >= self._settings.max_seconds:
                self._end()
            if self._life.has_begun:
                for worker in self._members.overdue(now - lease_seconds):
                    self.meter.lease_losses += 1
                    self._remove(worker, "lost its lease", answers)
                for worker in self.workers:
                    self._waiting.put_off(worker, answers, before=now - lease_seconds / 3)


def _refused(reason: str) -> Welcome:
    return Welcome("", reason, False, -1, "", "", None)
