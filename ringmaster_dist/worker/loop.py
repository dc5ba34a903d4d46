"""The worker's loop. Knows how to reach a server and how to make a problem; decides nothing about gradients.

Survives a lost server: keeps its finished gradient, reconnects with growing pauses, and pushes it under the same
sequence. A worker that was counted out meanwhile, or whose server was restarted, is taken back under its old id; only
where that id has been given to another it joins as a new worker, and the gradient, which belongs to the old one, is
dropped.

Interruption: a long poll, answered from another thread, sets an event that the computation looks at between its steps
and that pacing waits on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from ringmaster_dist import randomness
from ringmaster_dist.errors import Mistake
from ringmaster_dist.problems import Interrupted, Problem
from ringmaster_dist.profiles import jittered_seconds
from ringmaster_dist.protocol import (
    PROTOCOL_VERSION,
    Interruptions,
    JoinRequest,
    Push,
    Reply,
    Snapshot,
    Staleness,
    Welcome,
)
from ringmaster_dist.wire import Ends

log = logging.getLogger(__name__)

_T = TypeVar("_T")

_NEVER_STALE = 2**62
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.1, 2.0
_SAY_SECONDS = 3.0  # a server that is away for longer is spoken of, then each time the wait has doubled


class Connection(Protocol):
    """The transport's client, as the loop sees it."""

    is_proven: bool  # whether to be connected says that it is the server, and not just somebody who listens

    def join(self, request: JoinRequest) -> Welcome: ...

    def fetch(self, session: str, term: int, known_version: int, interruptions: Interruptions) -> Reply: ...

    def push(self, session: str, push: Push) -> Reply: ...

    def await_stale(self, session: str, term: int, version: int, answer: Callable[[Staleness], None]) -> None: ...

    def leave(self, session: str) -> None: ...

    def close(self) -> None: ...


class Refused(Exception):
    """The server does not want this worker; the message says why."""


class Lost(Exception):
    """The server was away for longer than the worker is willing to wait."""


class Failed(Exception):
    """This worker cannot compute gradients; the message says why."""


@dataclass(frozen=True)
class Job:
    """What the run's configuration means for one worker."""

    problem: Problem
    fingerprint: str
    seed: int
    base_seconds: float | None  # per gradient, when pacing
    jitter: float
    interrupt: bool
    wire: Ends


