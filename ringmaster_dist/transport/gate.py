"""The server's end of the tunnel: the one port of a run that others can reach. A process of its own, without torch.

A connection has to prove the token (TLS with both certificates) and to introduce itself within a time limit; only then
a connection to the server's RPC agent is made for it, which the agent accepts from this process alone. From then on the
relay carries bytes both ways, and what comes from the worker passes the sieve.

Strangers cost little: one thread looks after all who have not proven anything, at most `_MOST_UNPROVEN` of them, and
they use this process's file descriptors, not the server's. When it is full, the address with the most of them loses its
oldest. If this process is killed, the server starts another; workers reconnect.

It talks to the server over its standard input, a socket: settings come in, counts go out, and the end of the socket is
the end of this process.
"""

from __future__ import annotations

import json
import logging
import resource
import selectors
import socket
import ssl
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ringmaster_dist.logs import log_as_told
from ringmaster_dist.transport import sieve, sockets, tensorpipe
from ringmaster_dist.transport.identity import ABOUT, server_context
from ringmaster_dist.transport.refusals import Refusals
from ringmaster_dist.transport.relay import Pair, Relay
from ringmaster_dist.transport.streams import PIECE_BYTES, PlainStream, TlsStream, read_frame, shut, tune
from ringmaster_dist.transport.tensorpipe import LENGTH_BYTES, Unexpected

log = logging.getLogger(__name__)

_MOST_UNPROVEN = 128
_MOST_GREETING_BYTES = 256
_KEPT_DESCRIPTORS = 32  # for everything that is not a connection
_REPORT_SECONDS = 0.2
_FAREWELL_SECONDS = 1.0
_ANSWER_SECONDS = 10.0
_STORE_HELLO = b"\x00\xce\xf7\x85\x3c"  # how a client of torch's TCPStore begins


@dataclass(frozen=True)
class Settings:
    """What the server tells this process."""

    token: str
    tls: bool
    handshake_seconds: float
    tensor_bytes: float  # a worker's largest tensor
    key: str  # to the agent's listener, hexadecimal
    torch: str  # its version, for error messages
    about: dict[str, Any]  # what a holder of the token may ask for


@dataclass
class Unproven:
    """A connection that has not introduced itself yet."""

    stream: PlainStream | TlsStream
    peer: tuple[str, int]
    deadline: float
    proven: bool  # the token; always, where there is no TLS
    received: bytearray
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


