"""The core behind RPC. The service decides which calls are answered, with what, and when.

    workers ── join, fetch, push, await_stale, leave ──► Service ── judge ──► ServerCore
                                                            │
        Life         the phase of the run (gathering, running, ending, over) and its clock
        Admission    which workers may join, and when the run starts
        Members      the workers, their sessions and their part in the history
        Leases       how long each worker may be silent
        Waiting      calls that are not answered yet
        Publisher    computes updates, and holds the snapshot that workers get
        Meter        what serving costs

Four kinds of thread enter. RPC threads make the calls. The main thread measures and ends the run. One thread (`_watch`)
starts the run, ends leases and ends the run by its seconds. One thread (`_compute`) computes the updates that were
decided. All of them hold the lock to decide, and release it to compute: while an update is being computed, pushes are
judged, and rejected ones are answered. Only for a checkpoint are the last decided updates computed under the lock,
since its state must contain all of them. If updates are computed on an accelerator, the publisher has two threads more,
which copy gradients in and snapshots out. `_deciding` sends the answers after it has released the lock.
"""

from __future__ import annotations

import dataclasses
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from ringmaster_dist import devices
from ringmaster_dist.protocol import (
    Interruptions,
    JoinRequest,
    Push,
    Receipt,
    Reply,
    Snapshot,
    Staleness,
    Verdict,
    Welcome,
)
from ringmaster_dist.server.admission import Admission
from ringmaster_dist.server.checkpoints import CheckpointState
from ringmaster_dist.server.core import ServerCore
from ringmaster_dist.server.leases import Leases
from ringmaster_dist.server.life import Life
from ringmaster_dist.server.members import Member, Members
from ringmaster_dist.server.meter import Measurements, Meter, WorkerMeasurements
from ringmaster_dist.server.outlets import Checkpointing, Journal, NoCheckpoints
from ringmaster_dist.server.publisher import DevicePublisher, Publisher
from ringmaster_dist.server.waiting import Waiting
from ringmaster_dist.wire import Wire

log = logging.getLogger(__name__)

_TICK_SECONDS = 0.05


@dataclass(frozen=True)
class Settings:
    """What the server grants to its workers."""

    config_text: str
    fingerprint: str  # of the model's parameters and the data: a worker's must be the same
    token: str
    max_updates: float
    max_seconds: float
    lease_seconds: float
    max_invalid: int  # a worker that sends this many invalid gradients in a row is evicted
    expected_workers: int = 1  # the run starts when they have joined
    start_seconds: float = 0.0  # or this long after the first joined
    wire: Wire = Wire()  # noqa: RUF009  (immutable)
    session_key: str = field(default_factory=secrets.token_hex)  # signs sessions; it never leaves the server


