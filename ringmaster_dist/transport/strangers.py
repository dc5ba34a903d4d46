"""Connections that have proven nothing yet: accepted, heard without waiting, given up soon. Used by one thread.

There are at most `MOST` of them. When one more comes, the oldest has to go; if more than half come from one
neighbourhood of addresses, the oldest of those. So whoever wants to keep a worker out has to open `MOST` connections
in the time that the worker's handshake takes, again and again, from many networks.
"""

from __future__ import annotations

import ipaddress
import logging
import selectors
import socket
import ssl
import struct
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ringmaster_dist.transport.refusals import Refusals
from ringmaster_dist.transport.streams import PIECE_BYTES, PlainStream, TlsStream, tune
from ringmaster_dist.transport.tensorpipe import LENGTH_BYTES, Unexpected

log = logging.getLogger(__name__)

MOST = 128
_MOST_GREETING_BYTES = 256
_PAUSE_SECONDS = 0.01
_STORE_HELLO = b"\x00\xce\xf7\x85\x3c"  # how a client of torch's TCPStore begins


@dataclass
class Stranger:
    """A connection that has not introduced itself yet."""

    stream: PlainStream | TlsStream
    peer: tuple[str, int]
    deadline: float
    proven: bool  # the token; always, where there is no TLS
    received: bytearray = field(default_factory=bytearray)
    has_spoken: bool = False

    @property
    def greeting(self) -> bytes | None:
        """The first frame, if it is whole."""
        if len(self.received) < LENGTH_BYTES:
            return None
        (length,) = struct.unpack_from("<Q", self.received)
        if length > _MOST_GREETING_BYTES:
            raise Unexpected("it does not begin with a greeting")
        whole = len(self.received) >= LENGTH_BYTES + length
        return bytes(self.received[LENGTH_BYTES : LENGTH_BYTES + length]) if whole else None

    def hear(self) -> bool:
        """Takes what has come; False at the end. Raises OSError, Unexpected."""
        data = self.stream.socket.recv(PIECE_BYTES)
        if not data:
            return False
        if not self.has_spoken and data.startswith(_STORE_HELLO):
            raise Unexpected("it speaks as a worker of ringmaster 0.1 does, without TLS")
        self.has_spoken = True
        self.stream.feed(data)
        if isinstance(self.stream, TlsStream):
            self.proven = self.proven or self.stream.handshake()
        while self.proven and (piece := self.stream.take()):
            self.received += piece
        return True


class Strangers:
    """``introduce`` is called with one that has proven the token, each time it has said something, until `release`."""

    def __init__(
        self, selector: selectors.BaseSelector, context: ssl.SSLContext | None, seconds: float, refusals: Refusals,
        introduce: Callable[[Stranger], None],
    ) -> None:  # fmt: skip
        self._selector, self._context, self._seconds = selector, context, seconds
        self._refusals, self._introduce = refusals, introduce
        self._all: dict[socket.socket, Stranger] = {}  # from the oldest to the newest

    def accept(self, public: socket.socket) -> None:
        try:
            connection, address = public.accept()
        except OSError as error:  # it has gone again, or there are too many open files
            log.debug("a connection was not accepted: %s", error)
            time.sleep(_PAUSE_SECONDS)
            return
        try:
            if len(self._all) >= MOST:
                self._refuse(self._next_to_go(), "others came, and it had not introduced itself yet")
            connection.setblocking(False)
            stream: PlainStream | TlsStream = PlainStream(tune(connection))
            if self._context is not None:
                stream = TlsStream(connection, self._context, server_side=True)
            deadline = time.monotonic() + self._seconds
            self._selector.register(connection, selectors.EVENT_READ)
            self._all[connection] = Stranger(stream, peer_of(address), deadline, self._context is None)
        except OSError as error:
            log.debug("a connection was given up at once: %s", error)
            connection.close()

    def hear(self, connection: socket.socket) -> None:
        one = self._all.get(connection)
        if one is None:  # it had to go, a moment ago
            return
        try:
            if not one.hear():
                self._let_go(one)
            elif one.proven:
                self._introduce(one)
        except BlockingIOError:
            return
        except Exception as error:  # whatever a peer can bring about, it is this peer's end alone
            self._refuse(one, _explained(error))

    def expire(self) -> None:
        """Those whose time is up."""
        now = time.monotonic()
        for one in [one for one in self._all.values() if one.deadline < now]:
            self._refuse(one, "it did not introduce itself in time")

    def _next_to_go(self) -> Stranger:
        groups = Counter(_neighbourhood(one.peer[0]) for one in self._all.values())
        group, count = groups.most_common(1)[0]
        crowded = count > len(self._all) // 2
        return next(one for one in self._all.values() if not crowded or _neighbourhood(one.peer[0]) == group)

    def _let_go(self, one: Stranger) -> None:
        """It has left. One that has said nothing was only a look whether somebody listens, such as a health check's."""
        if one.proven or not one.has_spoken:
            self.release(one)
            one.stream.socket.close()
        else:
            self._refuse(one, "it left without having proven the token")

    def release(self, one: Stranger) -> None:
        """From now on it is somebody else's."""
        if self._all.pop(one.stream.socket, None) is not None:
            self._selector.unregister(one.stream.socket)

    def _refuse(self, one: Stranger, reason: str) -> None:
        self.release(one)
        one.stream.socket.close()
        self._refusals.add(one.peer[0], reason)


def peer_of(address: tuple[Any, ...]) -> tuple[str, int]:
    """A socket's address as host and port, an IPv4 one also where both kinds are listened for."""
    return str(address[0]).removeprefix("::ffff:").partition("%")[0], int(address[1])


def _neighbourhood(address: str) -> str:
    """Addresses that one attacker is likely to have together."""
    known = ipaddress.ip_address(address)
    if known.is_loopback:
        return "loopback"
    return str(ipaddress.ip_network(f"{address}/{24 if known.version == 4 else 64}", strict=False))


def _explained(error: Exception) -> str:
    if not isinstance(error, ssl.SSLError):
        return str(error) if isinstance(error, (OSError, Unexpected)) else repr(error)
    reasons = {
        "PEER_DID_NOT_RETURN_A_CERTIFICATE": "it has no certificate",
        "CERTIFICATE_VERIFY_FAILED": "its certificate is not of this run's token",
        "TLSV1_ALERT_UNKNOWN_CA": "it does not trust this server: it has another token",
        "SSLV3_ALERT_BAD_CERTIFICATE": "it does not trust this server: it has another token",
        "TLSV1_ALERT_DECRYPT_ERROR": "it does not trust this server: it has another token",
        "UNSUPPORTED_PROTOCOL": "it speaks an older TLS than 1.3",
    }
    reason = getattr(error, "reason", None) or type(error).__name__
    return reasons.get(reason, f"it does not speak TLS as a worker does ({reason})")
