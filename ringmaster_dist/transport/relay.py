"""Carries bytes between pairs of connections: one half of each end of the tunnel.

Small messages, of which there are many, are carried by one thread with a selector: a thread for each connection would
spend more on taking turns than on the bytes. Big tensors get two threads of their own for each connection, so that
several are encrypted at once.
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

from ringmaster_dist.transport.sieve import Sieve
from ringmaster_dist.transport.streams import PIECE_BYTES, Stream, shut
from ringmaster_dist.transport.tensorpipe import Unexpected

log = logging.getLogger(__name__)

_SWITCH_SECONDS = 0.0005  # the relay's thread waits at most this long for another that computes in Python
_MOST_WAITING_BYTES = 1 << 20  # for a peer that does not read; until it does, nothing more is read for it


@dataclass(eq=False)
class Pair:
    """Two connections, the sieve for what goes from the first to the second, and the one for the way back."""

    outside: Stream
    inside: Stream
    inwards: Sieve
    outwards: Sieve
    first: bytes = b""  # what has come from outside already
    on_end: Callable[[str], None] = lambda reason: None  # told once, with the reason if a sieve has ended it
    counted: dict[str, int] = field(default_factory=lambda: {"received": 0, "sent": 0})


class Relay:
    """`add` may be called by any thread, before and after `start`."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._new: list[Pair] = []
        self._pairs: set[Pair] = set()
        self._lock = threading.Lock()
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._woken.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._closed = False
        self._carried = {"received": 0, "sent": 0}  # by pairs that have ended

    def start(self) -> None:
        sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_SECONDS))
        threading.Thread(target=self._run, name="relay", daemon=True).start()

    def add(self, pair: Pair, *, big: bool = False) -> None:
        """``big``: with threads of its own."""
        with self._lock:
            self._pairs.add(pair)
            closed = self._closed
        if closed:
            self._end(pair, "")
        elif big:
            threading.Thread(target=self._carry_alone, args=(pair,), name="tensors", daemon=True).start()
        else:
            with self._lock:
                self._new.append(pair)
            self._wake_up()

    def close(self) -> None:
        """Ends all connections."""
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
        """Bytes from outside and to outside so far, before encryption."""
        with self._lock:
            return {
                name: number + sum(pair.counted[name] for pair in self._pairs) for name, number in self._carried.items()
            }

    def _wake_up(self) -> None:
        try:
            self._wake.send(b"!")
        except BlockingIOError:  # it will wake up anyway
            return

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

    # --- one thread for all that is small ------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            for key, events in self._selector.select():
                if key.fileobj is self._woken:
                    self._take_new()
                    if self._closed and not self._pairs:
                        return
                    continue
                side: _Side = key.data
                if side.pair not in self._pairs:  # ended by its other side, a moment ago
                    continue
                try:
                    if events & selectors.EVENT_WRITE:
                        side.flush()
                    if events & selectors.EVENT_READ and not side.carry():
                        self._forget(side, "")
                    if side.pair in self._pairs:
                        self._listen(side)
                        self._listen(side.other)
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
                outside.pass_on(pair.first)
                while outside.carry_decrypted():
                    pass
                self._listen(outside)
                self._listen(inside)
            except Exception as error:
                self._give_up(outside, error)

    def _listen(self, side: _Side) -> None:
        """Reads from it while the other side takes what was read, and waits to write what it has not taken yet."""
        events = selectors.EVENT_READ if len(side.other.waiting) < _MOST_WAITING_BYTES else 0
        events |= selectors.EVENT_WRITE if side.waiting else 0
        if events != side.events:
            side.events = events
            if side.is_registered:
                self._selector.unregister(side.stream.socket)
                side.is_registered = False
            if events:
                self._selector.register(side.stream.socket, events, side)
                side.is_registered = True

    def _give_up(self, side: _Side, error: Exception) -> None:
        """One pair ends, whatever was wrong with it; the thread carries the others."""
        if not isinstance(error, (OSError, Unexpected)):
            log.warning("a connection was ended because of %r", error)
        self._forget(side, str(error) if isinstance(error, Unexpected) else "")

    def _forget(self, side: _Side, reason: str) -> None:
        with contextlib.suppress(OSError):
            side.other.flush()  # what came just before the end
        for one in (side, side.other):
            if one.is_registered:
                self._selector.unregister(one.stream.socket)
                one.is_registered = False
        self._end(side.pair, reason)

    # --- two threads for what is big -----------------------------------------------------------------------

    def _carry_alone(self, pair: Pair) -> None:
        reasons: list[str] = []
        for stream in (pair.inside, pair.outside):  # before either thread uses them
            stream.socket.setblocking(True)

        def carry(source: Stream, target: Stream, sieve: Sieve, first: bytes, name: str) -> None:
            buffer = memoryview(bytearray(PIECE_BYTES))
            try:
                data = memoryview(first)
                while True:
                    for piece in sieve.sift(data):
                        target.send(piece)
                    count = source.receive_into(buffer)
                    if not count:
                        break
                    pair.counted[name] += count
                    data = buffer[:count]
            except Unexpected as error:
                reasons.append(str(error))
            except OSError as error:
                log.debug("a connection has ended: %s", error)
            shut(source.socket)  # the other thread's reading ends with it
            shut(target.socket)

        back = threading.Thread(
            target=carry, args=(pair.inside, pair.outside, pair.outwards, b"", "sent"), name="tensors", daemon=True
        )
        back.start()
        carry(pair.outside, pair.inside, pair.inwards, pair.first, "received")
        back.join()
        self._end(pair, reasons[0] if reasons else "")


class _Side:
    """One of the two connections of a pair, while the relay's own thread serves it."""

    other: _Side

    def __init__(self, pair: Pair, stream: Stream, sieve: Sieve) -> None:
        self.pair, self.stream, self._sieve = pair, stream, sieve
        self._name = "received" if stream is pair.outside else "sent"
        self.waiting = bytearray()  # what its peer has not taken yet
        self.events, self.is_registered = 0, False

    def carry(self) -> bool:
        """Passes on what has come; False at the end. Raises OSError, Unexpected."""
        try:
            data = self.stream.socket.recv(PIECE_BYTES)
        except BlockingIOError:
            return True
        if not data:
            return False
        self.stream.feed(data)
        while self.carry_decrypted():
            pass
        return True

    def carry_decrypted(self) -> bool:
        """Passes on what has come before; False when there is no more of it."""
        data = self.stream.take()
        self.pass_on(data)
        return bool(data)

    def pass_on(self, data: bytes) -> None:
        self.pair.counted[self._name] += len(data)
        for piece in self._sieve.sift(memoryview(data)):
            self.other.write(piece)

    def write(self, data: bytes | memoryview) -> None:
        self.waiting += self.stream.wrapped(data)
        self.flush()

    def flush(self) -> None:
        try:
            sent = self.stream.socket.send(self.waiting)
        except BlockingIOError:
            return
        del self.waiting[:sent]
