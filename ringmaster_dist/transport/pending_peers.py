"""Peers that have not proven the token yet: accepted, read without blocking, evicted soon. One thread uses all of this.

There are at most `MOST_PENDING` of them. When one more connects, the oldest is evicted. If more than half come from one
subnet, the oldest of that subnet is evicted. To keep a worker out, an attacker has to open `MOST_PENDING` connections
during one handshake, again and again, from many networks.
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

from ringmaster_dist.transport.streams import PIECE_BYTES, Stream, TlsStream, tune
from ringmaster_dist.transport.tensorpipe import LENGTH_BYTES, ProtocolError

log = logging.getLogger(__name__)

MOST_PENDING = 128
_MOST_GREETING_BYTES = 256
_MOST_KINDS = 1000  # of refusals that are counted between two log lines
_PAUSE_SECONDS = 0.01  # after a failed accept, such as one without a free descriptor, the thread sleeps this long
_LOG_SECONDS = 10.0  # between two log lines about refused peers
_STORE_HELLO = b"\x00\xce\xf7\x85\x3c"  # the first bytes of a client of torch's TCPStore
_TLS_REASONS = {
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "it has no certificate",
    "CERTIFICATE_VERIFY_FAILED": "its certificate is not of this run's token",
    "TLSV1_ALERT_UNKNOWN_CA": "it does not trust this server: it has another token",
    "SSLV3_ALERT_BAD_CERTIFICATE": "it does not trust this server: it has another token",
    "TLSV1_ALERT_DECRYPT_ERROR": "it does not trust this server: it has another token",
    "UNSUPPORTED_PROTOCOL": "it speaks an older TLS than 1.3",
}


@dataclass
class PendingPeer:
    """A connection whose greeting has not arrived yet."""

    stream: Stream
    address: tuple[str, int]
    deadline: float
    has_proven_token: bool  # always True without TLS
    received: bytearray = field(default_factory=bytearray)
    has_sent: bool = False

    @property
    def greeting(self) -> bytes | None:
        """The first frame, once it is whole. Raises ProtocolError."""
        if len(self.received) < LENGTH_BYTES:
            return None
        (length,) = struct.unpack_from("<Q", self.received)
        if length > _MOST_GREETING_BYTES:
            raise ProtocolError("it does not begin with a greeting")
        is_whole = len(self.received) >= LENGTH_BYTES + length
        return bytes(self.received[LENGTH_BYTES : LENGTH_BYTES + length]) if is_whole else None

    def read(self) -> bool:
        """Reads what has arrived. Returns False at the end of the stream. Raises OSError, ProtocolError."""
        data = self.stream.socket.recv(PIECE_BYTES)
        if not data:
            return False
        if not self.has_sent and data.startswith(_STORE_HELLO):
            raise ProtocolError("it speaks as a worker of ringmaster 0.1 does, without TLS")
        self.has_sent = True
        self.stream.feed(data)
        if isinstance(self.stream, TlsStream):
            self.has_proven_token = self.has_proven_token or self.stream.handshake()
        while self.has_proven_token and (piece := self.stream.take()):
            self.received += piece
        return True


class PendingPeers:
    """``on_proven`` is called each time a peer that has proven the token has sent something, until its `release`."""

    def __init__(
        self, selector: selectors.BaseSelector, context: ssl.SSLContext | None, handshake_seconds: float,
        on_proven: Callable[[PendingPeer], None],
    ) -> None:  # fmt: skip
        self._selector, self._context, self._seconds = selector, context, handshake_seconds
        self._on_proven = on_proven
        self._peers: dict[socket.socket, PendingPeer] = {}  # from the oldest to the newest
        self.num_refused = 0
        self._unreported: Counter[tuple[str, str]] = Counter()  # refusals by address and reason
        self._next_report = 0.0

    def accept(self, public: socket.socket) -> None:
        try:
            connection, address = public.accept()
        except OSError as error:  # the peer has left already, or there are too many open files
            log.debug("a connection was not accepted: %s", error)
            time.sleep(_PAUSE_SECONDS)
            return
        try:
            if len(self._peers) >= MOST_PENDING:
                self._refuse(self._next_to_evict(), "others came, and it had not introduced itself yet")
            connection.setblocking(False)
            stream: Stream = Stream(tune(connection))
            if self._context is not None:
                stream = TlsStream(connection, self._context, server_side=True)
            deadline = time.monotonic() + self._seconds
            self._selector.register(connection, selectors.EVENT_READ)
            self._peers[connection] = PendingPeer(stream, address_of(address), deadline, self._context is None)
        except OSError as error:
            log.debug("a connection was given up at once: %s", error)
            connection.close()

    def read(self, connection: socket.socket) -> None:
        """Reads from one peer that has sent something. Whatever goes wrong ends that peer's connection alone."""
        peer = self._peers.get(connection)
        if peer is None:  # it was evicted a moment ago
            return
        try:
            if not peer.read():
                self._drop(peer)
            elif peer.has_proven_token:
                self._on_proven(peer)
        except BlockingIOError:
            return
        except Exception as error:
            self._refuse(peer, _explain(error))

    def expire(self) -> None:
        """Refuses the peers whose time is over, and writes the log line that is due."""
        now = time.monotonic()
        for peer in [peer for peer in self._peers.values() if peer.deadline < now]:
            self._refuse(peer, "it did not introduce itself in time")
        self._report()

    def release(self, peer: PendingPeer) -> None:
        """From now on the connection belongs to the caller."""
        if self._peers.pop(peer.stream.socket, None) is not None:
            self._selector.unregister(peer.stream.socket)

    def _next_to_evict(self) -> PendingPeer:
        subnets = Counter(_subnet(peer.address[0]) for peer in self._peers.values())
        subnet, count = subnets.most_common(1)[0]
        is_crowded = count > len(self._peers) // 2
        return next(peer for peer in self._peers.values() if not is_crowded or _subnet(peer.address[0]) == subnet)

    def _drop(self, peer: PendingPeer) -> None:
        """The peer has left. If it has sent nothing, it was only a probe, such as a health check."""
        if peer.has_proven_token or not peer.has_sent:
            self.release(peer)
            peer.stream.socket.close()
        else:
            self._refuse(peer, "it left without having proven the token")

    def _refuse(self, peer: PendingPeer, reason: str) -> None:
        self.release(peer)
        peer.stream.socket.close()
        self.num_refused += 1
        if len(self._unreported) < _MOST_KINDS:
            self._unreported[peer.address[0], reason] += 1
        self._report()

    def _report(self) -> None:
        """Logs the first refusal at once and the others as a count, so that peers cannot fill the log."""
        now = time.monotonic()
        if not self._unreported or now < self._next_report:
            return
        self._next_report = now + _LOG_SECONDS
        count = sum(self._unreported.values())
        (address, reason), most = self._unreported.most_common(1)[0]
        others = f" and {count - 1:,} more, {most:,} of them like it" if count > 1 else ""
        log.warning("server: refused a peer at %s%s: %s (%d in all)", address, others, reason, self.num_refused)
        self._unreported.clear()


def address_of(address: tuple[Any, ...]) -> tuple[str, int]:
    """A socket's address as host and port. An IPv4 host is written as such also on a dual-stack socket."""
    return str(address[0]).removeprefix("::ffff:").partition("%")[0], int(address[1])


def _subnet(address: str) -> str:
    """Addresses that one attacker is likely to have together."""
    known = ipaddress.ip_address(address)
    if known.is_loopback:
        return "loopback"
    return str(ipaddress.ip_network(f"{address}/{24 if known.version == 4 else 64}", strict=False))


def _explain(error: Exception) -> str:
    if not isinstance(error, ssl.SSLError):
        return str(error) if isinstance(error, (OSError, ProtocolError)) else repr(error)
    reason = getattr(error, "reason", None) or type(error).__name__
    return _TLS_REASONS.get(reason, f"it does not speak TLS as a worker does ({reason})")
