"""Peers that have not proven the token yet: accepted, read without blocking, evicted soon. One thread uses all of this.

There are a limited number of them, most for those that have begun to speak. When one more connects or begins to speak
than there is room for, the oldest of its kind is evicted. If more than half of a kind come from one subnet, it is one
of that subnet. A worker speaks as soon as it is connected, and needs one round trip more. To keep it out, an attacker
has to begin `MOST_PENDING` handshakes during that time, again and again, from many networks.
"""

from __future__ import annotations

import ipaddress
import logging
import selectors
import socket
import ssl
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from ringmaster_dist.addresses import address_of, joined
from ringmaster_dist.transport.streams import PIECE_BYTES, Stream, TlsStream, tune
from ringmaster_dist.transport.tensorpipe import LENGTH_BYTES, ProtocolError

log = logging.getLogger(__name__)

MOST_PENDING = 2048
_SILENT = 4  # one in so many of them may be silent
_MOST_GREETING_BYTES = 256
_MOST_KINDS = 1000  # of refusals that are counted between two log lines
_PAUSE_SECONDS = 0.01  # after a failed accept, such as one without a free descriptor, the thread sleeps this long
_LOG_SECONDS = 10.0  # between two log lines about refused peers
_MOST_CUTS = 50  # lines about workers that were cut off, during this time
_TLS_REASONS = {
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "it has no certificate",
    "CERTIFICATE_VERIFY_FAILED": "its certificate is not of this run's token",
    "UNSUPPORTED_PROTOCOL": "it speaks an older TLS than 1.3",
    **dict.fromkeys(("TLSV1_ALERT_UNKNOWN_CA", "SSLV3_ALERT_BAD_CERTIFICATE", "TLSV1_ALERT_DECRYPT_ERROR"),
                    "it does not trust this server: it has another token"),
}  # fmt: skip


@dataclass
class PendingPeer:
    """A connection whose greeting has not arrived yet."""

    stream: Stream
    address: tuple[str, int]
    subnet: str
    deadline: float
    has_proven_token: bool  # always True without TLS
    received: bytearray = field(default_factory=bytearray)
    has_sent: bool = False
    process: int = 0  # of a worker of this user on this machine, once it has said that this connection is its own

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

    def read(self, context: ssl.SSLContext | None, buffer: memoryview) -> bool:
        """Reads what has arrived, and begins TLS with the first bytes. Returns False at the end of the stream.

        Raises OSError, ProtocolError.
        """
        data = self.stream.socket.recv(PIECE_BYTES)
        if not data:
            return False
        if not self.has_sent and context is not None:
            self.stream = TlsStream(self.stream.socket, context, server_side=True)
        self.has_sent = True
        self.stream.feed(data)
        if isinstance(self.stream, TlsStream):
            self.has_proven_token = self.has_proven_token or self.stream.handshake()
        while self.has_proven_token and (count := self.stream.take(buffer)):
            self.received += buffer[:count]
        return True


