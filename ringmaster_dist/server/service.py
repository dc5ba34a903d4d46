"""The core behind RPC: who may call, who is alive, who waits, and when it is over.

RPC threads enter `join`, `fetch`, `push`, `await_stale` and `leave`; one thread of this object's own (`start`)
expires leases and ends the run by its seconds. All of them hold ``_lock`` while they touch the core. Futures are
completed after it is released: completing one sends a message.

A lease is kept by any call. A worker that computes longer than its lease keeps it by its long poll, which is
answered AGAIN every third of a lease and asked anew.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

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

log = logging.getLogger(__name__)

_TICK_SECONDS = 0.05


class Journal(Protocol):
    """Told of everything that a replay needs, in order, under the lock."""

    def arrival(self, time: float, worker: int, push: Push, receipt: Receipt) -> None: ...

    def membership(self, worker: int, event: str, pushes: int) -> None: ...


@dataclass
class WorkerStatus:
    """What the service knows of a worker beyond the core's ledger."""

    session: str
    slot: int
    last_seen: float
    interruptions: Interruptions = Interruptions()  # noqa: RUF009  (immutable)
    used_seconds: float = 0.0
    wasted_seconds: float = 0.0
    poll: tuple[int, torch.futures.Future[Staleness], float] | None = None  # version, whom to tell, since when


@dataclass
class _Waiting:
    """A push whose answer has to wait for the round to end."""

    receipt: Receipt
    future: torch.futures.Future[Reply]


@dataclass
class _Answers:
    """Futures to complete once the lock is released."""

    pending: list[tuple[torch.futures.Future[Any], Any]] = field(default_factory=list)

    def add(self, future: torch.futures.Future[Any], value: Any) -> None:
        self.pending.append((future, value))

    def send(self) -> None:
        for future, value in self.pending:
            future.set_result(value)


