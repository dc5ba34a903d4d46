"""Calls that wait: for the run to start, for an update to be computed, for work to become worthless.

Everything here happens under the lock of the service. An answer is only noted here. The service sends it after it has
released the lock, because sending a message takes time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ringmaster_dist.protocol import Receipt, Reply, Snapshot, Staleness, Verdict, Welcome
from ringmaster_dist.server.core import ServerCore
from ringmaster_dist.server.meter import Meter


class _Poll(NamedTuple):
    """A question about work in progress."""

    term: int
    version: int
    future: torch.futures.Future[Staleness]
    since: float


class Waiting:
    """Joins, pushes and polls that are not answered yet, and answers that are not sent yet.

    A worker has at most one poll.
    """

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._answers: list[tuple[torch.futures.Future[Any], Any]] = []
        self._joins: list[tuple[torch.futures.Future[Welcome], Welcome]] = []
        self._pushes: list[tuple[torch.futures.Future[Reply], Receipt, int]] = []  # with the worker
        self._late: list[torch.futures.Future[Reply]] = []
        self._polls: dict[int, _Poll] = {}

    def answer(self, future: torch.futures.Future[Any], value: Any) -> None:
        """Notes an answer. `take_answers` returns it to the thread that sends it."""
        self._answers.append((future, value))

    def take_answers(self) -> list[tuple[torch.futures.Future[Any], Any]]:
        taken, self._answers = self._answers, []
        return taken

    @property
    def num_joins(self) -> int:
        return len(self._joins)

    def add_join(self, future: torch.futures.Future[Welcome], welcome: Welcome) -> None:
        self._joins.append((future, welcome))

    def add_push(self, future: torch.futures.Future[Reply], receipt: Receipt, worker: int) -> None:
        self._pushes.append((future, receipt, worker))

    def add_late_push(self, future: torch.futures.Future[Reply]) -> None:
        """A push after the last verdict. Its answer only says that the run is over."""
        self._late.append(future)

    def add_poll(
        self, worker: int, term: int, version: int, future: torch.futures.Future[Staleness], now: float
    ) -> None:
        """A worker that asks again asks about newer work, so its older question is answered."""
        self.ask_to_poll_again(worker)
        self._polls[worker] = _Poll(term, version, future, now)

    def answer_joins(self) -> None:
        for future, welcome in self._joins:
            self.answer(future, welcome)
        self._joins.clear()

    def answer_all(self, core: ServerCore, published: Snapshot) -> None:
        """Answers every push and poll that can be answered with the published snapshot."""
        stale_before, still = core.stale_before, []
        for future, receipt, worker in self._pushes:
            accepted = receipt.verdict is Verdict.ACCEPTED
            if published.version >= (receipt.continue_at if accepted else stale_before):
                self.answer(future, Reply(receipt, published, rows=core.rows_of(worker)))
                self._meter.sent(published)
            else:
                still.append((future, receipt, worker))
        self._pushes = still
        for worker in list(self._polls):
            self.answer_poll(worker, core, published)

    def answer_poll(self, worker: int, core: ServerCore, published: Snapshot) -> None:
        """Says that the work is worthless, as soon as there is a snapshot to continue from."""
        poll = self._polls[worker]
        lost = core.shared_version(poll.term, poll.version) < poll.version
        if lost or poll.version < core.stale_before <= published.version:
            self.answer(poll.future, Staleness.STALE)
            del self._polls[worker]

    def ask_to_poll_again(self, worker: int, before: float = float("inf")) -> None:
        """Asks the worker to poll again, if it has waited since ``before``. Its next call renews its lease."""
        poll = self._polls.get(worker)
        if poll is not None and poll.since < before:
            self.answer(poll.future, Staleness.AGAIN)
            del self._polls[worker]

    def finish(self) -> None:
        """The run is over. Every call that waits is answered."""
        self.answer_joins()  # the first call of these workers says that the run is over
        for pushed, receipt, _ in self._pushes:
            self.answer(pushed, Reply(receipt, None, ended=True))
        for late in self._late:
            self.answer(late, Reply(None, None, ended=True))
        for poll in self._polls.values():
            self.answer(poll.future, Staleness.ENDED)
        self._pushes.clear()
        self._late.clear()
        self._polls.clear()
