"""Byte streams over a socket, encrypted or plain. Both ends of the tunnel use them.

TLS runs over memory buffers (``ssl.MemoryBIO``) rather than ``SSLSocket``. One call encrypts or decrypts a quarter of a
megabyte, and the same object serves a handshake without blocking and, later, two threads that block. One thread may
read while another writes: a lock protects OpenSSL's object, and the socket needs none.
"""

from __future__ import annotations

import socket
import ssl
import struct
import threading
from typing import Any

from ringmaster_dist.transport.tensorpipe import LENGTH_BYTES, ProtocolError

PIECE_BYTES = 1 << 18
_MOST_FRAME_BYTES = 1 << 16
_MOST_EMPTY_BYTES = 1 << 16  # records without content, such as those that change keys, and the answers to them


class Stream:
    """A plain byte stream. It is read and written with blocking calls, or in steps (`feed`, `take`, `wrapped`)."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._fed = memoryview(b"")

    def receive_into(self, view: memoryview) -> int:
        """Blocks until bytes arrive and returns their number, which is 0 at the end. Raises OSError."""
        return self.socket.recv_into(view)

    def send(self, data: bytes | memoryview) -> None:
        """Blocks until all of the data is handed to the system. Raises OSError."""
        self.socket.sendall(data)

    def feed(self, data: bytes | memoryview) -> None:
        """Accepts bytes that were read from the socket."""
        self._fed = memoryview(bytes(self._fed) + data)

    def take(self, view: memoryview) -> int:
        """Decrypts what was fed, as much as fits. Returns its length, which is 0 if a record is not whole yet."""
        count = min(len(view), len(self._fed))
        view[:count], self._fed = self._fed[:count], self._fed[count:]
        return count

    def wrapped(self, data: bytes | memoryview) -> bytes | memoryview:
        """The bytes to write to the socket in order to send the data."""
        return data


class TlsStream(Stream):
    """An encrypted stream. First call `handshake` until it returns True, and `feed` it what the peer sends."""

    def __init__(self, connection: socket.socket, context: ssl.SSLContext, *, server_side: bool) -> None:
        super().__init__(connection)
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._object = context.wrap_bio(self._incoming, self._outgoing, server_side=server_side)
        self._lock = threading.Lock()
        self._empty_bytes = 0  # received since the last content
        self._raw: memoryview | None = None  # allocated at the first read, so that a pending peer costs little

    @property
    def purpose(self) -> str | None:
        """The purpose of the connection, which the peer chose (ALPN)."""
        return self._object.selected_alpn_protocol()

    @property
    def certificate(self) -> bytes | None:
        """The peer's certificate, as DER."""
        return self._object.getpeercert(binary_form=True)

    def feed(self, data: bytes | memoryview) -> None:
        self._incoming.write(data)
        self._empty_bytes += len(data)

    def handshake(self) -> bool:
        """Takes one step without blocking. Returns whether the peer has proven itself. Raises ssl.SSLError."""
        try:
            self._object.do_handshake()
        except ssl.SSLWantReadError:
            return False
        finally:
            self._flush()
        return True

    def handshake_blocking(self) -> None:
        """Blocks, each read for at most the socket's timeout. Raises OSError (ssl.SSLError is one) or EOFError."""
        while not self.handshake():
            self._fill()

    def wrapped(self, data: bytes | memoryview) -> bytes:
        with self._lock:
            self._object.write(data)
            return self._outgoing.read()

    def receive_into(self, view: memoryview) -> int:
        try:
            while not (count := self.take(view)):
                self._fill()
        except (EOFError, ssl.SSLZeroReturnError):
            return 0
        return count

    def send(self, data: bytes | memoryview) -> None:
        self.socket.sendall(self.wrapped(data))

    def take(self, view: memoryview) -> int:
        count = 0
        with self._lock:
            try:  # OpenSSL returns records one by one
                while count < len(view) and (self._incoming.pending or self._object.pending()):
                    received: Any = self._object.read(len(view) - count, view[count:])  # a number, with a buffer
                    if not received:  # bytes after the end of the TLS stream are not read
                        raise ConnectionAbortedError("the peer has ended the stream")
                    count += received
                    self._empty_bytes = 0
            except ssl.SSLWantReadError:  # the rest of a record is still to come
                pass
            if max(self._empty_bytes, self._outgoing.pending) > _MOST_EMPTY_BYTES:
                raise ConnectionAbortedError("the peer sends records without content")
        return count

    def _fill(self) -> None:
        self._raw = self._raw or memoryview(bytearray(PIECE_BYTES + (PIECE_BYTES >> 4)))  # a piece and its overhead
        count = self.socket.recv_into(self._raw)
        if not count:
            raise EOFError("the peer has closed the connection")
        self.feed(self._raw[:count])

    def _flush(self) -> None:
        encrypted = self._outgoing.read()
        if encrypted:
            self.socket.sendall(encrypted)


def tune(connection: socket.socket) -> socket.socket:
    """Small messages are sent at once. Keep-alive ends a connection 90 seconds after its peer has disappeared."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 6)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    return connection


def shut(connection: socket.socket) -> None:
    """Ends a connection for both sides. Threads that wait on it wake up."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:  # it has ended already
        return


def read_frame(stream: Stream) -> bytes:
    """One of the small frames that open a connection. Blocks until it is whole. Raises OSError, ProtocolError."""
    (length,) = struct.unpack("<Q", _read_exactly(stream, LENGTH_BYTES))
    if length > _MOST_FRAME_BYTES:
        raise ProtocolError(f"an answer of {length} bytes")
    return _read_exactly(stream, length)


def _read_exactly(stream: Stream, count: int) -> bytes:
    data = bytearray(count)
    view = memoryview(data)
    while view:
        received = stream.receive_into(view)
        if not received:
            raise ConnectionError("the other side has closed the connection")
        view = view[received:]
    return bytes(data)
