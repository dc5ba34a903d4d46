"""The server's end of the tunnel. It owns the one public port of a run. It is a process of its own, without torch.

A peer has to prove the token (TLS with both certificates) and to introduce itself within a time limit. Only then the
gate connects to the server's RPC agent, which accepts connections from the gate alone. After that the relay carries the
bytes both ways, and a message filter checks what comes from the worker.

An unproven peer costs little. One thread serves all of them (pending_peers.py), and they use this process's file
descriptors, not the server's. If this process is killed, the server starts another and the workers reconnect.

Its standard input is a socket to the server. Settings come in, counts go out, and this process ends when the server
closes the socket.
"""

from __future__ import annotations

import functools
import json
import logging
import selectors
import socket
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from ringmaster_dist.logs import set_up_logging
from ringmaster_dist.transport import loopback, message_filter, tensorpipe
from ringmaster_dist.transport.identity import ABOUT, server_context
from ringmaster_dist.transport.message_filter import Filter, Pipe, further_filters
from ringmaster_dist.transport.pending_peers import MOST_PENDING, PendingPeer, PendingPeers, address_of
from ringmaster_dist.transport.process_settings import name_process, raise_descriptor_limit
from ringmaster_dist.transport.relay import Pair, Relay, Side
from ringmaster_dist.transport.streams import Stream, TlsStream, read_frame, shut, tune
from ringmaster_dist.transport.tensorpipe import LENGTH_BYTES, ProtocolError

log = logging.getLogger(__name__)

_KEPT_DESCRIPTORS = 32  # for everything that is not a connection
_REPORT_SECONDS = 0.2  # between two reports of the counts to the server
_FLUSH_SECONDS = 1.0  # at the end, the agent's last answers may take this long to be delivered
_ANSWER_SECONDS = 10.0  # at the start, the agent may take this long to answer


@dataclass(frozen=True)
class Settings:
    """What the server sends to this process at its start."""

    token: str
    tls: bool
    handshake_seconds: float  # a peer has to introduce itself within this time
    tensor_bytes: float  # a worker's largest tensor
    most_pipes: int  # as many workers as the server has file descriptors for
    key: str  # to the agent's listener, hexadecimal
    torch: str  # its version, for error messages
    about: dict[str, Any]  # what a holder of the token may ask for


