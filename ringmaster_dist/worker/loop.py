"""The worker's loop. Knows how to reach a server and how to make a problem; decides nothing about gradients.

Survives a lost server: keeps its finished gradient, reconnects with growing pauses, and pushes it under the same
sequence. A worker that was counted out meanwhile is taken back under its old id by a server that still knows its
session; by one that does not it joins as a new worker, and the gradient, which belongs to the old one, is dropped.

Interruption: a long poll, answered from another thread, sets an event that pacing waits on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from ringmaster_dist import randomness
from ringmaster_dist.problems import Problem
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

log = logging.getLogger(__name__)

_T = TypeVar("_T")

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.1, 2.0


class Connection(Protocol):
    """The transport's client, as the loop sees it."""

    def join(self, request: JoinRequest) -> Welcome: ...

    def fetch(self, session: str, known_version: int, interruptions: Interruptions) -> Reply: ...

    def push(self, session: str, push: Push) -> Reply: ...

    def await_stale(self, session: str, gradient_version: int, answer: Callable[[Staleness], None]) -> None: ...

    def leave(self, session: str) -> None: ...

    def close(self) -> None: ...


class Refused(Exception):
    """The server does not want this worker; the message says why."""


class Lost(Exception):
    """The server was away for longer than the worker is willing to wait."""


@dataclass(frozen=True)
class Job:
    """What the run's configuration means for one worker."""

    problem: Problem
    layout_fingerprint: str
    seed: int
    base_seconds: float | None  # per gradient, when pacing
    jitter: float
    interrupt: bool


class Worker:
    def __init__(
        self,
        connect: Callable[[], Connection],
        unreachable: type[Exception],
        make_job: Callable[[str, int], Job],
        *,
        token: str,
        slot: int = -1,
        patience_seconds: float = 60.0,
    ) -> None:
        self._connect, self._unreachable, self._make_job = connect, unreachable, make_job
        self._token, self._slot, self._patience_seconds = token, slot, patience_seconds
        self._connection: Connection | None = None
        self._interruptions = Interruptions()
        self._working = threading.Event()  # of the computation in progress

    def run(self) -> None:
        """Until the run is over. Raises `Refused` or `Lost`."""
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
        job = self._make_job(welcome.config, slot)
        if job.layout_fingerprint != welcome.layout_fingerprint:
            raise Refused("this worker's model is laid out differently from the server's")
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
            stop = self._watch(job, session, snapshot.version)
            gradient, loss = job.problem.gradient(snapshot.iterate, job.seed, worker, sequence)
            if job.base_seconds is not None:
                assigned = jittered_seconds(job.base_seconds, job.jitter, key, sequence)
                stop.wait(max(0.0, began + assigned - time.monotonic()))
            seconds = time.monotonic() - began
            if stop.is_set():
                num, total = self._interruptions
                self._interruptions = Interruptions(num + 1, total + seconds)
                reply = self._fetch(session, snapshot.version)
            else:
                push = Push(sequence, snapshot.version, gradient, loss, seconds)
                reply = self._push(session, push)
            sequence += 1
            if reply.unknown:
                return reply.ended
            if reply.ended:
                self._insist(lambda c: c.leave(session))
                return True
            snapshot = reply.snapshot or snapshot

    def _fetch(self, session: str, known_version: int) -> Reply:
        return self._insist(lambda connection: connection.fetch(session, known_version, self._interruptions))

    def _push(self, session: str, push: Push) -> Reply:
        return self._insist(lambda connection: connection.push(session, push))

    def _watch(self, job: Job, session: str, version: int) -> threading.Event:
        """An event that is set when work on the version is worthless. Also keeps the lease while it is done."""
        stop = threading.Event()
        connection = self._connection
        assert connection is not None

        def answered(answer: Staleness) -> None:
            if answer is Staleness.ENDED or (answer is Staleness.STALE and job.interrupt):
                stop.set()
            elif answer is Staleness.AGAIN and self._working is stop:
                ask()

        def ask() -> None:
            try:
                connection.await_stale(session, version, answered)
            except self._unreachable:
                return  # the push will find out

        self._working = stop
        ask()
        return stop

    def _insist(self, call: Callable[[Connection], _T]) -> _T:
        """Calls until it succeeds, over new connections where need be; gives up after the patience."""
        pause, since = _FIRST_PAUSE_SECONDS, time.monotonic()
        while True:
            try:
                if self._connection is None:
                    self._connection = self._connect()
                return call(self._connection)
            except self._unreachable as error:
                if self._connection is not None:
                    self._connection.close()
                    self._connection = None
                if time.monotonic() - since > self._patience_seconds:
                    raise Lost(f"{error}, for {self._patience_seconds:g} s") from error
                log.info("%s: trying again in %.1f s", error, pause)
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
