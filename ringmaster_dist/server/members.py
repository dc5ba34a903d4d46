"""The workers of a run, and the sessions that name them. Everything here happens under the lock of the service.

A worker that loses its lease is counted out, and is a member again after its next call. A session has the worker, its
seat and a nonce, and is signed with a key that only the server has, so a restarted server recognises the sessions of
its earlier terms, and no worker can make one. Two sessions of one worker id differ in their nonce: a restarted server
may give the same id to another worker, and does not mistake one for the other.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from ringmaster_dist.protocol import Device, Interruptions, JoinRequest, Seat
from ringmaster_dist.server.core import ServerCore
from ringmaster_dist.server.leases import Leases
from ringmaster_dist.server.life import Life

log = logging.getLogger(__name__)


class Holder(NamedTuple):
    worker: int
    seat: Seat


class Sessions:
    """Issues sessions and recognises them. It keeps none."""

    def __init__(self, key: str) -> None:
        """``key`` is the server's secret, which workers do not know."""
        self._key = key.encode()

    def issue(self, worker: int, seat: Seat) -> str:
        words = json.dumps([*seat.device, seat.host]).encode().hex()
        text = f"{worker}.{seat.slot}.{seat.ranks}.{secrets.token_hex(8)}.{words}"
        return f"{text}.{self._mac(text)}"

    def holder(self, session: str) -> Holder | None:
        """The worker that this server, or an earlier one of the same run, issued it to. None for a forgery."""
        text, _, mac = session.rpartition(".") if isinstance(session, str) and session.isascii() else ("", "", "")
        if not hmac.compare_digest(mac.encode(), self._mac(text).encode()):
            return None
        worker, slot, ranks, _, words = text.split(".")
        name, title, host = json.loads(bytes.fromhex(words))
        return Holder(int(worker), Seat(int(slot), Device(name, title), int(ranks), host))

    def _mac(self, text: str) -> str:
        return hmac.new(self._key, text.encode(), hashlib.sha256).hexdigest()[:32]


def _digest(session: str) -> str:
    """What memory and checkpoints hold of a session. It recognises the session and cannot replace it."""
    return hashlib.sha256(session.encode()).hexdigest()


@dataclass
class Member:
    """What is known of a worker apart from the core's ledger."""

    session: str  # its digest, or empty if the worker has to join again
    seat: Seat
    interruptions: Interruptions = Interruptions()  # noqa: RUF009  (immutable)
    used_seconds: float = 0.0
    wasted_seconds: float = 0.0
    invalid_in_a_row: int = 0


class Members:
    """Reports each join and leave to the core and to the history (``note``), until the run is ending."""

    def __init__(self, core: ServerCore, key: str, note: Callable[..., None], life: Life, leases: Leases) -> None:
        self.by_worker: dict[int, Member] = {}
        self._gone: set[int] = set()  # workers that left after the run began to end, which is not part of the history
        self._core, self._note, self._life, self._leases = core, note, life, leases
        self._sessions = Sessions(key)

    def admit(self, request: JoinRequest) -> tuple[int, str]:
        """Returns a new worker and its session. A negative slot stands for the worker's id."""
        worker = self._core.join()
        seat = request.seat(worker)
        session = self._sessions.issue(worker, seat)
        self._note(worker, "join", self._core.pushes, seat)
        self.by_worker[worker] = Member(_digest(session), seat)
        self._leases.renew(worker)
        log.info("worker-%d v=%d joined", worker, self._core.version)
        return worker, session

    def caller(self, session: str) -> int | None:
        """Returns the worker of a session, and renews its lease. A worker whose lease had run out is a member again."""
        holder = self._sessions.holder(session)
        if holder is None:
            return None
        worker, is_ending = holder.worker, self._life.is_ending
        member = self.by_worker.get(worker)
        if member is None:  # it joined an earlier term, after the checkpoint that this term began from
            if is_ending:
                return None
            member = Member(_digest(session), holder.seat)
        elif member.session != _digest(session):
            return None
        if worker not in self._core.live and not is_ending:
            self._core.join(worker)
            self._note(worker, "join", self._core.pushes, member.seat)
            log.info("worker-%d v=%d is back", worker, self._core.version)
        self.by_worker[worker] = member
        self._leases.renew(worker)
        return worker

    def remove(self, worker: int, why: str) -> bool:
        """Counts the worker out. Returns whether it was a member."""
        if self._life.is_ending:
            self._gone.add(worker)
            return False
        if worker not in self._core.live:
            return False
        self._note(worker, "leave", self._core.pushes, self.by_worker[worker].seat, why)
        log.info("worker-%d v=%d %s", worker, self._core.version, why)
        self._core.count_out(worker)
        return True

    def forget_session(self, worker: int) -> None:
        """The worker has to join again, and gets another id."""
        self.by_worker[worker].session = ""

    def overdue(self) -> list[int]:
        """Members whose lease has run out."""
        expired = self._leases.expired() & (self._core.live - self._gone)
        return [worker for worker in self.by_worker if worker in expired]

    @property
    def all_left(self) -> bool:
        return self._life.is_ending and self._core.live <= self._gone

    def state(self) -> list[list[Any]]:
        return [
            [
                worker,
                m.session,
                m.seat.slot,
                *m.interruptions,
                m.used_seconds,
                m.wasted_seconds,
                *m.seat.device,
                m.seat.ranks,
                m.seat.host,
            ]
            for worker, m in self.by_worker.items()
        ]

    def restore(self, rows: Iterable[list[Any]], *, ended: bool) -> None:
        """Takes over the members of an earlier term, which will call again. If the run had ended, they have left."""
        for worker, session, slot, num, seconds, used, wasted, name, title, ranks, host in rows:
            seat = Seat(slot, Device(name, title), ranks, host)
            self.by_worker[worker] = Member(session, seat, Interruptions(num, seconds), used, wasted)
            self._leases.renew(worker)
        for worker in sorted(self._core.live) if ended else ():
            self._note(worker, "leave", self._core.pushes, self.by_worker[worker].seat)
            self._core.leave(worker)
