"""The worker's loop: take a snapshot, compute a gradient, push it, continue from the snapshot in the reply.

The loop decides nothing about gradients. It survives a lost server: it keeps the finished gradient, reconnects with
growing pauses, and repeats the push with the same sequence. A worker whose lease has expired meanwhile, or whose server
was restarted, gets its old id back. Only if another worker has that id now, it joins as a new worker and drops the
gradient, which belongs to the old id.

The main thread runs the loop. The server answers the long poll. RPC threads receive the answer and interrupt stale
work.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import torch

from ringmaster_dist import devices, randomness
from ringmaster_dist.config.build import explain_difference
from ringmaster_dist.errors import Mistake
from ringmaster_dist.problems import Interrupted, gradient_of
from ringmaster_dist.problems.module import ModuleProblem
from ringmaster_dist.profiles import jittered_seconds
from ringmaster_dist.protocol import (
    PROTOCOL_VERSION,
    Device,
    Interruptions,
    JoinRequest,
    Push,
    Reply,
    Snapshot,
    Staleness,
    Welcome,
)
from ringmaster_dist.transport import Unreachable
from ringmaster_dist.transport.client import Client
from ringmaster_dist.worker.job import Job

log = logging.getLogger(__name__)

_T = TypeVar("_T")

_NEVER_STALE = 2**62  # a version that no threshold makes stale
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.1, 2.0  # between two attempts; each pause doubles the last
_WARN_SECONDS = 3.0  # a warning is logged after this long without the server, then each time the wait has doubled


class Refused(Exception):
    """The server does not want this worker. The message says why."""


class Lost(Exception):
    """The server was away for longer than the worker is willing to wait."""


class Failed(Exception):
    """This worker cannot compute gradients. The message says why."""


class Worker:
    """One worker of a run. ``patience_seconds`` is how long it looks for a server that is away.

    ``ranks`` is the number of processes that compute its gradients.
    """

    def __init__(
        self, connect: Callable[[], Client], make_job: Callable[[str, int], Job], *, token: str, slot: int,
        devices: tuple[Device, ...], ranks: int = 1, patience_seconds: float,
    ) -> None:  # fmt: skip
        self._connect, self._make_job = connect, make_job
        self._token, self._slot, self._devices, self._ranks = token, slot, devices, ranks
        self._patience_seconds = patience_seconds
        self._connection: Client | None = None
        self._interruptions = Interruptions()
        self._first = 0.0  # when this worker began its first gradient, by the monotonic clock; 0 before
        self.poll: _LongPoll | None = None  # that of the newest snapshot
        self.last_sign_of_life = 0.0  # when the server last answered a long poll, or let this worker connect

    def run(self) -> None:
        """Blocks until the run is over. Raises `Refused`, `Lost` or `Failed`."""
        while not self._work():
            log.info("the server does not know this worker any more: joining again")
        if self._connection is not None:
            self._connection.close()

    def _work(self) -> bool:
        """One membership. Returns True when the run is over, False when the server has forgotten this worker."""
        request = JoinRequest(PROTOCOL_VERSION, self._token, self._slot, self._devices, self._ranks)
        welcome = self._insist(lambda c: c.join(request))
        if welcome.ended:
            log.info("the run is over")
            return True
        if not welcome.session:
            raise Refused(welcome.reason)
        slot = self._slot if self._slot >= 0 else welcome.worker_id
        try:
            job = self._make_job(welcome.config, slot)
            if job.fingerprint != welcome.fingerprint:
                raise Refused(explain_difference(job.fingerprint, welcome.fingerprint))
        except Exception:
            self._insist(lambda c: c.leave(welcome.session))  # so that the server does not wait for it
            raise
        if isinstance(job.problem, ModuleProblem):
            job.problem.leaves_on_device = True  # the codec rounds it there, and copies it to host memory
        log.info("worker-%d joined and computes on %s", welcome.worker_id, job.device)
        self._interruptions = Interruptions()
        return self._compute(job, welcome)

    def _compute(self, job: Job, welcome: Welcome) -> bool:
        session, worker = welcome.session, welcome.worker_id
        assert welcome.snapshot is not None
        snapshot: Snapshot = welcome.snapshot
        key = randomness.worker_key(job.seed, randomness.STREAM_JITTER, worker)
        sequence, rows = 0, welcome.rows
        while True:
            began = time.monotonic()
            stop = self._watch(job, session, snapshot)
            computed = self._gradient(job, session, worker, sequence, snapshot, stop, rows)
            self._first = self._first or began
            pace = job.pace(rows, began - self._first)
            if computed is not None and pace is not None:
                assigned = jittered_seconds(pace, job.jitter, key, sequence)
                stop.wait(max(0.0, began + assigned - time.monotonic()))
            seconds = time.monotonic() - began
            if computed is None or stop.is_set():
                num, total = self._interruptions
                self._interruptions = Interruptions(num + 1, total + seconds)
                reply = self._fetch(session, snapshot)
            else:
                gradient, loss = computed
                self._refuse_device_memory(job, session, snapshot, gradient)
                packed = job.wire.encode_gradient(gradient, job.seed, worker, sequence)
                push = Push(sequence, snapshot.version, packed, float(loss), seconds, snapshot.term, rows)
                reply = self._push(session, push)
            sequence += 1
            if reply.evicted:
                raise Refused(f"this worker was evicted: {reply.evicted}")
            if reply.unknown:
                return reply.ended
            if reply.ended:
                self._leave_once(session)
                return True
            snapshot, rows = reply.snapshot or snapshot, reply.rows

    def _leave_once(self, session: str) -> None:
        """After the end of the run, without a retry: the server may have gone."""
        try:
            if self._connection is not None:
                self._connection.leave(session)
        except Unreachable as error:
            log.info("%s after the end", error)

    def _gradient(
        self, job: Job, session: str, worker: int, sequence: int, snapshot: Snapshot, stop: threading.Event, rows: int
    ) -> tuple[torch.Tensor, float] | None:
        """The gradient, of shape (n,), and the loss. None if the work was interrupted. Raises `Failed`."""
        try:
            iterate = job.wire.decode_iterate(snapshot.iterate)
            return gradient_of(job.problem, iterate, job.seed, worker, sequence, stop.is_set, rows)
        except Interrupted:
            return None
        except Exception as error:
            is_mistake = isinstance(error, Mistake)  # whose message is all that the user needs
            if not is_mistake:
                log.exception("worker-%d v=%d could not compute a gradient", worker, snapshot.version)
            self._insist(lambda c: c.leave(session))  # so that the server does not wait for it
            what = str(error) if is_mistake else f"{type(error).__name__}: {error}"
            raise Failed(f"the gradient at version {snapshot.version} could not be computed: {what}") from error

    def _refuse_device_memory(self, job: Job, session: str, snapshot: Snapshot, gradient: torch.Tensor) -> None:
        """Raises `Failed` for a gradient that is not in host memory, although its problem has promised it."""
        if devices.is_cpu(gradient.device) or isinstance(job.problem, ModuleProblem):
            return
        self._insist(lambda c: c.leave(session))
        raise Failed(
            f"the gradient at version {snapshot.version} is on {gradient.device}, and only host memory can be sent: "
            "the problem has to return it there, as gradient.cpu() does"
        )

    def _fetch(self, session: str, known: Snapshot) -> Reply:
        return self._insist(lambda c: c.fetch(session, known.term, known.version, self._interruptions))

    def _push(self, session: str, push: Push) -> Reply:
        return self._insist(lambda c: c.push(session, push))

    def _watch(self, job: Job, session: str, snapshot: Snapshot) -> threading.Event:
        """Opens a long poll about the snapshot. Returns an event that is set when work on the snapshot is worthless."""
        assert self._connection is not None
        self.poll = _LongPoll(self, self._connection, session, snapshot.term, snapshot.version, job.interrupt)
        self.poll.ask(snapshot.version)
        return self.poll.stop

    def _insist(self, call: Callable[[Client], _T]) -> _T:
        """Retries the call until it succeeds, over a new connection after each failure. Raises `Lost`.

        It gives up after ``patience_seconds`` without a sign of life from the server. A push may wait for longer than
        that (a round of `synchronous`). Meanwhile an answered long poll and a new connection are signs of life.
        """
        pause, since, warn_after = _FIRST_PAUSE_SECONDS, time.monotonic(), _WARN_SECONDS
        while True:
            try:
                if self._connection is None:
                    self._connection = self._connect()
                    if self._connection.is_proven:
                        self.last_sign_of_life = time.monotonic()
                return call(self._connection)
            except Unreachable as error:
                if self._connection is not None:
                    self._connection.close()
                    self._connection = None
                away = time.monotonic() - max(since, self.last_sign_of_life)
                if away > self._patience_seconds:
                    raise Lost(f"{error}, for {self._patience_seconds:g} s") from error
                log.log(
                    logging.WARNING if away > warn_after else logging.INFO,
                    "%s, for %.0f s: trying for another %.0f s", error, away, self._patience_seconds - away,
                )  # fmt: skip
                warn_after = max(warn_after, 2 * away) if away > warn_after else warn_after
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


class _LongPoll:
    """Asks the server whether work at one version is stale, until the worker opens its next poll. Keeps the lease.

    The main thread asks first. RPC threads call `_answered`, which may ask again. A poll holds no snapshot, since its
    last answer may come long after the worker has taken the next one.
    """

    def __init__(
        self, worker: Worker, connection: Client, session: str, term: int, version: int, interrupt: bool
    ) -> None:
        self._worker, self._connection, self._interrupt = worker, connection, interrupt
        self._session, self._term, self._version = session, term, version
        self.stop = threading.Event()  # set when the work is worthless

    def ask(self, version: int) -> None:
        """Does not block. A lost connection is ignored here, because the push will find out."""
        try:
            self._connection.await_stale(self._session, self._term, version, self._answered)
        except Unreachable as error:
            log.debug("%s", error)

    def _answered(self, answer: Staleness) -> None:
        if answer is not Staleness.UNKNOWN:  # which a broken connection gives, too
            self._worker.last_sign_of_life = time.monotonic()
        if answer is Staleness.ENDED or (answer is Staleness.STALE and self._interrupt):
            self.stop.set()
        if self._worker.poll is self and answer in (Staleness.AGAIN, Staleness.STALE):
            # The work may continue for a while. A poll about a version that is never stale keeps the lease meanwhile.
            self.ask(self._version if answer is Staleness.AGAIN else _NEVER_STALE)