class PendingPeers:
    """``on_proven`` is called each time a peer that has proven the token has sent something, until its `release`."""

    def __init__(
        self, selector: selectors.BaseSelector, context: ssl.SSLContext | None, handshake_seconds: float,
        most: int, on_proven: Callable[[PendingPeer], None],
    ) -> None:  # fmt: skip
        self._selector, self._context, self._seconds = selector, context, handshake_seconds
        self._on_proven = on_proven
        self._silent, self._speaking = _Crowd(most // _SILENT), _Crowd(most - most // _SILENT)
        self._buffer = memoryview(bytearray(PIECE_BYTES))
        self.refusals = Refusals()

    def accept(self, public: socket.socket) -> None:
        try:
            connection, given = public.accept()
        except OSError as error:  # the peer has left already, or there are too many open files
            log.debug("a connection was not accepted: %s", error)
            time.sleep(_PAUSE_SECONDS)
            return
        try:
            connection.setblocking(False)
            address, deadline = address_of(given), time.monotonic() + self._seconds
            peer = PendingPeer(Stream(tune(connection)), address, subnet(address[0]), deadline, self._context is None)
            self._selector.register(connection, selectors.EVENT_READ)
            self._add(peer, self._silent)
        except OSError as error:
            log.debug("a connection was given up at once: %s", error)
            connection.close()

    def read(self, connection: socket.socket) -> None:
        """Reads from one peer that has sent something. Whatever goes wrong ends that peer's connection alone."""
        peer = self._silent.peers.get(connection) or self._speaking.peers.get(connection)
        if peer is None:  # it was evicted a moment ago
            return
        try:
            if not peer.read(self._context, self._buffer):
                self._drop(peer)
            elif peer.has_proven_token:
                self._on_proven(peer)
            if self._silent.remove(peer):
                self._add(peer, self._speaking)
        except BlockingIOError:
            return
        except Exception as error:
            self._refuse(peer, _explain(error))

    def find(self, address: str) -> PendingPeer | None:
        """The peer at a HOST:PORT."""
        both = (*self._silent.peers.values(), *self._speaking.peers.values())
        return next((peer for peer in both if joined(*peer.address) == address), None)

    def expire(self) -> None:
        """Refuses the peers whose time is over, and writes the log line that is due."""
        now = time.monotonic()
        for crowd in (self._silent, self._speaking):
            while (peer := crowd.oldest()) is not None and peer.deadline < now:
                self._refuse(peer, "it did not introduce itself in time")
        self.refusals.report()

    def release(self, peer: PendingPeer) -> None:
        """From now on the connection belongs to the caller."""
        if self._silent.remove(peer) or self._speaking.remove(peer):
            self._selector.unregister(peer.stream.socket)

    def _add(self, peer: PendingPeer, crowd: _Crowd) -> None:
        if len(crowd.peers) >= crowd.most:
            self._refuse(crowd.next_to_evict(), "others came, and it had not introduced itself yet")
        crowd.add(peer)

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
        self.refusals.note(peer.address[0], reason)


class _Crowd:
    """Peers from the oldest to the newest."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.peers: dict[socket.socket, PendingPeer] = {}
        self._subnets: Counter[str] = Counter()

    def add(self, peer: PendingPeer) -> None:
        self.peers[peer.stream.socket] = peer
        self._subnets[peer.subnet] += 1

    def remove(self, peer: PendingPeer) -> bool:
        if self.peers.pop(peer.stream.socket, None) is None:
            return False
        self._subnets[peer.subnet] -= 1
        if not self._subnets[peer.subnet]:
            del self._subnets[peer.subnet]
        return True

    def oldest(self) -> PendingPeer | None:
        return next(iter(self.peers.values()), None)

    def next_to_evict(self) -> PendingPeer:
        crowded, count = self._subnets.most_common(1)[0]
        all_alike = count <= len(self.peers) // 2
        return next(peer for peer in self.peers.values() if all_alike or peer.subnet == crowded)


class Refusals:
    """Counts and logs what was refused. Any thread may call this."""

    def __init__(self) -> None:
        self.num = 0
        self._unreported: Counter[tuple[str, str]] = Counter()  # by address and reason
        self._next_report = 0.0
        self._cuts: list[float] = []  # when they were logged
        self._lock = threading.Lock()

    def note(self, address: str, reason: str) -> None:
        with self._lock:
            self.num += 1
            if len(self._unreported) < _MOST_KINDS:
                self._unreported[address, reason] += 1
        self.report()

    def cut(self, worker: str, address: tuple[str, int], reason: str) -> None:
        """Logs why a worker was cut off, if there are not many."""
        with self._lock:
            self._cuts = [moment for moment in self._cuts if moment > time.monotonic() - _LOG_SECONDS]
            is_one_of_many = len(self._cuts) >= _MOST_CUTS
            if not is_one_of_many:
                self._cuts.append(time.monotonic())
        if is_one_of_many:
            self.note(address[0], f"a worker was cut off: {reason}")
        else:
            log.warning("server: worker %s at %s:%d was cut off: %s", worker, *address, reason)

    def report(self) -> None:
        """Logs the first refusal at once and the others as a count, so that peers cannot fill the log."""
        now = time.monotonic()
        with self._lock:
            if not self._unreported or now < self._next_report:
                return
            self._next_report = now + _LOG_SECONDS
            count = sum(self._unreported.values())
            (address, reason), most = self._unreported.most_common(1)[0]
            self._unreported.clear()
        others = f" and {count - 1:,} more, {most:,} of them like it" if count > 1 else ""
        log.warning("server: refused a peer at %s%s: %s (%d in all)", address, others, reason, self.num)


def subnet(address: str, bits: int = 24) -> str:
    """Addresses that one attacker is likely to have together: so many equal bits of IPv4, or 64 of IPv6."""
    known = ipaddress.ip_address(address)
    return str(ipaddress.ip_network(f"{address}/{bits if known.version == 4 else 64}", strict=False))


def _explain(error: Exception) -> str:
    if not isinstance(error, ssl.SSLError):
        return str(error) if isinstance(error, (OSError, ProtocolError)) else repr(error)
    reason = getattr(error, "reason", None) or type(error).__name__
    return _TLS_REASONS.get(reason, f"it does not speak TLS as a worker does ({reason})")
