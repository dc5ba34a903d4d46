"""A worker's link to the server: a connection that is made again when it is lost, and the long poll over it.

The main thread makes the calls. With overlap, a thread of a push makes them while the push is under way, and the main
thread makes none then. So only one thread at a time is in `Link.insist`. The main thread may open a poll at any time.
RPC threads bring the answers to polls, and interrupt stale work.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from ringmaster_dist.protocol import Push, Reply, Snapshot, Staleness
from ringmaster_dist.transport import Unreachable
from ringmaster_dist.transport.client import Client

log = logging.getLogger(__name__)

_T = TypeVar("_T")

_NEVER_STALE = 2**62  # a version that no threshold makes stale, and a term whose versions no restart has lost
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.1, 2.0  # between two attempts; each pause doubles the last
_WARN_SECONDS = 3.0  # a warning is logged after this long without the server, then each time the wait has doubled
_LEAST_GAIN = 0.1  # overlap that would give fewer than this many gradients more, as a part, is not worth old snapshots


class Lost(Exception):
    """The server was away for longer than the worker is willing to wait."""


class Link:
    """One worker's link. ``patience_seconds`` is how long it looks for a server that is away."""

    def __init__(self, connect: Callable[[], Client], patience_seconds: float) -> None:
        self._connect, self._patience_seconds = connect, patience_seconds
        self._lock = threading.Lock()  # of the next two
        self._connection: Client | None = None
        self._poll: _LongPoll | None = None  # that of the newest work
        self.last_sign_of_life = 0.0  # when the server last answered a long poll, or let this worker connect

    def close(self) -> None:
        self.stop_watching()
        if self._connection is not None:
            self._connection.close()

    def insist(self, call: Callable[[Client], _T]) -> _T:
        """Retries the call until it succeeds, over a new connection after each failure. Raises `Lost`.

        It gives up after ``patience_seconds`` without a sign of life from the server. A push may wait for longer than
        that (a round of `synchronous`). Meanwhile an answered long poll and a new connection are signs of life.
        """
        pause, since, warn_after = _FIRST_PAUSE_SECONDS, time.monotonic(), _WARN_SECONDS
        while True:
            try:
                return call(self._connection or self._reconnect())
            except Unreachable as error:
                self._drop_connection()
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

    def try_once(self, call: Callable[[Client], object]) -> None:
        """Makes the call without a retry, after the end of the run: the server may have gone."""
        try:
            if self._connection is not None:
                call(self._connection)
        except Unreachable as error:
            log.info("%s after the end", error)

    def watch(self, session: str, snapshot: Snapshot, interrupt: bool) -> threading.Event:
        """Opens a long poll about work on the snapshot. Returns an event that is set when the work is worthless.

        It also keeps the lease. A poll whose connection is lost is opened again over the next connection.
        """
        with self._lock:
            poll = self._poll = _LongPoll(self, session, snapshot.term, snapshot.version, interrupt)
            connection = self._connection
        poll.ask(connection)
        return poll.stop

    def stop_watching(self) -> None:
        with self._lock:
            self._poll = None

    def is_current(self, poll: _LongPoll) -> bool:
        return self._poll is poll

    def _reconnect(self) -> Client:
        connection = self._connect()
        if connection.is_proven:
            self.last_sign_of_life = time.monotonic()
        with self._lock:
            self._connection, poll = connection, self._poll
        if poll is not None:
            poll.ask(connection)
        return connection

    def _drop_connection(self) -> None:
        with self._lock:
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


class _LongPoll:
    """Asks the server whether work at one version is stale, until the worker opens its next poll. Keeps the lease.

    The thread that opens it asks first. RPC threads call `_answered`, which may ask again. A poll holds no snapshot,
    since its last answer may come long after the worker has taken the next one.
    """

    def __init__(self, link: Link, session: str, term: int, version: int, interrupt: bool) -> None:
        self._link, self._interrupt = link, interrupt
        self._session, self._term, self._version = session, term, version
        self.stop = threading.Event()  # set when the work is worthless

    def ask(self, connection: Client | None) -> None:
        """Does not block. A lost connection is ignored here, because the push will find out."""
        if connection is None:
            return

        def answered(answer: Staleness) -> None:
            self._answered(answer, connection)

        try:
            connection.await_stale(self._session, self._term, self._version, answered)
        except Unreachable as error:
            log.debug("%s", error)

    def _answered(self, answer: Staleness, connection: Client) -> None:
        if answer is not Staleness.UNKNOWN:  # which a broken connection gives, too
            self._link.last_sign_of_life = time.monotonic()
        if answer is Staleness.ENDED or (answer is Staleness.STALE and self._interrupt):
            self.stop.set()
        if self._link.is_current(self) and answer in (Staleness.AGAIN, Staleness.STALE):
            if answer is Staleness.STALE:
                # The work may continue for a while. A poll about a version that is never stale keeps the lease.
                self._term = self._version = _NEVER_STALE
            self.ask(connection)


def is_worth_overlap(exchange_seconds: float, gradient_seconds: float) -> bool:
    """Whether a worker that overlaps the two delivers clearly more gradients."""
    return min(exchange_seconds, gradient_seconds) >= _LEAST_GAIN * max(exchange_seconds, gradient_seconds)


class Exchange:
    """The pushes of one membership, of which at most one is under way.

    The main thread enters. With overlap, a push has a thread of its own, and its reply is there after `settle`. If an
    exchange is much shorter or much longer than a gradient, it is waited for nevertheless. Overlap would gain little
    then, and snapshots would be older.
    """

    def __init__(self, link: Link, session: str, overlap: bool) -> None:
        self._link, self._session, self._overlap = link, session, overlap
        self._under_way: Future[Reply] | None = None
        self._seconds = 0.0  # of the last exchange

    @property
    def is_waiting(self) -> bool:
        """Whether a push is under way whose reply has not come."""
        return self._under_way is not None and not self._under_way.done()

    def push(self, push: Push) -> Reply | None:
        """Begins a push, after the last one was settled. Returns None, or the reply if it was waited for.

        Raises what `Link.insist` raises.
        """
        assert self._under_way is None, "the server takes the next push only after the reply to the last"
        if not (self._overlap and is_worth_overlap(self._seconds, push.compute_seconds)):
            return self._send(push)
        future: Future[Reply] = Future()
        self._under_way = future
        threading.Thread(target=self._send_into, args=(future, push), name="push", daemon=True).start()
        return None

    def settle(self) -> Reply | None:
        """The reply to the push that is under way, or None if there is none. Blocks. Raises what `Link.insist` does."""
        future, self._under_way = self._under_way, None
        return None if future is None else future.result()

    def stop_at_the_end(self, stop: threading.Event) -> None:
        """Sets the event as soon as the push that is under way fails, or its reply ends the membership."""

        def look(future: Future[Reply]) -> None:
            if future.exception() is not None or future.result().ends_membership:
                stop.set()

        if self._under_way is not None:
            self._under_way.add_done_callback(look)

    def _send(self, push: Push) -> Reply:
        began = time.monotonic()
        reply = self._link.insist(lambda client: client.push(self._session, push))
        self._seconds = time.monotonic() - began
        return reply

    def _send_into(self, future: Future[Reply], push: Push) -> None:
        try:
            future.set_result(self._send(push))
        except Exception as error:  # the main thread raises it
            future.set_exception(error)