class Gate:
    """`run` is the process's main thread and serves the unproven; the relay has threads of its own for the others."""

    def __init__(self, public: socket.socket, agent: socket.socket, control: socket.socket, settings: Settings) -> None:
        self._public, self._agent, self._control, self._settings = public, agent, control, settings
        self._context = server_context(settings.token) if settings.tls else None
        self._selector = selectors.DefaultSelector()
        self._unproven: dict[socket.socket, Unproven] = {}
        self._by_address: Counter[str] = Counter()
        self._refusals = Refusals(log)
        self._relay = Relay()
        self._num_pipes = 0
        self._lock = threading.Lock()
        self._further: dict[int, tuple[sieve.Pipe, str, type[sieve.Sieve]]] = {}  # connections that are expected
        self._most_open = (_raise_limit() - _KEPT_DESCRIPTORS - _MOST_UNPROVEN) // 2

    def run(self) -> None:
        """Until the server closes the control socket."""
        self._check_agent()
        self._relay.start()
        self._public.setblocking(False)
        self._selector.register(self._public, selectors.EVENT_READ)
        self._selector.register(self._control, selectors.EVENT_READ)
        told: dict[str, int] = {}
        next_report = 0.0
        while True:
            for key, _ in self._selector.select(_REPORT_SECONDS):
                if key.fileobj is self._control:
                    self._say_goodbye()
                    return
                if key.fileobj is self._public:
                    self._accept()
                else:
                    self._listen_to(self._unproven[key.fileobj])  # type: ignore[index]
            now = time.monotonic()
            for one in [one for one in self._unproven.values() if one.deadline < now]:
                self._refuse(one, "it did not introduce itself in time")
            if now >= next_report:
                next_report = now + _REPORT_SECONDS
                self._refusals.report()
                counts = {"pipes": self._num_pipes, "refused": self._refusals.total, **self._relay.carried}
                if counts != told:
                    told = counts
                    self._tell(counts)

    def _tell(self, facts: dict[str, Any]) -> None:
        try:
            self._control.sendall(json.dumps(facts).encode() + b"\n")
        except OSError:  # the server has gone: the next look at the socket says so
            return

    def _check_agent(self) -> None:
        """That the agent answers as it is known to. Raises Unexpected or OSError."""
        with sockets.connect_alone(self._agent, bytes.fromhex(self._settings.key)) as connection:
            connection.settimeout(_ANSWER_SECONDS)
            connection.sendall(tensorpipe.opening("probe"))
            answer = tensorpipe.read_answer(read_frame(PlainStream(connection)))
        host, port = self._agent.getsockname()
        if answer.address != f"{host}:{port}":
            raise Unexpected(f"an agent at {host}:{port} that says it is at {answer.address}")

    def _say_goodbye(self) -> None:
        """What the agent has sent last is still delivered."""
        deadline = time.monotonic() + _FAREWELL_SECONDS
        while self._relay.num_open and time.monotonic() < deadline:
            time.sleep(0.01)

    # --- those that have not proven themselves --------------------------------------------------------------

    def _accept(self) -> None:
        try:
            connection, address = self._public.accept()
        except OSError:  # it has gone again
            return
        peer = _peer(address)
        if len(self._unproven) >= _MOST_UNPROVEN:
            busiest, _ = self._by_address.most_common(1)[0]
            oldest = next(one for one in self._unproven.values() if one.peer[0] == busiest)
            self._refuse(oldest, "others came, and it had not introduced itself yet")
        connection.setblocking(False)
        tune(connection)
        stream: PlainStream | TlsStream = PlainStream(connection)
        if self._context is not None:
            stream = TlsStream(connection, self._context, server_side=True)
        deadline = time.monotonic() + self._settings.handshake_seconds
        self._unproven[connection] = Unproven(stream, peer, deadline, self._context is None, bytearray())
        self._by_address[peer[0]] += 1
        self._selector.register(connection, selectors.EVENT_READ)

    def _listen_to(self, one: Unproven) -> None:
        try:
            data = one.stream.socket.recv(PIECE_BYTES)
            if not data:
                if one.proven or not one.has_spoken:  # a look whether somebody listens, such as a health check's
                    self._drop(one)
                    one.stream.socket.close()
                else:
                    self._refuse(one, "it left without having proven the token")
                return
            first, one.has_spoken = not one.has_spoken, True
            if first and data.startswith(_STORE_HELLO):
                raise Unexpected("it speaks as a worker of ringmaster 0.1 does, without TLS")
            if isinstance(one.stream, TlsStream):
                one.stream.feed(data)
                one.proven = one.proven or one.stream.handshake()
                data = one.stream.take() if one.proven else b""
            one.received += data
            if one.proven:
                self._introduce(one)
        except BlockingIOError:
            return
        except ssl.SSLError as error:
            self._refuse(one, _explained(error))
        except (OSError, Unexpected) as error:
            self._refuse(one, str(error))

    def _introduce(self, one: Unproven) -> None:
        """Once its first frame is there, it gets its connection to the agent. Raises Unexpected or OSError."""
        if isinstance(one.stream, TlsStream) and one.stream.purpose == ABOUT:
            one.stream.send(json.dumps({**self._settings.about, "time": time.time()}).encode())
            self._drop(one)
            shut(one.stream.socket)
            return
        frame = one.greeting
        if frame is None:
            return
        greeting = tensorpipe.read_greeting(frame)
        if self._relay.num_open >= self._most_open:
            raise Unexpected(f"there are {self._most_open} connections already, as many as file descriptors allow")
        if greeting.name is not None:
            owner = _owner(one.stream.socket, one.peer)
            is_local = one.peer[0] == _peer(one.stream.socket.getsockname())[0]
            pipe = sieve.Pipe(_printable(greeting.name), self._settings.tensor_bytes, owner, is_local)
            kind: type[sieve.Sieve] = sieve.Calls
            self._num_pipes += 1
        else:
            pipe, kind = self._expected(greeting.registration, one.peer[0])
        connection = tune(sockets.connect_alone(self._agent, bytes.fromhex(self._settings.key)))
        connection.sendall(tensorpipe.framed(frame))
        self._drop(one)

        def answered(answer: tensorpipe.Answer) -> bytes:
            if "cma" in answer.channels and not pipe.shares_memory:
                raise Unexpected("a brochure that lets the agent share memory with another machine")
            with self._lock:
                self._further.update({n: (pipe, one.peer[0], kind) for n, kind in sieve.sieves_of(answer).items()})
            return answer.frame

        back = sieve.Answered(pipe, answered) if kind is sieve.Calls else sieve.Everything(pipe)
        rest = bytes(one.received[LENGTH_BYTES + len(frame) :])

        def ended(reason: str) -> None:
            self._forget(pipe)
            if reason:
                log.warning("server: worker %s at %s:%d was cut off: it sent %s", pipe.name, *one.peer, reason)

        pair = Pair(one.stream, PlainStream(connection), kind(pipe), back, rest, ended)
        self._relay.add(pair, big=kind is sieve.Tensors)

    def _forget(self, pipe: sieve.Pipe) -> None:
        """TensorPipe gives up a pipe as a whole, so what was expected of it will not come."""
        with self._lock:
            for number in [number for number, (owner, _, _) in self._further.items() if owner is pipe]:
                del self._further[number]

    def _expected(self, number: int | None, address: str) -> tuple[sieve.Pipe, type[sieve.Sieve]]:
        with self._lock:
            pipe, expected_address, kind = self._further.get(number, (None, "", sieve.Silence))  # type: ignore[arg-type]
            if pipe is None or expected_address != address:
                raise Unexpected("it claims a further connection that nobody expects from it")
            del self._further[number]  # type: ignore[arg-type]
        return pipe, kind

    def _drop(self, one: Unproven) -> None:
        self._selector.unregister(one.stream.socket)
        del self._unproven[one.stream.socket]
        self._by_address -= Counter([one.peer[0]])

    def _refuse(self, one: Unproven, reason: str) -> None:
        self._drop(one)
        one.stream.socket.close()
        self._refusals.add(one.peer[0], reason)