class Service:
    """Implements the transport's `Handlers`."""

    def __init__(
        self,
        core: ServerCore,
        settings: Settings,
        journal: Journal,
        checkpointing: Checkpointing | None = None,
        *,
        state: CheckpointState | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``state`` is that of an earlier term, which the core has loaded."""
        self.core = core
        self.ended = threading.Event()  # nothing changes any more
        self.failure: BaseException | None = None  # the exception that ended a thread, and with it the service
        self._settings, self._journal, self._clock = settings, journal, clock
        self._checkpointing = checkpointing or NoCheckpoints()
        self._lock = threading.Lock()
        self._decided = threading.Condition(self._lock)
        self.meter = Meter()  # counted under the lock
        self._life = Life(clock)
        self._admission = Admission(settings.token, settings.expected_workers, settings.start_seconds, clock)
        self._leases = Leases(settings.lease_seconds, clock)
        self._members = Members(core, settings.session_key, journal.membership, self._life, self._leases)
        self._waiting = Waiting(self.meter)
        self._all_left = threading.Event()
        self._closing = threading.Event()
        if state is not None:
            self._members.restore(state.members, ended=state.ended)
            self._life.resume(state.seconds, ended=state.ended)
        kind = Publisher if devices.is_cpu(core.update.device) else DevicePublisher
        self._publisher = kind(core, settings.wire, self._publish)
        self._threads = [
            threading.Thread(target=self._until_it_fails, args=(work,), name=name, daemon=True)
            for name, work in (("leases", self._watch), ("updates", self._compute), *self._publisher.threads)
        ]

    @property
    def workers(self) -> dict[int, Member]:
        """Every worker that has ever been a member."""
        return self._members.by_worker

    @property
    def seconds(self) -> float:
        """The time from the beginning of the run to now or to its end, over all terms."""
        return self._life.seconds

    @contextmanager
    def _deciding(self) -> Iterator[None]:
        """Holds the lock. The answers are sent after it is released, because sending takes time."""
        with self._lock:
            yield
            answers = self._waiting.take_answers()
        for future, value in answers:
            future.set_result(value)

    def start(self) -> None:
        with self._deciding():
            if self.core.version >= self._settings.max_updates:  # the run was over when the server was lost
                self._end()
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Ends the run. When the last update is computed and saved, all calls are answered and `ended` is set."""
        with self._deciding():
            self._end()

    def wait_until_all_left(self, timeout_seconds: float) -> bool:
        """After the end: whether every live worker has left within this time."""
        return self._all_left.wait(timeout_seconds)

    def close(self) -> None:
        with self._deciding():
            self._closing.set()
            self._decided.notify()
        for thread in self._threads[:2]:
            thread.join()
        self._publisher.close()  # after the thread that computes, which may wait for the publisher's
        for thread in self._threads[2:]:
            thread.join()

    # --- the calls -------------------------------------------------------------------------------------------

    def join(self, request: JoinRequest) -> torch.futures.Future[Welcome]:
        """In a running run the answer comes at once. Before, it comes when every expected worker has joined."""
        future: torch.futures.Future[Welcome] = torch.futures.Future()
        with self._deciding():
            welcome, life = self._admit(request), self._life
            if (welcome.session and not life.has_begun) or (welcome.ended and not life.is_over):
                self._waiting.add_join(future, welcome)
                self._start_if_due()
            else:
                self._waiting.answer(future, welcome)
        return future

    def fetch(self, session: str, term: int, known_version: int, interruptions: Interruptions) -> Reply:
        """Returns the newest snapshot to a worker that has interrupted its work, and takes the total of such work."""
        with self._deciding():
            worker, published = self._caller(session), self._publisher.snapshot
            if worker is None:
                return Reply(None, None, self._life.is_over, unknown=True)
            if not (isinstance(interruptions, Interruptions) and interruptions.is_well_formed()):
                return Reply(None, None, evicted="what it fetched with is not a count of interruptions")
            self.workers[worker].interruptions = interruptions
            rows = self.core.rows_of(worker)
            if (term, known_version) == (published.term, published.version):
                return Reply(None, None, self._life.is_over, rows=rows)
            self.meter.sent(published)
            return Reply(None, published, self._life.is_over, rows=rows)

    def push(self, session: str, push: Push) -> torch.futures.Future[Reply]:
        """The answer is the verdict, and the snapshot to continue from.

        The reply to an accepted push is sent after its update (with `synchronous`, after its round). The reply to a
        rejected push waits only if every snapshot there is would be stale.
        """
        future: torch.futures.Future[Reply] = torch.futures.Future()
        fault = None
        if not (isinstance(push, Push) and push.is_well_formed()):
            future.set_result(Reply(None, None, evicted="what it pushed is not a push"))
            return future
        if push.gradient_version >= self.core.stale_before:  # otherwise it will be rejected, whatever it contains
            fault = self.core.gradient_fault(push.gradient)  # a pass over the gradient, outside the lock
        asked = time.perf_counter()
        with self._deciding():
            self.meter.pushed(time.perf_counter() - asked, push.gradient.nbytes)
            worker = self._caller(session)
            if worker is None or self._life.is_over:
                self._waiting.answer(future, Reply(None, None, self._life.is_over, unknown=worker is None))
            elif self._life.is_ending:
                self._waiting.add_late_push(future)
            elif self._was_answered(worker, push):
                self._waiting.answer(future, Reply(None, self._publisher.snapshot, rows=self.core.rows_of(worker)))
            else:
                self._judge(worker, push, fault, future)
        return future

    def await_stale(self, session: str, term: int, version: int) -> torch.futures.Future[Staleness]:
        """The answer comes when the work on this version is worthless, or after a third of a lease."""
        future: torch.futures.Future[Staleness] = torch.futures.Future()
        with self._deciding():
            worker = self._caller(session) if type(term) is type(version) is int else None
            if self._life.is_over:
                self._waiting.answer(future, Staleness.ENDED)
            elif worker is None:
                self._waiting.answer(future, Staleness.UNKNOWN)
            else:
                self._waiting.add_poll(worker, term, version, future, self._clock())
                self._waiting.answer_poll(worker, self.core, self._publisher.snapshot)
        return future

    def leave(self, session: str) -> None:
        with self._deciding():
            worker = self._caller(session)
            if worker is not None:
                self._remove(worker, "left")
                self._members.forget_session(worker)

    # --- what others read ------------------------------------------------------------------------------------

    def measure(self) -> Measurements:
        """All figures of this moment."""
        with self._lock:
            core, method, version = self.core, self.core.method, self.core.version
            workers = []
            for worker, member in self.workers.items():
                record, interruptions = core.workers[worker], member.interruptions
                workers.append(
                    WorkerMeasurements(
                        worker, member.seat.slot, record.accepted, record.stale, record.invalid, interruptions,
                        member.used_seconds, member.wasted_seconds + interruptions.seconds, member.seat.ranks,
                        core.rows_of(worker), 0 if core.rows is None else core.rows.accepted_rows(worker),
                    )
                )  # fmt: skip
            return Measurements(
                seconds=self.seconds,
                version=version,
                computed_version=core.snapshot.version,
                accepted=core.accepted,
                stale=core.stale,
                invalid=core.invalid,
                num_live=len(core.live),
                threshold=method.threshold(version),
                eta=method.eta(version, 0, len(core.live)),
                alpha=method.alpha(version),
                device_memory_bytes=devices.allocated_bytes(core.update.device),
                meter=dataclasses.replace(self.meter),
                workers=workers,
            )

    @property
    def all_are_invalid(self) -> bool:
        """Whether the newest gradient of every worker was invalid."""
        with self._lock:
            return all(self.workers[worker].invalid_in_a_row for worker in self.core.live)

    def keep_next_update(self) -> None:
        """Releases the update that `measure` has given, and keeps the next one."""
        with self._lock:
            self.meter.keeps_next, self.meter.kept = True, None

    def capture(self) -> CheckpointState:
        """Everything that a later server needs, for a caller that drives this object without its threads."""
        assert not self._threads[1].is_alive(), "another thread is computing"
        with self._lock:
            return self._capture()

    # --- under the lock --------------------------------------------------------------------------------------

    def _caller(self, session: str) -> int | None:
        """Returns the worker of this session, or None if the session is not valid.

        A worker gets its session when the run begins. So a valid session is proof that the run has begun, also for a
        server that was lost before its first checkpoint.
        """
        worker = self._members.caller(session)
        if worker is not None:
            self._life.begin()
        return worker

    def _admit(self, request: JoinRequest) -> Welcome:
        reason = self._admission.refusal(request)
        if reason:
            return Welcome("", reason, False, -1, "", "", None)
        if self._life.is_ending:
            return Welcome("", "the run is over", True, -1, "", "", None)
        worker, session = self._members.admit(request)
        self._admission.note_join()
        self.meter.num_joined += 1
        settings, published = self._settings, self._publisher.snapshot
        self.meter.sent(published)
        rows = self.core.rows_of(worker)
        return Welcome(session, "", False, worker, settings.config_text, settings.fingerprint, published, rows)

    def _start_if_due(self) -> None:
        """Begins the run for all workers at once, when every expected worker has joined or the time is up."""
        if self._life.is_ending or not self._waiting.num_joins:
            return
        if not self._life.has_begun:
            if not self._admission.is_start_due(self._waiting.num_joins):
                return
            self._life.begin()
            self._leases.renew_all()
        self._waiting.answer_joins()

    def _was_answered(self, worker: int, push: Push) -> bool:
        """A worker pushes its next sequence only after the answer. So this push was still on its way, over a connection
        that the worker has given up, and no worker waits for an answer to it."""
        record = self.core.workers.get(worker)
        return record is not None and 0 <= push.sequence < record.sequence

    def _judge(self, worker: int, push: Push, fault: str | None, future: torch.futures.Future[Reply]) -> None:
        core, member = self.core, self.workers[worker]
        version, pushes = core.version, core.pushes
        member.interruptions = max(member.interruptions, push.interruptions)  # a repeated push may be an old one
        receipt = core.judge(
            worker, push.sequence, push.gradient_version, push.gradient, push.term, push.compute_seconds, fault,
            push.rows,
        )  # fmt: skip
        if core.pushes > pushes:  # it is not the repetition of a push that was answered
            if receipt.verdict is Verdict.ACCEPTED:
                self._publisher.accepted(push.gradient)
            self._record(worker, member, version, push, receipt)
        if member.invalid_in_a_row >= self._settings.max_invalid:
            reason = f"{member.invalid_in_a_row} invalid gradients in a row, the last because {receipt.reason}"
            self._waiting.answer(future, Reply(receipt, None, evicted=reason))
            log.warning("worker-%d v=%d is evicted: %s", worker, version, reason)
            self._remove(worker, "was evicted")
            self._members.forget_session(worker)
            return
        self._waiting.add_push(future, receipt, worker)
        self._after_change()

    def _record(self, worker: int, member: Member, version: int, push: Push, receipt: Receipt) -> None:
        self._journal.arrival(self.seconds, worker, push, receipt)
        for change in self.core.method.changes():
            log.info("server v=%d threshold %s: %s", change.version, change.threshold or "none", change.reason)
            self._journal.change(self.seconds, change)
        for new in self.core.rows.changes() if self.core.rows is not None else ():
            log.info("worker-%d v=%d takes %d rows: %s", new.worker, new.version, new.rows, new.reason)
            self._journal.rows(self.seconds, new)
        if receipt.verdict is Verdict.ACCEPTED:
            member.used_seconds += push.compute_seconds
            member.invalid_in_a_row = 0
            return
        member.wasted_seconds += push.compute_seconds
        if receipt.verdict is Verdict.INVALID:
            level = logging.INFO if member.invalid_in_a_row else logging.WARNING  # one warning per series is enough
            log.log(level, "worker-%d v=%d sent an invalid gradient: %s", worker, version, receipt.reason)
            member.invalid_in_a_row += 1

    def _after_change(self) -> None:
        """Answers every call that can be answered, now that a version, a snapshot or the membership may be new."""
        if self.core.version >= self._settings.max_updates:
            self._end()
        if self.core.decided:
            self._decided.notify()
        if not self._life.is_ending:  # otherwise all calls are answered when the last update is computed
            self._waiting.answer_all(self.core, self._publisher.snapshot)

    def _remove(self, worker: int, why: str) -> None:
        self._waiting.ask_to_poll_again(worker)
        if self._members.remove(worker, why):
            self._after_change()
        self._check_all_left()

    def _check_all_left(self) -> None:
        if self._members.all_left:
            self._all_left.set()

    def _end(self) -> None:
        if not self._life.is_ending:
            self._life.end()
            self._decided.notify()

    def _apply_next(self) -> tuple[Snapshot, float]:
        """Computes the oldest thing decided, with or without the lock. Returns the snapshot before, and the seconds."""
        before, began = self.core.snapshot, time.perf_counter()
        self._publisher.compute_next()
        return before, time.perf_counter() - began

    def _capture(self) -> CheckpointState:
        """Computes what was decided first. Pushes wait meanwhile."""
        while self.core.decided:
            before, seconds = self._apply_next()
            self.meter.applied(before, self.core.snapshot, seconds)
        return CheckpointState(
            core=self.core.state(),
            seconds=self.seconds,
            ended=self._life.is_ending,
            members=self._members.state(),
            files=self._journal.mark(),
        )

    def _publish(self, snapshot: Snapshot) -> None:
        with self._deciding():
            self._publisher.snapshot = snapshot
            self._after_change()

    def _try_to_capture(self) -> CheckpointState | None:
        try:
            return self._capture()
        except OSError as error:
            log.warning("server v=%d: no checkpoint: %s", self.core.version, error)
            return None

    # --- the threads -----------------------------------------------------------------------------------------

    def _until_it_fails(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            log.exception("server v=%d: a thread has failed", self.core.version)
            self.failure = error
            self.ended.set()

    def _compute(self) -> None:
        with devices.own_stream(self.core.update.device):
            while not self.ended.is_set():
                with self._lock:
                    while not (self.core.decided or self._life.is_ending or self._closing.is_set()):
                        self._decided.wait()
                    if self._closing.is_set():
                        return
                self.compute()

    def compute(self) -> None:
        """Computes what was decided, writes a checkpoint when it is due, and finishes the run if it is ending."""
        core = self.core
        while core.decided:
            before, seconds = self._apply_next()
            state = None
            with self._lock:
                self.meter.applied(before, core.snapshot, seconds)
                if self._checkpointing.due(core.snapshot.version):
                    state = self._try_to_capture()
            self._publisher.hand_out()
            if state is not None:
                self._checkpointing.submit(state)
        with self._lock:
            if not self._life.is_ending or core.decided or self._life.is_over:
                return
            self._life.stop_clock()
            state = self._try_to_capture()
        if state is not None:
            self._checkpointing.write_last(state)  # a server that is lost before this returns still has its workers
        with self._deciding():
            self._life.announce_end()
            self._waiting.finish()
            self._check_all_left()
            self.ended.set()

    def _watch(self) -> None:
        while not self._closing.wait(_TICK_SECONDS):
            self.tick()

    def tick(self) -> None:
        """Does what the clock makes due: the start, the end, leases, and answers to polls that have waited enough."""
        with self._deciding():
            self._journal.flush()
            self._start_if_due()
            if self.seconds >= self._settings.max_seconds:
                self._end()
            if self._life.has_begun:
                for worker in self._members.overdue():
                    self.meter.lease_losses += 1
                    self._remove(worker, "lost its lease")
                for worker in self.workers:
                    self._waiting.ask_to_poll_again(worker, before=self._leases.poll_again_before)
