"""The server's end of the tunnel: the one port of a run that others can reach. A process of its own, without torch.

A connection has to prove the token (TLS with both certificates) and to introduce itself within a time limit; only then
a connection to the server's RPC agent is made for it, which the agent accepts from this process alone. From then on the
relay carries bytes both ways, and what comes from the worker passes the sieve.

Strangers cost little: one thread looks after all of them (strangers.py), and they use this process's file descriptors,
not the server's. If this process is killed, the server starts another; workers reconnect.

It talks to the server over its standard input, a socket: settings come in, counts go out, and the end of the socket is
the end of this process.
"""

from __future__ import annotations

import json
import logging
import resource
import selectors
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ringmaster_dist.logs import log_as_told
from ringmaster_dist.transport import sieve, sockets, strangers, tensorpipe
from ringmaster_dist.transport.identity import ABOUT, server_context
from ringmaster_dist.transport.refusals import Refusals
from ringmaster_dist.transport.relay import Pair, Relay
from ringmaster_dist.transport.strangers import Stranger, Strangers, peer_of
from ringmaster_dist.transport.streams import PlainStream, TlsStream, read_frame, shut, tune
from ringmaster_dist.transport.tensorpipe import LENGTH_BYTES, Unexpected

log = logging.getLogger(__name__)

_KEPT_DESCRIPTORS = 32  # for everything that is not a connection
_REPORT_SECONDS = 0.2
_FAREWELL_SECONDS = 1.0
_ANSWER_SECONDS = 10.0


@dataclass(frozen=True)
class Settings:
    """What the server tells this process."""

    token: str
    tls: bool
    handshake_seconds: float
    tensor_bytes: float  # a worker's largest tensor
    most_pipes: int  # as many as the server has file descriptors for
    key: str  # to the agent's listener, hexadecimal
    torch: str  # its version, for error messages
    about: dict[str, Any]  # what a holder of the token may ask for