class Worker:
    def __init__(
        self,
        connect: Callable[[], Connection],
        unreachable: type[Exception],
        make_job: Callable[[str, int], Job],
        *,
        token: str,
        slot: int = -1,
        patience_seconds: float,
        explain: Callable[[str, str], str] = lambda mine, servers: f"fingerprint {mine}, the server's {servers}",
    ) -> None:
        self._connect, self._unreachable, self._make_job = connect, unreachable, make_job
        self._token, self._slot, self._patience_seconds = token, slot, patience_seconds
        self._explain = explain
        self._connection: Connection | None = None
        self._interruptions = Interruptions()
        self._working = threading.Event()  # of the computation in progress
        self._sign_of_life = 0.0  # when the server last answered a long poll, or let this worker connect

    def run(self) -> None:
        """Until the run is over. Raises `Refused`, `Lost` or `Failed`."""
        while not self._work():
            log.info("the server does not know this worker any more: joining anew")
        if self._connection is not None:
            self._connection.close()

    def _work(self) -> bool:
        """One membership: True when the run is over, False when the server has forgotten this worker."""
        welcome = self._insist(lambda c: c.join(JoinRequest(PROTOCOL_VERSION, self._token, self._slot)))
        if welcome.ended:
            log.info("the run is over")
            return True
        if not welcome.session:
            raise Refused(welcome.reason)
        slot = self._slot if self._slot >= 0 else welcome.worker_id
        try:
            job = self._make_job(welcome.config, slot)
            if job.fingerprint != welcome.fingerprint:
                raise Refused(self._explain(job.fingerprint, welcome.fingerprint))
        except Exception:
            self._insist(lambda c: c.leave(welcome.session))  # so that nobody waits for it
            raise
        log.info("worker-%d joined", welcome.worker_id)
        self._interruptions = Interruptions()
        return self._compute(job, welcome)

    def _compute(self, job: Job, welcome: Welcome) -> bool:
        session, worker = welcome.session, welcome.worker_id
        assert welcome.snapshot is not None
        snapshot: Snapshot = welcome.snapshot
        key = randomness.worker_key(job.seed, randomness.STREAM_JITTER, worker)
        sequence = 0
        while True:
            began = time.monotonic()
            stop = self._watch(job, session, snapshot)
            computed = self._gradient(job, session, worker, sequence, snapshot, stop)
            if computed is not None and job.base_seconds is not None:
                assigned = jittered_seconds(job.base_seconds, job.jitter, key, sequence)
                stop.wait(max(0.0, began + assigned - time.monotonic()))
            seconds = time.monotonic() - began
            if computed is None or stop.is_set():
                num, total = self._interruptions
                self._interruptions = Interruptions(num + 1, total + seconds)
                reply = self._fetch(session, snapshot)
            else:
                gradient, loss = computed
                packed = job.wire.pack_gradient(gradient)
                push = Push(sequence, snapshot.version, packed, float(loss), seconds, snapshot.term)
                reply = self._push(session, push)
            sequence += 1
            if reply.evicted:
                raise Refused(f"this worker was evicted: {reply.evicted}")
            if reply.unknown:
                return reply.ended
            if reply.ended:
                self._say_goodbye(session)
                return True
            snapshot = reply.snapshot or snapshot

    def _say_goodbye(self, session: str) -> None:
        """After the end, once: a server that has gone needs no farewell."""
        try:
            if self._connection is not None:
                self._connection.leave(session)
        except self._unreachable as error:
            log.info("%s after the end", error)

    def _gradient(
        self, job: Job, session: str, worker: int, sequence: int, snapshot: Snapshot, stop: threading.Event
    ) -> tuple[torch.Tensor, float] | None:
        """None: it was interrupted."""
        try:
            iterate = job.wire.unpack_iterate(snapshot.iterate)
            return job.problem.gradient(iterate, job.seed, worker, sequence, stop.is_set)
        except Interrupted:
            return None
        except Exception as error:
            is_mistake = isinstance(error, Mistake)  # its message says everything
            if not is_mistake:
                log.exception("worker-%d v=%d could not compute a gradient", worker, snapshot.version)
            self._insist(lambda c: c.leave(session))  # so that nobody waits for it
            what = str(error) if is_mistake else f"{type(error).__name__}: {error}"
            raise Failed(f"the gradient at version {snapshot.version} could not be computed: {what}") from error

    def _fetch(self, session: str, known: Snapshot) -> Reply:
        return self._insist(lambda c: c.fetch(session, known.term, known.version, self._interruptions))

    def _push(self, session: str, push: Push) -> Reply:
        return self._insist(lambda connection: connection.push(session, push))

    def _watch(self, job: Job, session: str, snapshot: Snapshot) -> threading.Event:
        """An event that is set when work on the snapshot is worthless. Also keeps the lease while it is done."""
        stop = threading.Event()
        connection = self._connection
        assert connection is not None
        # Not the snapshot itself: the two functions know each other, and what they know lives until such circles are
        # looked for, which is seldom.
        term, own_version = snapshot.term, snapshot.version

        def answered(answer: Staleness) -> None:
            if answer is not Staleness.UNKNOWN:  # which is also said of a broken connection
                self._sign_of_life = time.monotonic()
            if answer is Staleness.ENDED or (answer is Staleness.STALE and job.interrupt):
                stop.set()
            if self._working is stop and answer in (Staleness.AGAIN, Staleness.STALE):
                # It may go on for a while: asking about what is never stale keeps the lease meanwhile.
                ask(own_version if answer is Staleness.AGAIN else _NEVER_STALE)

        def ask(version: int) -> None:
            try:
                connection.await_stale(session, term, version, answered)
            except self._unreachable:
                return  # the push will find out

        self._working = stop
        ask(own_version)
        return stop

    def _insist(self, call: Callable[[Connection], _T]) -> _T:
        """Calls until it succeeds, over new connections where need be.

        Gives up when there was no sign of the server for as long as the patience. A push may well wait for longer than
        that (a round of `synchronous`): the long poll is answered meanwhile, and a new connection is.
        """
        pause, since, say_after = _FIRST_PAUSE_SECONDS, time.monotonic(), _SAY_SECONDS
        while True:
            try:
                if self._connection is None:
                    self._connection = self._connect()
                    if self._connection.is_proven:
                        self._sign_of_life = time.monotonic()
                return call(self._connection)
            except self._unreachable as error:
                if self._connection is not None:
                    self._connection.close()
                    self._connection = None
                away = time.monotonic() - max(since, self._sign_of_life)
                if away > self._patience_seconds:
                    raise Lost(f"{error}, for {self._patience_seconds:g} s") from error
                log.log(
                    logging.WARNING if away > say_after else logging.INFO,
                    "%s, for %.0f s: trying for another %.0f s", error, away, self._patience_seconds - away,
                )  # fmt: skip
                say_after = max(say_after, 2 * away) if away > say_after else say_after
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