def _peer(address: tuple[Any, ...]) -> tuple[str, int]:
    return str(address[0]).removeprefix("::ffff:"), int(address[1])


def _raise_limit() -> int:
    """As many file descriptors as this process may have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = min(hard, 1 << 20) if hard != resource.RLIM_INFINITY else 1 << 20
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return limit


def _owner(connection: socket.socket, peer: tuple[str, int]) -> Callable[[int], bool]:
    """Whether a process of this machine is the one at the other end of a connection."""
    own = _peer(connection.getsockname())
    known: dict[int, bool] = {}  # a worker sends the same number each time

    def owns(process: int) -> bool:
        if process not in known:
            known.clear()
            known[process] = sockets.process_has(process, peer, own)
        return known[process]

    return owns


def _printable(name: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in name[:64])


def _explained(error: ssl.SSLError) -> str:
    reasons = {
        "PEER_DID_NOT_RETURN_A_CERTIFICATE": "it has no certificate",
        "CERTIFICATE_VERIFY_FAILED": "its certificate is not of this run's token",
        "TLSV1_ALERT_UNKNOWN_CA": "it does not trust this server: it has another token",
        "SSLV3_ALERT_BAD_CERTIFICATE": "it does not trust this server: it has another token",
        "TLSV1_ALERT_DECRYPT_ERROR": "it does not trust this server: it has another token",
        "UNSUPPORTED_PROTOCOL": "it speaks an older TLS than 1.3",
    }
    return reasons.get(error.reason or "", f"it does not speak TLS as a worker does ({error.reason})")


def main() -> int:
    """Started by `star.Host` with two listening sockets: the public one, and the agent's."""
    log_as_told()
    with open("/proc/self/comm", "w") as comm:
        comm.write("gate")
    public, agent = (socket.socket(fileno=int(word)) for word in sys.argv[1:])
    control = socket.socket(fileno=0)
    settings = Settings(**json.loads(control.makefile("r").readline()))
    gate = Gate(public, agent, control, settings)
    try:
        gate.run()
    except (Unexpected, OSError) as error:
        gate._tell({"failed": f"torch {settings.torch} does not answer as it is known to: {error}"})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