class Gate:
    """`run` is the process's main thread and serves pending peers. The relay's threads serve the others."""

    def __init__(self, public: socket.socket, agent: socket.socket, control: socket.socket, settings: Settings) -> None:
        self._public, self._agent, self._control, self._settings = public, agent, control, settings
        self._selector = selectors.DefaultSelector()
        context = server_context(settings.token) if settings.tls else None
        self._pending = PendingPeers(self._selector, context, settings.handshake_seconds, self._admit)
        self._relay = Relay()
        self._num_pipes = 0  # all pipes so far
        self._lock = threading.Lock()  # protects the next three, which the relay's threads change
        self._open_pipes = 0
        self._further: dict[int, tuple[Pipe, str, type[Filter]]] = {}  # further connections that are expected
        self._orphans: deque[int] = deque()  # further connections that will not come, but that the agent waits for
        self._most_open = (raise_descriptor_limit() - _KEPT_DESCRIPTORS - MOST_PENDING) // 2

    def check_agent(self) -> None:
        """Checks that the agent answers as it is known to. Raises ProtocolError or OSError."""
        with self._connect() as connection:
            connection.settimeout(_ANSWER_SECONDS)
            connection.sendall(tensorpipe.opening("probe"))
            answer = tensorpipe.read_answer(read_frame(Stream(connection)))
            self._orphans.extend(further_filters(answer))
            self._complete_orphans()
        host, port = self._agent.getsockname()
        if answer.address != f"{host}:{port}":
            raise ProtocolError(f"an agent at {host}:{port} that says it is at {answer.address}")

    def run(self) -> None:
        """Runs until the server closes the control socket."""
        self._public.setblocking(False)
        self._selector.register(self._public, selectors.EVENT_READ)
        self._selector.register(self._control, selectors.EVENT_READ)
        reported: dict[str, int] = {}
        next_report = 0.0
        while True:
            if time.monotonic() >= next_report:  # the first one tells the server that workers may come
                next_report = time.monotonic() + _REPORT_SECONDS
                counts = {"pipes": self._num_pipes, "refused": self._pending.num_refused, **self._relay.carried}
                if counts != reported:
                    reported = counts
                    self.report(counts)
            for key, _ in self._selector.select(_REPORT_SECONDS):
                if key.fileobj is self._control:
                    self._flush()
                    return
                if key.fileobj is self._public:
                    self._pending.accept(self._public)
                else:
                    self._pending.read(key.fileobj)  # type: ignore[arg-type]
            self._pending.expire()
            self._complete_orphans()

    def report(self, facts: dict[str, Any]) -> None:
        """Sends a line to the server."""
        try:
            self._control.sendall(json.dumps(facts).encode() + b"\n")
        except OSError:  # the server has gone, which the next look at the socket shows
            return

    def _flush(self) -> None:
        """Waits until the relay has no open connection, so that the agent's last answers are delivered."""
        deadline = time.monotonic() + _FLUSH_SECONDS
        while self._relay.num_open and time.monotonic() < deadline:
            time.sleep(0.01)

    def _connect(self) -> socket.socket:
        return loopback.connect_alone(self._agent, bytes.fromhex(self._settings.key))

    # --- peers that have proven the token --------------------------------------------------------------------

    def _admit(self, peer: PendingPeer) -> None:
        """Connects a peer whose greeting has arrived to the agent. Raises ProtocolError or OSError."""
        if isinstance(peer.stream, TlsStream) and peer.stream.purpose == ABOUT:
            peer.stream.send(json.dumps({**self._settings.about, "time": time.time()}).encode())
            self._pending.release(peer)
            shut(peer.stream.socket)
            return
        frame = peer.greeting
        if frame is None:
            return
        greeting = tensorpipe.read_greeting(frame)
        kind: type[Filter]
        if isinstance(greeting, str):
            pipe, kind = self._new_pipe(_printable(greeting), peer), message_filter.CallFilter
        else:
            pipe, kind = self._expected(greeting, peer.address[0])
        try:
            connection = tune(self._connect())
            connection.sendall(tensorpipe.framed(frame))
        except OSError:
            self._ended(pipe, kind, peer, "")
            raise
        back = message_filter.AllPasses(pipe)
        if kind is message_filter.CallFilter:
            back = message_filter.AnswerFilter(pipe, lambda answer: self._answered(pipe, peer.address[0], answer))
        rest = bytes(peer.received[LENGTH_BYTES + len(frame) :])
        outside, inside = Side(peer.stream, kind(pipe)), Side(Stream(connection), back)
        pair = Pair(outside, inside, lambda reason: self._ended(pipe, kind, peer, reason), rest)
        self._pending.release(peer)
        self._relay.add(pair, big=kind is message_filter.TensorFilter)

    def _new_pipe(self, name: str, peer: PendingPeer) -> Pipe:
        with self._lock:
            if self._open_pipes >= self._settings.most_pipes or self._relay.num_open + 4 > self._most_open:
                raise ProtocolError(f"there are {self._open_pipes} workers already, as many as file descriptors allow")
            self._open_pipes += 1
        self._num_pipes += 1
        own = address_of(peer.stream.socket.getsockname())
        # A worker sends the same process id with each tensor.
        owns_process = functools.lru_cache(maxsize=1)(lambda pid: loopback.process_has(pid, peer.address, own))
        return Pipe(name, self._settings.tensor_bytes, owns_process, shares_memory=peer.address[0] == own[0])

    def _expected(self, number: int, host: str) -> tuple[Pipe, type[Filter]]:
        with self._lock:
            if number not in self._further or self._further[number][1] != host:
                raise ProtocolError("it claims a further connection that nobody expects from it")
            pipe, _, kind = self._further.pop(number)
        return pipe, kind

    # --- called by the relay's threads -----------------------------------------------------------------------

    def _answered(self, pipe: Pipe, host: str, answer: tensorpipe.Answer) -> bytes:
        if "cma" in answer.channels and not pipe.shares_memory:
            raise ProtocolError("a brochure that lets the agent share memory with another machine")
        with self._lock:
            self._further.update({n: (pipe, host, kind) for n, kind in further_filters(answer).items()})
        return answer.frame

    def _ended(self, pipe: Pipe, kind: type[Filter], peer: PendingPeer, reason: str) -> None:
        """TensorPipe gives up a pipe as a whole, so its further connections that are still expected will not come."""
        with self._lock:
            orphans = [number for number, (owner, _, _) in self._further.items() if owner is pipe]
            for number in orphans:
                del self._further[number]
            self._orphans.extend(orphans)
            if kind is message_filter.CallFilter:
                self._open_pipes -= 1
        if reason:
            log.warning("server: worker %s at %s:%d was cut off: it sent %s", pipe.name, *peer.address, reason)

    def _complete_orphans(self) -> None:
        """The agent keeps an incomplete pipe and its descriptors. So the gate makes the connections and ends them."""
        while self._orphans:
            number = self._orphans.popleft()
            try:
                with self._connect() as connection:
                    connection.sendall(tensorpipe.framed(tensorpipe.registration(number)))
            except OSError as error:
                log.debug("an incomplete pipe stays as it is: %s", error)


def _printable(name: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in name[:64])


def main() -> int:
    """`Host` starts this with two listening sockets: the public one and the agent's. Returns the exit code."""
    set_up_logging()
    name_process("gate")
    public, agent = (socket.socket(fileno=int(word)) for word in sys.argv[1:])
    control = socket.socket(fileno=0)
    settings = Settings(**json.loads(control.makefile("r").readline()))
    gate = Gate(public, agent, control, settings)
    try:
        gate.check_agent()
    except (ProtocolError, OSError) as error:
        gate.report({"failed": f"torch {settings.torch} does not answer as it is known to: {error}"})
        return 1
    gate.run()
    return 0