class Gate:
    """`run` is the process's main thread and serves strangers; the relay has threads of its own for the others."""

    def __init__(self, public: socket.socket, agent: socket.socket, control: socket.socket, settings: Settings) -> None:
        self._public, self._agent, self._control, self._settings = public, agent, control, settings
        self._selector = selectors.DefaultSelector()
        self._refusals = Refusals(log)
        self._strangers = Strangers(
            self._selector, server_context(settings.token) if settings.tls else None, settings.handshake_seconds,
            self._refusals, self._introduce,
        )  # fmt: skip
        self._relay = Relay()
        self._num_pipes = 0
        self._lock = threading.Lock()  # for what the relay's threads change
        self._open_pipes = 0
        self._further: dict[int, tuple[sieve.Pipe, str, type[sieve.Sieve]]] = {}  # connections that are expected
        self._orphans: deque[int] = deque()  # and those that will not come any more, but that the agent waits for
        self._most_open = (_raise_limit() - _KEPT_DESCRIPTORS - strangers.MOST) // 2

    def check_agent(self) -> None:
        """That the agent answers as it is known to. Raises Unexpected or OSError."""
        with self._connect() as connection:
            connection.settimeout(_ANSWER_SECONDS)
            connection.sendall(tensorpipe.opening("probe"))
            answer = tensorpipe.read_answer(read_frame(PlainStream(connection)))
            self._orphans.extend(sieve.sieves_of(answer))
            self._make_up_for_orphans()
        host, port = self._agent.getsockname()
        if answer.address != f"{host}:{port}":
            raise Unexpected(f"an agent at {host}:{port} that says it is at {answer.address}")

    def run(self) -> None:
        """Until the server closes the control socket."""
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
                    self._strangers.accept(self._public)
                else:
                    self._strangers.hear(key.fileobj)  # type: ignore[arg-type]
            self._strangers.expire()
            self._make_up_for_orphans()
            if time.monotonic() >= next_report:
                next_report = time.monotonic() + _REPORT_SECONDS
                self._refusals.report()
                counts = {"pipes": self._num_pipes, "refused": self._refusals.total, **self._relay.carried}
                if counts != told:
                    told = counts
                    self.tell(counts)

    def tell(self, facts: dict[str, Any]) -> None:
        """The server, something."""
        try:
            self._control.sendall(json.dumps(facts).encode() + b"\n")
        except OSError:  # it has gone: the next look at the socket says so
            return

    def _say_goodbye(self) -> None:
        """Waits a moment for what the agent has sent last to be delivered."""
        deadline = time.monotonic() + _FAREWELL_SECONDS
        while self._relay.num_open and time.monotonic() < deadline:
            time.sleep(0.01)

    def _connect(self) -> socket.socket:
        return sockets.connect_alone(self._agent, bytes.fromhex(self._settings.key))

    # --- those that have proven the token -------------------------------------------------------------------

    def _introduce(self, one: Stranger) -> None:
        """Once its first frame is there, it gets its connection to the agent. Raises Unexpected or OSError."""
        if isinstance(one.stream, TlsStream) and one.stream.purpose == ABOUT:
            one.stream.send(json.dumps({**self._settings.about, "time": time.time()}).encode())
            self._strangers.release(one)
            shut(one.stream.socket)
            return
        frame = one.greeting
        if frame is None:
            return
        greeting = tensorpipe.read_greeting(frame)
        if greeting.name is not None:
            pipe, kind = self._new_pipe(_printable(greeting.name), one), sieve.Calls
        else:
            pipe, kind = self._expected(greeting.registration, one.peer[0])
        try:
            connection = tune(self._connect())
            connection.sendall(tensorpipe.framed(frame))
        except OSError:
            self._ended(pipe, kind, one, "")
            raise
        back = sieve.Everything(pipe)
        if kind is sieve.Calls:
            back = sieve.Answered(pipe, lambda answer: self._answered(pipe, one.peer[0], answer))
        rest = bytes(one.received[LENGTH_BYTES + len(frame) :])
        pair = Pair(one.stream, PlainStream(connection), kind(pipe), back, rest,
                    lambda reason: self._ended(pipe, kind, one, reason))  # fmt: skip
        self._strangers.release(one)
        self._relay.add(pair, big=kind is sieve.Tensors)

    def _new_pipe(self, name: str, one: Stranger) -> sieve.Pipe:
        with self._lock:
            if self._open_pipes >= self._settings.most_pipes or self._relay.num_open + 4 > self._most_open:
                raise Unexpected(f"there are {self._open_pipes} workers already, as many as file descriptors allow")
            self._open_pipes += 1
        self._num_pipes += 1
        own = peer_of(one.stream.socket.getsockname())
        return sieve.Pipe(name, self._settings.tensor_bytes, _owner(one.peer, own), one.peer[0] == own[0])

    def _expected(self, number: int | None, address: str) -> tuple[sieve.Pipe, type[sieve.Sieve]]:
        with self._lock:
            pipe, expected_address, kind = self._further.get(number or 0, (None, "", sieve.Silence))
            if pipe is None or expected_address != address:
                raise Unexpected("it claims a further connection that nobody expects from it")
            del self._further[number or 0]
        return pipe, kind

    # --- called by the relay's threads ----------------------------------------------------------------------

    def _answered(self, pipe: sieve.Pipe, address: str, answer: tensorpipe.Answer) -> bytes:
        if "cma" in answer.channels and not pipe.shares_memory:
            raise Unexpected("a brochure that lets the agent share memory with another machine")
        with self._lock:
            self._further.update({n: (pipe, address, kind) for n, kind in sieve.sieves_of(answer).items()})
        return answer.frame

    def _ended(self, pipe: sieve.Pipe, kind: type[sieve.Sieve], one: Stranger, reason: str) -> None:
        """TensorPipe gives up a pipe as a whole, so what is still expected of it will not come."""
        with self._lock:
            orphans = [number for number, (owner, _, _) in self._further.items() if owner is pipe]
            for number in orphans:
                del self._further[number]
            self._orphans.extend(orphans)
            if kind is sieve.Calls:
                self._open_pipes -= 1
        if reason:
            log.warning("server: worker %s at %s:%d was cut off: it sent %s", pipe.name, *one.peer, reason)

    def _make_up_for_orphans(self) -> None:
        """The agent keeps a pipe, with its descriptors, until all its connections have come: so they come, and end."""
        while self._orphans:
            number = self._orphans.popleft()
            try:
                with self._connect() as connection:
                    connection.sendall(tensorpipe.framed(tensorpipe.registration(number)))
            except OSError as error:
                log.debug("an unfinished pipe stays as it is: %s", error)


def _raise_limit() -> int:
    """As many file descriptors as this process may have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = min(hard, 1 << 20) if hard != resource.RLIM_INFINITY else 1 << 20
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return limit


def _owner(peer: tuple[str, int], own: tuple[str, int]) -> Callable[[int], bool]:
    """Whether a process of this machine is the one at the other end of a connection."""
    known: dict[int, bool] = {}  # a worker sends the same number each time

    def owns(process: int) -> bool:
        if process not in known:
            known.clear()
            known[process] = sockets.process_has(process, peer, own)
        return known[process]

    return owns


def _printable(name: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in name[:64])


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
        gate.check_agent()
    except (Unexpected, OSError) as error:
        gate.tell({"failed": f"torch {settings.torch} does not answer as it is known to: {error}"})
        return 1
    gate.run()
    return 0
