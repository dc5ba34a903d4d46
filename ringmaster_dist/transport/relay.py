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
from dataclasses import dataclass, field

from ringmaster_dist.transport.message_filter import Filter
from ringmaster_dist.transport.streams import PIECE_BYTES, Stream, shut
from ringmaster_dist.transport.tensorpipe import ProtocolError

log = logging.getLogger(__name__)

_SWITCH_SECONDS = 0.0005  # the relay's thread waits at most this long for another thread that runs Python code
_MOST_UNSENT_BYTES = 1 << 20  # back-pressure: if a peer has not read so much, nothing more is read for that peer


@dataclass(eq=False)
class Pair:
    """Two connections, the filter for bytes from the first to the second, and the filter for the way back."""

    outside: Stream
    inside: Stream
    inwards: Filter
    outwards: Filter
    first: bytes = b""  # bytes that have come from outside already
    on_end: Callable[[str], None] = lambda reason: None  # called once, with the reason if a filter has ended the pair
    counted: dict[str, int] = field(default_factory=lambda: {"received": 0, "sent": 0})


class Relay:
    """Any thread may call `add` and `close`, before and after `start`."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._new: list[Pair] = []
        self._pairs: set[Pair] = set()
        self._lock = threading.Lock()  # protects the two above and the two below
        self._closed = False
        self._carried = {"received": 0, "sent": 0}  # by pairs that have ended
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._woken.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)

    def start(self) -> None:
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
            shut(pair.outside.socket)
            shut(pair.inside.socket)
        self._wake_up()

    @property
    def num_open(self) -> int:
        return len(self._pairs)

    @property
    def carried(self) -> dict[str, int]:
        """Bytes received from outside and sent to outside so far, before encryption."""
        with self._lock:
            return {
                name: number + sum(pair.counted[name] for pair in self._pairs) for name, number in self._carried.items()
            }

    def _wake_up(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the buffer is full, so the thread wakes up in any case
            self._wake.send(b"!")

    def _end(self, pair: Pair, reason: str) -> None:
        for stream in (pair.outside, pair.inside):
            shut(stream.socket)
        with self._lock:
            if pair not in self._pairs:
                return
            self._pairs.discard(pair)
            for name, number in pair.counted.items():
                self._carried[name] += number
        for stream in (pair.outside, pair.inside):
            stream.socket.close()
        pair.on_end(reason)

    # --- one thread for all small pairs ----------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            for key, events in self._selector.select():
                if key.fileobj is self._woken:
                    self._take_new()
                    if self._closed and not self._pairs:
                        return
                    continue
                side: _Side = key.data
                if side.pair not in self._pairs:  # its other side has ended it a moment ago
                    continue
                try:
                    if events & selectors.EVENT_WRITE:
                        side.flush()
                    if events & selectors.EVENT_READ and not side.carry():
                        self._drop(side, "")
                    else:
                        self._select(side)
                        self._select(side.other)
                except Exception as error:
                    self._give_up(side, error)

    def _take_new(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(4096)
        with self._lock:
            new, self._new = self._new, []
        for pair in new:
            outside, inside = _Side(pair, pair.outside, pair.inwards), _Side(pair, pair.inside, pair.outwards)
            outside.other, inside.other = inside, outside
            try:
                for side in (outside, inside):
                    side.stream.socket.setblocking(False)
                outside.forward(pair.first)
                outside.forward_decrypted()
                self._select(outside)
                self._select(inside)
            except Exception as error:
                self._give_up(outside, error)

    def _select(self, side: _Side) -> None:
        """Waits to read from this side unless the other is behind, and to write if this one is behind."""
        events = selectors.EVENT_READ if len(side.other.unsent) < _MOST_UNSENT_BYTES else 0
        events |= selectors.EVENT_WRITE if side.unsent else 0
        if events != side.events:
            self._deselect(side)
            if events:
                self._selector.register(side.stream.socket, events, side)
            side.events = events

    def _deselect(self, side: _Side) -> None:
        if side.events:
            self._selector.unregister(side.stream.socket)
            side.events = 0

    def _give_up(self, side: _Side, error: Exception) -> None:
        """Ends one pair, whatever was wrong with it. The thread continues to carry the others."""
        if not isinstance(error, (OSError, ProtocolError)):
            log.warning("a connection was ended because of %r", error)
        self._drop(side, str(error) if isinstance(error, ProtocolError) else "")

    def _drop(self, side: _Side, reason: str) -> None:
        with contextlib.suppress(OSError):
            side.other.flush()  # the bytes that came just before the end
        for one in (side, side.other):
            self._deselect(one)
        self._end(side.pair, reason)

    # --- two threads for each big pair -----------------------------------------------------------------------

    def _carry_big(self, pair: Pair) -> None:
        reasons: list[str] = []
        for stream in (pair.inside, pair.outside):  # before either thread uses them
            stream.socket.setblocking(True)

        def carry(source: Stream, target: Stream, message_filter: Filter, first: bytes, name: str) -> None:
            buffer = memoryview(bytearray(PIECE_BYTES))
            try:
                data = memoryview(first)
                while True:
                    for piece in message_filter.filter(data):
                        target.send(piece)
                    count = source.receive_into(buffer)
                    if not count:
                        break
                    pair.counted[name] += count
                    data = buffer[:count]
            except ProtocolError as error:
                reasons.append(str(error))
            except OSError as error:
                log.debug("a connection has ended: %s", error)
            shut(source.socket)  # which ends the other thread's read
            shut(target.socket)

        back = threading.Thread(
            target=carry, args=(pair.inside, pair.outside, pair.outwards, b"", "sent"), name="tensors", daemon=True
        )
        back.start()
        carry(pair.outside, pair.inside, pair.inwards, pair.first, "received")
        back.join()
        self._end(pair, reasons[0] if reasons else "")


class _Side:
    """One of the two connections of a small pair. The relay's own thread uses it."""

    other: _Side

    def __init__(self, pair: Pair, stream: Stream, message_filter: Filter) -> None:
        self.pair, self.stream, self._filter = pair, stream, message_filter
        self._name = "received" if stream is pair.outside else "sent"
        self.unsent = bytearray()  # bytes that the peer has not read yet
        self.events = 0  # those that the selector waits for

    def carry(self) -> bool:
        """Forwards what has arrived. Returns False at the end of the stream. Raises OSError, ProtocolError."""
        try:
            data = self.stream.socket.recv(PIECE_BYTES)
        except BlockingIOError:
            return True
        if not data:
            return False
        self.stream.feed(data)
        self.forward_decrypted()
        return True

    def forward_decrypted(self) -> None:
        """Forwards all decrypted bytes that the stream has."""
        while data := self.stream.take():
            self.forward(data)

    def forward(self, data: bytes) -> None:
        self.pair.counted[self._name] += len(data)
        for piece in self._filter.filter(memoryview(data)):
            self.other.write(piece)

    def write(self, data: bytes | memoryview) -> None:
        self.unsent += self.stream.wrapped(data)
        self.flush()

    def flush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            sent = self.stream.socket.send(self.unsent)
            del self.unsent[:sent]
