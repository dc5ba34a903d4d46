"""Carries bytes between pairs of connections. Both ends of the tunnel use it.

One thread with a selector carries small messages, of which there are many: with a thread for each connection, switching
would cost more than the bytes. Big tensors get two threads of their own for each connection, so that several are
encrypted at once.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import sys
import threading
from collections.abc import Callable

from ringmaster_dist.transport.message_filter import Filter
from ringmaster_dist.transport.streams import PIECE_BYTES, Stream, shut
from ringmaster_dist.transport.tensorpipe import ProtocolError

log = logging.getLogger(__name__)

_SWITCH_SECONDS = 0.0005  # the relay's thread waits at most this long for another thread that runs Python code
_HELD_SECONDS = 0.02  # how often the thread looks whether a side whose filter waits may be read again
_MOST_UNSENT_BYTES = 1 << 20  # back-pressure: if a peer has not read so much, nothing more is read for that peer


class Side:
    """One connection of a pair, and the filter for the bytes that come from it. One thread at a time reads from it."""

    other: Side  # the other connection of the pair

    def __init__(self, stream: Stream, message_filter: Filter) -> None:
        self.stream, self.filter = stream, message_filter
        self.num_bytes = 0  # received from it so far, decrypted
        self.unsent = bytearray()  # bytes that its peer has not read yet
        self.events = 0  # those that the selector waits for

    def carry(self, buffer: memoryview) -> bool:
        """Forwards what has arrived. Returns False at the end of the stream. Raises OSError, ProtocolError."""
        try:
            data = self.stream.socket.recv(PIECE_BYTES)
        except BlockingIOError:
            return True
        if not data:
            return False
        self.stream.feed(data)
        self.forward_decrypted(buffer)
        return True

    def forward_decrypted(self, buffer: memoryview) -> None:
        """Forwards all decrypted bytes that the stream has."""
        while count := self.stream.take(buffer):
            self.forward(buffer[:count])

    def forward(self, data: memoryview) -> None:
        self.num_bytes += len(data)
        for piece in self.filter.filter(data):
            self.other.unsent += self.other.stream.wrapped(piece)
            self.other.flush()

    def flush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            sent = self.stream.socket.send(self.unsent)
            del self.unsent[:sent]


class Pair:
    """Two connections. ``first`` are bytes that have come from outside already.

    ``on_end`` is called once, with the reason if a filter has ended the pair.
    """

    def __init__(self, outside: Side, inside: Side, on_end: Callable[[str], None], first: bytes = b"") -> None:
        self.outside, self.inside, self.sides = outside, inside, (outside, inside)
        outside.other, inside.other = inside, outside
        self.on_end, self.first = on_end, first

    def shut(self) -> None:
        """Ends both connections. Threads that wait on them wake up."""
        for side in self.sides:
            shut(side.stream.socket)


class Relay:
    """Its threads start at once. Any thread may call `add` and `close`."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._new: list[Pair] = []
        self._held: set[Pair] = set()  # with a side whose filter waits
        self._pairs: set[Pair] = set()
        self._lock = threading.Lock()  # protects the two above and the three below
        self._closed = False
        self._received = self._sent = 0  # bytes of pairs that have ended
        self._buffer = memoryview(bytearray(PIECE_BYTES))  # of the one thread
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._woken.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_SECONDS))
        threading.Thread(target=self._run, name="relay", daemon=True).start()

    def add(self, pair: Pair, *, big: bool = False) -> None:
        """Carries the pair's bytes from now on. A big pair gets two threads of its own."""
        with self._lock:
            self._pairs.add(pair)
            closed = self._closed
        if closed:
            self._end(pair, "")
        elif big:
            threading.Thread(target=self._carry_big, args=(pair,), name="tensors", daemon=True).start()
        else:
            with self._lock:
                self._new.append(pair)
            self._wake_up()

    def close(self) -> None:
        """Ends all connections. Does not wait for the threads."""
        with self._lock:
            self._closed = True
            pairs = list(self._pairs)
        for pair in pairs:
            pair.shut()
        self._wake_up()

    @property
    def num_open(self) -> int:
        return len(self._pairs)

    @property
    def carried(self) -> dict[str, int]:
        """Bytes received from outside and sent to outside so far, before encryption."""
        with self._lock:
            received = self._received + sum(pair.outside.num_bytes for pair in self._pairs)
            sent = self._sent + sum(pair.inside.num_bytes for pair in self._pairs)
            return {"received": received, "sent": sent}

    def _wake_up(self) -> None:
        with contextlib.suppress(OSError):  # if the buffer is full, the thread wakes up anyway; or it has ended
            self._wake.send(b"!")

    def _end(self, pair: Pair, reason: str) -> None:
        pair.shut()
        with self._lock:
            if pair not in self._pairs:
                return
            self._pairs.discard(pair)
            self._received += pair.outside.num_bytes
            self._sent += pair.inside.num_bytes
        for side in pair.sides:
            side.stream.socket.close()
        pair.on_end(reason)
        self._wake_up()  # the thread ends after `close`, with the last pair

    # --- one thread for all small pairs ----------------------------------------------------------------------

    def _run(self) -> None:
        while self._pairs or not self._closed:
            held, self._held = self._held & self._pairs, set()
            for pair in held:
                self._select(pair)
            for key, events in self._selector.select(_HELD_SECONDS if self._held else None):
                if key.fileobj is self._woken:
                    self._take_new()
                    continue
                pair, side = key.data
                if pair not in self._pairs:  # its other side has ended it a moment ago
                    continue
                try:
                    if events & selectors.EVENT_WRITE:
                        side.flush()
                    reads = events & selectors.EVENT_READ and not side.filter.is_waiting  # others may have used it up
                    if reads and not side.carry(self._buffer):
                        self._drop(pair, side, "")
                    else:
                        self._select(pair)
                except Exception as error:
                    self._give_up(pair, side, error)
        for one in (self._selector, self._wake, self._woken):
            one.close()

    def _take_new(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(4096)
        with self._lock:
            new, self._new = self._new, []
        for pair in new:
            try:
                for side in pair.sides:
                    side.stream.socket.setblocking(False)
                pair.outside.forward(memoryview(pair.first))
                pair.outside.forward_decrypted(self._buffer)
                self._select(pair)
            except Exception as error:
                self._give_up(pair, pair.outside, error)

    def _select(self, pair: Pair) -> None:
        """Reads from each side unless the other side is behind, and waits to write to a side that is behind."""
        for side in pair.sides:
            events = selectors.EVENT_READ if len(side.other.unsent) < _MOST_UNSENT_BYTES else 0
            if side.filter.is_waiting:
                self._held.add(pair)
                events = 0
            events |= selectors.EVENT_WRITE if side.unsent else 0
            if events != side.events:
                self._deselect(side)
                if events:
                    self._selector.register(side.stream.socket, events, (pair, side))
                side.events = events

    def _deselect(self, side: Side) -> None:
        if side.events:
            self._selector.unregister(side.stream.socket)
            side.events = 0

    def _give_up(self, pair: Pair, side: Side, error: Exception) -> None:
        """Ends one pair, whatever was wrong with it. The thread continues to carry the others."""
        if not isinstance(error, (OSError, ProtocolError)):
            log.warning("a connection was ended because of %r", error)
        self._drop(pair, side, str(error) if isinstance(error, ProtocolError) else "")

    def _drop(self, pair: Pair, side: Side, reason: str) -> None:
        """Ends a pair after one side has ended."""
        with contextlib.suppress(OSError):
            side.other.flush()  # the bytes that came just before the end
        for one in pair.sides:
            self._deselect(one)
        self._end(pair, reason)

    # --- two threads for each big pair -----------------------------------------------------------------------

    def _carry_big(self, pair: Pair) -> None:
        reasons: list[str] = []
        for side in pair.sides:  # before either thread uses them
            side.stream.socket.setblocking(True)

        def carry(side: Side, first: bytes) -> None:
            buffer = memoryview(bytearray(PIECE_BYTES))
            try:
                data = memoryview(first)
                while True:
                    for piece in side.filter.filter(data):
                        side.other.stream.send(piece)
                    count = side.stream.receive_into(buffer)
                    if not count:
                        break
                    side.num_bytes += count
                    data = buffer[:count]
            except ProtocolError as error:
                reasons.append(str(error))
            except OSError as error:
                log.debug("a connection has ended: %s", error)
            pair.shut()  # which ends the other thread's read

        back = threading.Thread(target=carry, args=(pair.inside, b""), name="tensors", daemon=True)
        back.start()
        carry(pair.outside, pair.first)
        back.join()
        self._end(pair, reasons[0] if reasons else "")
