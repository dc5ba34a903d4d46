"""Calls that wait for their answer: for the run to start, for an update to be computed, for work to become worthless.

Everything happens under the service's lock, except `Answers.send`: it sends messages.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ringmaster_dist.protocol import Receipt, Reply, Snapshot, Staleness, Verdict, Welcome
from ringmaster_dist.server.core import ServerCore
from ringmaster_dist.server.meter import Meter


@dataclass
class Answers:
    """Futures to complete once the lock is released."""

    pending: list[tuple[torch.futures.Future[Any], Any]] = field(default_factory=list)

    def add(self, future: torch.futures.Future[Any], value: Any) -> None:
        self.pending.append((future, value))

    def send(self) -> None:
        for future, value in self.pending:
            future.set_result(value)


class _Poll(NamedTuple):
    """A question about work in progress."""

    term: int
    version: int
    future: torch.futures.Future[Staleness]
    since: float


class Waiting:
    """Joins, pushes and polls that are not answered yet. A worker has one poll at most."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._joins: list[tuple[torch.futures.Future[Welcome], Welcome]] = []
        self._pushes: list[tuple[torch.futures.Future[Reply], Receipt]] = []
        self._late: list[torch.futures.Future[Reply]] = []
        self._polls: dict[int, _Poll] = {}

    @property
    def num_joins(self) -> int:
        return len(self._joins)

    def add_join(self, future: torch.futures.Future[Welcome], welcome: Welcome) -> None:
        self._joins.append((future, welcome))

    def add_push(self, future: torch.futures.Future[Reply], receipt: Receipt) -> None:
        self._pushes.append((future, receipt))

    def add_late(self, future: torch.futures.Future[Reply]) -> None:
        """A push after the last verdict: it is only told that the run is over."""
        self._late.append(future)

    def add_poll(
        self, worker: int, term: int, version: int, future: torch.futures.Future[Staleness], now: float,
        answers: Answers,
    ) -> None:  # fmt: skip
        """A worker that asks again asks about newer work: its older question is moot."""
        self.put_off(worker, answers)
        self._polls[worker] = _Poll(term, version, future, now)

    def answer_joins(self, answers: Answers) -> None:
        for future, welcome in self._joins:
            answers.add(future, welcome)
        self._joins.clear()

    def answer(self, core: ServerCore, outgoing: Snapshot, answers: Answers) -> None:
        """Answers whoever can be, now that a version, a snapshot or the membership may be new."""
        stale_before, still = core.stale_before, []
        for future, receipt in self._pushes:
            accepted = receipt.verdict is Verdict.ACCEPTED
            if outgoing.version >= (receipt.continue_at if accepted else stale_before):
                answers.add(future, Reply(receipt, outgoing))
                self._meter.sent(outgoing)
            else:
                still.append((future, receipt))
        self._pushes = still
        for worker in list(self._polls):
            self.answer_poll(worker, core, outgoing, answers)

    def answer_poll(self, worker: int, core: ServerCore, outgoing: Snapshot, answers: Answers) -> None:
        """Says that the work is worthless, once there is something better to begin."""
        poll = self._polls[worker]
        lost = core.shared_version(poll.term, poll.version) < poll.version
        if lost or poll.version < core.stale_before <= outgoing.version:
            answers.add(poll.future, Staleness.STALE)
            del self._polls[worker]

    def put_off(self, worker: int, answers: Answers, before: float = float("inf")) -> None:
        """Has the worker ask again, if it has been waiting since ``before``: that keeps its lease."""
        poll = self._polls.get(worker)
        if poll is not None and poll.since < before:
            answers.add(poll.future, Staleness.AGAIN)
            del self._polls[worker]

    def finish(self, answers: Answers) -> None:
        """The run is over: everybody is told."""
        self.answer_joins(answers)  # their first call will tell them
        for pushed, receipt in self._pushes:
            answers.add(pushed, Reply(receipt, None, ended=True))
        for late in self._late:
            answers.add(late, Reply(None, None, ended=True))
        for poll in self._polls.values():
            answers.add(poll.future, Staleness.ENDED)
        self._pushes.clear()
        self._late.clear()
        self._polls.clear()
