"""The worker's loop: take a snapshot, compute a gradient, push it, continue from the snapshot in the reply.

The loop decides nothing about gradients. It survives a lost server: it keeps the finished gradient, reconnects with
growing pauses, and repeats the push with the same sequence (`link`). A worker whose lease has expired meanwhile, or
whose server was restarted, gets its old id back. Only if another worker has that id now, it joins as a new worker and
drops the gradient, which belongs to the old id.

With overlap the next gradient is computed at the newest snapshot there is, while the push is under way. A finished
gradient is pushed after the reply to the one before. So at most one push is under way, and a worker has at most one
snapshot apart from that of its work. Each gradient has a sequence of its own, so two gradients at one snapshot differ.

The main thread runs the loop.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable

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
    Welcome,
    as_word,
)
from ringmaster_dist.transport.client import Client
from ringmaster_dist.worker.job import Job
from ringmaster_dist.worker.link import Exchange, Link
from ringmaster_dist.worker.talk import Talk

log = logging.getLogger(__name__)


class Refused(Exception):
    """The server does not want this worker. The message says why."""


class Failed(Exception):
    """This worker cannot compute gradients. The message says why."""


class Worker:
    """One worker of a run. ``patience_seconds`` is how long it looks for a server that is away.

    ``ranks`` is the number of processes that compute its gradients.
    """

    def __init__(
        self, connect: Callable[[], Client], make_job: Callable[[str, int], Job], *, token: str, slot: int,
        devices: tuple[Device, ...], ranks: int = 1, patience_seconds: float, talk: Talk | None = None,
    ) -> None:  # fmt: skip
        self._make_job, self._talk = make_job, talk or Talk()
        self._token, self._slot, self._devices, self._ranks = token, slot, devices, ranks
        self._link = Link(connect, patience_seconds)
        self._began: float | None = None  # when the first membership began to compute, by the monotonic clock

    def run(self) -> None:
        """Blocks until the run is over. Raises `Refused`, `Lost` or `Failed`."""
        while not self._work():
            log.info("the server does not know this worker any more: joining again")
        self._link.close()

    def _work(self) -> bool:
        """One membership. Returns True when the run is over, False when the server has forgotten this worker."""
        host = as_word(socket.gethostname())
        request = JoinRequest(PROTOCOL_VERSION, self._token, self._slot, self._devices, self._ranks, host)
        welcome = self._link.insist(lambda c: c.join(request))
        if welcome.ended:
            self._talk.is_over()
            return True
        if not welcome.session:
            raise Refused(welcome.reason)
        try:
            is_over = self._take_part(welcome)
        except KeyboardInterrupt:
            self._link.try_once(lambda c: c.leave(welcome.session))  # otherwise the server waits for the lease
            raise
        self._link.stop_watching()
        if is_over:
            self._talk.is_over()
        return is_over

    def _take_part(self, welcome: Welcome) -> bool:
        """Builds the problem and computes, until the membership ends. Returns whether the run is over."""
        slot = self._slot if self._slot >= 0 else welcome.worker_id
        try:
            job = self._make_job(welcome.config, slot)
            if job.fingerprint != welcome.fingerprint:
                raise Refused(explain_difference(job.fingerprint, welcome.fingerprint))
        except Exception:
            self._link.insist(lambda c: c.leave(welcome.session))  # so that the server does not wait for it
            raise
        if isinstance(job.problem, ModuleProblem):
            job.problem.leaves_on_device = True  # the codec rounds it there, and copies it to host memory
        log.info("worker-%d joined and computes on %s", welcome.worker_id, job.device)
        self._talk.joined(welcome.worker_id, job.device)
        self._began = self._began or time.monotonic()
        return _Membership(self._link, job, welcome, self._began, self._talk).compute()


class _Membership:
    """The work of one worker from its join on.

    The phases of a paced worker count from ``began``, the time of its first membership by the monotonic clock.
    """

    def __init__(self, link: Link, job: Job, welcome: Welcome, began: float, talk: Talk) -> None:
        self._link, self._job, self._began, self._talk = link, job, began, talk
        self._session, self._worker, self._rows = welcome.session, welcome.worker_id, welcome.rows
        assert welcome.snapshot is not None
        self._snapshot: Snapshot = welcome.snapshot  # the newest
        self._exchange = Exchange(link, self._session, job.overlap)
        self._interruptions = Interruptions()
        self._jitter_key = randomness.worker_key(job.seed, randomness.STREAM_JITTER, self._worker)

    def compute(self) -> bool:
        """Computes and pushes gradients until the membership ends. Returns whether the run is over."""
        sequence = 0
        while True:
            reply = self._step(sequence)
            sequence += 1
            if reply is None:
                continue
            if reply.evicted:
                raise Refused(f"this worker was evicted: {reply.evicted}")
            if reply.unknown:
                return reply.ended
            if reply.ended:
                self._link.try_once(lambda c: c.leave(self._session))
                return True
            self._take(reply)

    def _step(self, sequence: int) -> Reply | None:
        """Computes one gradient and begins its push, or drops it. Returns the newest reply, or None if it is not there.

        With overlap, that is the reply to the push before.
        """
        began = time.monotonic()
        stop = self._link.watch(self._session, self._snapshot, self._job.interrupt)
        self._exchange.stop_at_the_end(stop)
        push = self._gradient(sequence, stop, began)
        seconds = time.monotonic() - began
        was_waiting = self._exchange.is_waiting
        reply = self._exchange.settle()
        if reply is not None and reply.ends_membership:
            return reply
        if push is not None and not stop.is_set():
            return self._exchange.push(push._replace(interruptions=self._interruptions)) or reply
        self._interruptions = Interruptions(self._interruptions.num + 1, self._interruptions.seconds + seconds)
        if was_waiting:
            return reply  # its snapshot is fresh
        if reply is not None:
            self._take(reply)
        known = self._snapshot
        return self._link.insist(lambda c: c.fetch(self._session, known.term, known.version, self._interruptions))

    def _take(self, reply: Reply) -> None:
        if reply.receipt is not None:
            self._talk.answered(reply.receipt.verdict.value)
        self._snapshot, self._rows = reply.snapshot or self._snapshot, reply.rows

    def _gradient(self, sequence: int, stop: threading.Event, began: float) -> Push | None:
        """The gradient as it is pushed, after its pace. None if the work was interrupted. Raises `Failed`."""
        job, worker, snapshot, rows = self._job, self._worker, self._snapshot, self._rows
        try:
            iterate = job.wire.decode_iterate(snapshot.iterate)
            gradient, loss = gradient_of(job.problem, iterate, job.seed, worker, sequence, stop.is_set, rows)
        except Interrupted:
            return None
        except Exception as error:
            is_mistake = isinstance(error, Mistake)  # whose message is all that the user needs
            if not is_mistake:
                log.exception("worker-%d v=%d could not compute a gradient", worker, snapshot.version)
            self._leave()
            what = str(error) if is_mistake else f"{type(error).__name__}: {error}"
            raise Failed(f"the gradient at version {snapshot.version} could not be computed: {what}") from error
        self._refuse_device_memory(gradient)
        pace = job.pace(rows, began - self._began)
        if pace is not None:
            assigned = jittered_seconds(pace, job.jitter, self._jitter_key, sequence)
            stop.wait(max(0.0, began + assigned - time.monotonic()))
        seconds = time.monotonic() - began
        if stop.is_set():
            return None
        self._talk.computed(seconds)
        packed = job.wire.encode_gradient(gradient, job.seed, worker, sequence)
        return Push(sequence, snapshot.version, packed, float(loss), seconds, snapshot.term, rows)

    def _refuse_device_memory(self, gradient: torch.Tensor) -> None:
        """Raises `Failed` for a gradient that is not in host memory, although its problem has promised it."""
        if devices.is_cpu(gradient.device) or isinstance(self._job.problem, ModuleProblem):
            return
        self._leave()
        raise Failed(
            f"the gradient at version {self._snapshot.version} is on {gradient.device}, and only host memory can be "
            "sent: the problem has to return it there, as gradient.cpu() does"
        )

    def _leave(self) -> None:
        """Leaves before the end of the run, after the push that is under way, so that the server does not wait."""
        self._exchange.settle()
        self._link.insist(lambda c: c.leave(self._session))