class Service:
    """Implements the transport's `Handlers`."""

    def __init__(
        self,
        core: ServerCore,
        *,
        config_text: str,
        token: str,
        lease_seconds: float,
        journal: Journal,
        max_updates: float,
        max_seconds: float,
        expected_workers: int = 1,
        start_seconds: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.core = core
        self.workers: dict[int, WorkerStatus] = {}
        self.ended = threading.Event()
        self._config_text, self._token = config_text, token
        self._lease_seconds = lease_seconds
        self._journal = journal
        self._max_updates, self._max_seconds = max_updates, max_seconds
        self._clock = clock
        self._expected_workers, self._start_seconds = expected_workers, start_seconds
        self._first_join: float | None = None
        self._joining: list[tuple[torch.futures.Future[Welcome], Welcome]] = []  # who waits for the run to start
        self._began: float | None = None  # when it started
        self._ended_at: float | None = None
        self._lock = threading.Lock()
        self._sessions: dict[str, int] = {}
        self._waiting: list[_Waiting] = []
        self._all_left = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="leases", daemon=True)

    @property
    def seconds(self) -> float:
        """Since the workers were let go, until the end."""
        if self._began is None:
            return 0.0
        return (self._ended_at if self._ended_at is not None else self._clock()) - self._began

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        """Ends the run: whoever waits or calls is told."""
        answers = _Answers()
        with self._lock:
            self._end(answers)
        answers.send()

    def wait_until_all_left(self, timeout_seconds: float) -> bool:
        """After the end: whether every live worker has heard of it and left."""
        return self._all_left.wait(timeout_seconds)

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    # --- the calls -------------------------------------------------------------------------------------------

    def join(self, request: JoinRequest) -> torch.futures.Future[Welcome]:
        """Answered at once in a run that goes on; before, when everybody expected is there (see `_watch`)."""
        future: torch.futures.Future[Welcome] = torch.futures.Future()
        answers = _Answers()
        with self._lock:
            answers.add(future, self._admit(request))
            welcome = answers.pending[0][1]
            if welcome.session and not self._started:
                self._joining.append((future, welcome))
                answers.pending.clear()
                self._start_if_due(answers)
        answers.send()
        return future

    def _admit(self, request: JoinRequest) -> Welcome:
        if request.protocol_version != PROTOCOL_VERSION:
            return _refused(f"the worker speaks protocol {request.protocol_version}, the server {PROTOCOL_VERSION}")
        if not hmac.compare_digest(request.token.encode(), self._token.encode()):
            log.warning("a join with a wrong token was refused")
            return _refused("the token is not that of this run")
        if self.ended.is_set():
            return Welcome("", "the run is over", True, -1, "", "", None)
        worker = self.core.join()
        self._journal.membership(worker, "join", self.core.pushes)
        session = secrets.token_hex(16)
        self._sessions[session] = worker
        slot = request.slot if request.slot >= 0 else worker
        self.workers[worker] = WorkerStatus(session, slot, self._clock())
        if self._first_join is None:
            self._first_join = self._clock()
        log.info("worker-%d v=%d joined", worker, self.core.version)
        fingerprint = self.core.update.layout.fingerprint
        return Welcome(session, "", False, worker, self._config_text, fingerprint, self.core.snapshot)

    def _start_if_due(self, answers: _Answers) -> None:
        """Starts the run's clock, and everybody at once, when all who are expected have joined or time is up."""
        if self._started or self._first_join is None:
            return
        now = self._clock()
        if len(self._joining) < self._expected_workers and now - self._first_join < self._start_seconds:
            return
        self._began = now
        for future, welcome in self._joining:
            answers.add(future, welcome)
        self._joining.clear()
        for status in self.workers.values():
            status.last_seen = now

    @property
    def _started(self) -> bool:
        return self._began is not None

    def fetch(self, session: str, known_version: int, interruptions: Interruptions) -> Reply:
        """The newest snapshot for a worker that has stopped what it did. ``interruptions`` is its total so far."""
        with self._lock:
            worker = self._seen(session)
            if worker is None:
                return Reply(None, None, self.ended.is_set(), unknown=True)
            self.workers[worker].interruptions = interruptions
            return Reply(None, self.core.fetch(known_version), self.ended.is_set())

    def push(self, session: str, push: Push) -> torch.futures.Future[Reply]:
        future: torch.futures.Future[Reply] = torch.futures.Future()
        answers = _Answers()
        with self._lock:
            worker = self._seen(session)
            if worker is None or self.ended.is_set():
                answers.add(future, Reply(None, None, self.ended.is_set(), unknown=worker is None))
            else:
                self._push(worker, push, future, answers)
        answers.send()
        return future

    def await_stale(self, session: str, gradient_version: int) -> torch.futures.Future[Staleness]:
        future: torch.futures.Future[Staleness] = torch.futures.Future()
        answers = _Answers()
        with self._lock:
            worker = self._seen(session)
            if self.ended.is_set():
                answers.add(future, Staleness.ENDED)
            elif worker is None:
                answers.add(future, Staleness.UNKNOWN)
            elif gradient_version < self.core.stale_before:
                answers.add(future, Staleness.STALE)
            else:
                status = self.workers[worker]
                if status.poll is not None:  # it asks about newer work: the older question is moot
                    answers.add(status.poll[1], Staleness.AGAIN)
                status.poll = (gradient_version, future, self._clock())
        answers.send()
        return future

    def leave(self, session: str) -> None:
        answers = _Answers()
        with self._lock:
            worker = self._sessions.get(session)
            if worker is not None:
                self._remove(worker, "leave", answers)
                del self._sessions[session]
        answers.send()

    # --- under the lock --------------------------------------------------------------------------------------

    def _seen(self, session: str) -> int | None:
        """Whose session it is. Renews the lease, also one that has run out: the worker is back."""
        worker = self._sessions.get(session)
        if worker is None:
            return None
        self.workers[worker].last_seen = self._clock()
        if worker not in self.core.live and not self.ended.is_set():
            self.core.join(worker)
            self._journal.membership(worker, "join", self.core.pushes)
            log.info("worker-%d v=%d is back", worker, self.core.version)
        return worker

    def _push(self, worker: int, push: Push, future: torch.futures.Future[Reply], answers: _Answers) -> None:
        core, status = self.core, self.workers[worker]
        version, pushes = core.version, core.pushes
        receipt = core.push(worker, push.sequence, push.gradient_version, push.gradient)
        if core.pushes > pushes:  # not the repetition of an answered one
            self._journal.arrival(self.seconds, worker, push, receipt)
            if receipt.verdict is Verdict.ACCEPTED:
                status.used_seconds += push.compute_seconds
            else:
                status.wasted_seconds += push.compute_seconds
            if receipt.verdict is Verdict.INVALID:
                log.warning("worker-%d v=%d sent an invalid gradient: %s", worker, version, receipt.reason)
        self._waiting.append(_Waiting(receipt, future))
        self._after_change(answers)

    def _after_change(self, answers: _Answers) -> None:
        """Answers whoever can be answered now that the version or the membership may have changed."""
        core = self.core
        if core.version >= self._max_updates:
            self._end(answers)
            return
        still = []
        for waiting in self._waiting:
            if waiting.receipt.continue_at <= core.version:
                answers.add(waiting.future, Reply(waiting.receipt, core.snapshot))
            else:
                still.append(waiting)
        self._waiting = still
        stale_before = core.stale_before
        for status in self.workers.values():
            if status.poll is not None and status.poll[0] < stale_before:
                answers.add(status.poll[1], Staleness.STALE)
                status.poll = None

    def _remove(self, worker: int, event: str, answers: _Answers) -> None:
        status = self.workers[worker]
        if status.poll is not None:
            answers.add(status.poll[1], Staleness.AGAIN)
            status.poll = None
        if worker in self.core.live:
            if not self.ended.is_set():  # after the end nothing changes any more
                self._journal.membership(worker, "leave", self.core.pushes)
                log.info("worker-%d v=%d %s", worker, self.core.version, event)
                self.core.leave(worker)
                self._after_change(answers)
            else:
                self.core.live.discard(worker)
        if self.ended.is_set() and not self.core.live:
            self._all_left.set()

    def _end(self, answers: _Answers) -> None:
        if self.ended.is_set():
            return
        self._ended_at = self._clock()
        self.ended.set()
        for joining, welcome in self._joining:
            answers.add(joining, welcome)  # its first call will tell it
        self._joining.clear()
        for waiting in self._waiting:
            answers.add(waiting.future, Reply(waiting.receipt, None, ended=True))
        self._waiting = []
        for status in self.workers.values():
            if status.poll is not None:
                answers.add(status.poll[1], Staleness.ENDED)
                status.poll = None
        if not self.core.live:
            self._all_left.set()

    # --- the thread ------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._closing.wait(_TICK_SECONDS):
            self.tick()

    def tick(self) -> None:
        """What is due by the clock: the start, the end, leases, and polls that have been kept long enough."""
        answers = _Answers()
        with self._lock:
            now = self._clock()
            self._start_if_due(answers)
            if self.seconds >= self._max_seconds:
                self._end(answers)
            for worker, status in self.workers.items() if self._started else ():
                if worker in self.core.live and now - status.last_seen > self._lease_seconds:
                    self._remove(worker, "lost its lease", answers)
                elif status.poll is not None and now - status.poll[2] > self._lease_seconds / 3:
                    answers.add(status.poll[1], Staleness.AGAIN)
                    status.poll = None
        answers.send()


def _refused(reason: str) -> Welcome:
    return Welcome("", reason, False, -1, "", "", None)
