"""Who takes part: sessions, leases, and what each worker has told of itself. Everything under the service's lock.

A lease is kept by any call. Who loses it is counted out, and is back with its next call.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ringmaster_dist.protocol import Interruptions
from ringmaster_dist.server.core import ServerCore
from ringmaster_dist.server.sessions import Sessions, digest

log = logging.getLogger(__name__)


@dataclass
class Member:
    """What is known of a worker beyond the core's ledger."""

    session: str  # its digest: nobody who reads the state of a server can act as its workers
    slot: int
    last_seen: float
    interruptions: Interruptions = Interruptions()  # noqa: RUF009  (immutable)
    used_seconds: float = 0.0
    wasted_seconds: float = 0.0
    invalid_in_a_row: int = 0


class Members:
    """Tells the core and the history (``note``) who comes and goes, until it is `closed`."""

    def __init__(
        self, core: ServerCore, token: str, note: Callable[[int, str, int, int], None], clock: Callable[[], float]
    ) -> None:
        self.by_worker: dict[int, Member] = {}
        self.closed = False  # the run is ending: who leaves now is not part of the history
        self._gone: set[int] = set()  # who has left since
        self._core, self._note, self._clock = core, note, clock
        self._sessions = Sessions(token)

    def admit(self, slot: int) -> tuple[int, str]:
        """A new worker and its session; a negative slot: that of its id."""
        worker = self._core.join()
        slot = slot if slot >= 0 else worker
        session = self._sessions.issue(worker, slot)
        self._enter(worker, slot)
        self.by_worker[worker] = Member(digest(session), slot, self._clock())
        log.info("worker-%d v=%d joined", worker, self._core.version)
        return worker, session

    def caller(self, session: str) -> int | None:
        """Whose session it is. Renews the lease, also one that has run out: the worker is back."""
        holder = self._sessions.holder(session)
        if holder is None:
            return None
        worker = holder.worker
        member = self.by_worker.get(worker)
        if member is None:  # it joined an earlier term, after the checkpoint this one began from
            if self.closed:
                return None
            member = self.by_worker[worker] = Member(digest(session), holder.slot, self._clock())
        elif member.session != digest(session):
            return None
        member.last_seen = self._clock()
        if worker not in self._core.live and not self.closed:
            self._core.join(worker)
            self._enter(worker, member.slot)
            log.info("worker-%d v=%d is back", worker, self._core.version)
        return worker

    def _enter(self, worker: int, slot: int) -> None:
        self._note(worker, "join", self._core.pushes, slot)

    def remove(self, worker: int, why: str) -> bool:
        """Counts the worker out; whether it was in."""
        if self.closed:
            self._gone.add(worker)
            return False
        if worker not in self._core.live:
            return False
        self._note(worker, "leave", self._core.pushes, self.by_worker[worker].slot)
        log.info("worker-%d v=%d %s", worker, self._core.version, why)
        self._core.count_out(worker)
        return True

    def forget_session(self, worker: int) -> None:
        """It has to join anew, as another worker."""
        self.by_worker[worker].session = ""

    def renew_all(self, now: float) -> None:
        for member in self.by_worker.values():
            member.last_seen = now

    def overdue(self, since: float) -> list[int]:
        """Live workers of which nothing has been heard since then."""
        present = self._core.live - self._gone
        return [worker for worker, member in self.by_worker.items() if worker in present and member.last_seen < since]

    @property
    def all_left(self) -> bool:
        return self.closed and self._core.live <= self._gone

    def state(self) -> list[list[Any]]:
        return [
            [worker, m.session, m.slot, *m.interruptions, m.used_seconds, m.wasted_seconds]
            for worker, m in self.by_worker.items()
        ]

    def restore(self, rows: Iterable[list[Any]], *, ended: bool) -> None:
        """Those of an earlier term. They will be back; where the run had ended they were told, and have gone."""
        now = self._clock()
        for worker, session, slot, num, seconds, used, wasted in rows:
            self.by_worker[worker] = Member(session, slot, now, Interruptions(num, seconds), used, wasted)
        for worker in sorted(self._core.live) if ended else ():
            self._note(worker, "leave", self._core.pushes, self.by_worker[worker].slot)
            self._core.leave(worker)
