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
from ringmaster_dist.process_settings import name_process, raise_descriptor_limit
from ringmaster_dist.transport import loopback, tensorpipe
from ringmaster_dist.transport.identity import ABOUT, server_context
from ringmaster_dist.transport.message_filter import (
    AllPasses,
    CallFilter,
    Filter,
    Pipe,
    ResultFilter,
    Share,
    TensorFilter,
    further_filters,
)
from ringmaster_dist.transport.pending_peers import MOST_PENDING, PendingPeer, PendingPeers, subnet
from ringmaster_dist.transport.relay import Pair, Relay, Side
from ringmaster_dist.transport.streams import Stream, TlsStream, read_frame, shut, tune
from ringmaster_dist.transport.tensorpipe import LENGTH_BYTES, ProtocolError

log = logging.getLogger(__name__)

_KEPT_DESCRIPTORS = 32  # for everything that is not a connection
_REPORT_SECONDS = 0.2  # between two reports of the counts to the server
_FLUSH_SECONDS = 1.0  # at the end, the agent's last answers may take this long to be delivered
_LEAST_TENSORS, _TENSOR_BYTES = 4, 32 << 20  # on their way at once, to and from one address
_JOIN_SECONDS = 10.0  # between two joins from one address, when many came before
_MOST_SHARES = 10_000
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
    most_from_one_address: int  # pipes of workers that are not of the server's user on its machine


class Gate:
    """`run` is the process's main thread and serves pending peers. The relay's threads serve the others."""

    def __init__(
        self, public: socket.socket, agent: socket.socket, neighbours: socket.socket | None, control: socket.socket,
        settings: Settings,
    ) -> None:  # fmt: skip
        self._public, self._agent, self._control, self._settings = public, agent, control, settings
        self._neighbours = neighbours
        self._selector = selectors.DefaultSelector()
        context = server_context(settings.token) if settings.tls else None
        descriptors = raise_descriptor_limit() - _KEPT_DESCRIPTORS
        most_pending = min(MOST_PENDING, descriptors // 4)
        self._pending = PendingPeers(self._selector, context, settings.handshake_seconds, most_pending, self._admit)
        self._relay = Relay()
        self._num_pipes = 0  # all pipes so far
        self._shares: dict[str, Share] = {}  # by the address that workers have in common
        self._lock = threading.Lock()  # protects the next three, which the relay's threads change
        self._open_pipes: set[Pipe] = set()
        self._further: dict[int, tuple[Pipe, str, Filter]] = {}  # further connections that are expected
        self._orphans: deque[int] = deque()  # further connections that will not come, but that the agent waits for
        self._most_open = (descriptors - most_pending) // 2

    def check_agent(self) -> None:
        """Checks that the agent answers as it is known to. Raises ProtocolError or OSError."""
        with self._connect() as connection:
            connection.settimeout(_ANSWER_SECONDS)
            connection.sendall(tensorpipe.opening("probe"))
            answer = tensorpipe.read_answer(read_frame(Stream(connection)))
            self._orphans.extend((answer.reply, *answer.numbers))
            self._complete_orphans()
        host, port = self._agent.getsockname()
        if answer.address != f"{host}:{port}":
            raise ProtocolError(f"an agent at {host}:{port} that says it is at {answer.address}")

    def run(self) -> None:
        """Runs until the server closes the control socket."""
        self._public.setblocking(False)
        self._selector.register(self._public, selectors.EVENT_READ)
        self._selector.register(self._control, selectors.EVENT_READ)
        if self._neighbours is not None:
            self._selector.register(self._neighbours, selectors.EVENT_READ)
        reported: dict[str, int] = {}
        next_report = 0.0
        while True:
            if time.monotonic() >= next_report:  # the first one tells the server that workers may come
                next_report = time.monotonic() + _REPORT_SECONDS
                counts = {"pipes": self._num_pipes, "refused": self._pending.refusals.num, **self._relay.carried}
                if counts != reported:
                    reported = counts
                    self.report(counts)
            for key, _ in self._selector.select(_REPORT_SECONDS):
                if key.fileobj is self._control:
                    self._flush()
                    return
                if key.fileobj is self._public:
                    self._pending.accept(self._public)
                elif key.fileobj is self._neighbours:
                    loopback.meet(self._neighbours, self._is_here)
                else:
                    self._pending.read(key.fileobj)  # type: ignore[arg-type]
            self._pending.expire()
            self._complete_orphans()
            self._end_slow_pipes()

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

    def _is_here(self, address: str, process: int) -> bool:
        """Notes the process of the peer at this address, if there is such a peer."""
        peer = self._pending.find(address)
        if peer is None:  # without TLS, a peer may be connected and not accepted yet
            self._pending.accept(self._public)
            peer = self._pending.find(address)
        if peer is not None:
            peer.process = process
        return peer is not None

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
        back: Filter = AllPasses()
        if isinstance(greeting, str):
            pipe = self._new_pipe(greeting, peer)
            forth: Filter = CallFilter(pipe)
            back = ResultFilter(pipe, lambda answer: self._answered(pipe, peer.address[0], answer))
        else:
            pipe, forth = self._expected(greeting, peer.address[0])
            if isinstance(forth, TensorFilter):
                back = TensorFilter(pipe.results)
        try:
            connection = tune(self._connect())
            connection.sendall(tensorpipe.framed(frame))
        except OSError:
            self._ended(pipe, forth, peer, "")
            raise
        rest = bytes(peer.received[LENGTH_BYTES + len(frame) :])
        outside, inside = Side(peer.stream, forth), Side(Stream(connection), back)
        pair = Pair(outside, inside, lambda reason: self._ended(pipe, forth, peer, reason), rest)
        if isinstance(forth, CallFilter):
            pipe.end = pair.shut
        self._pending.release(peer)
        self._relay.add(pair, big=isinstance(forth, TensorFilter))

    def _new_pipe(self, name: str, peer: PendingPeer) -> Pipe:
        share = Share() if peer.process else self._share_of(subnet(peer.address[0], 32))
        most = self._settings.most_pipes if peer.process else self._settings.most_from_one_address
        with self._lock:
            num_open = len(self._open_pipes)
            if num_open >= self._settings.most_pipes or self._relay.num_open + 4 > self._most_open:
                raise ProtocolError(f"there are {num_open} workers already, as many as file descriptors allow")
            if share.num_pipes >= most:
                raise ProtocolError(f"there are {most} workers at this address already (server.workers_per_address)")
            pipe = Pipe(name, self._settings.tensor_bytes, share, peer.process)
            self._open_pipes.add(pipe)
            share.num_pipes += 1
        self._num_pipes += 1
        return pipe

    def _share_of(self, address: str) -> Share:
        if len(self._shares) > _MOST_SHARES:
            self._shares = {known: share for known, share in self._shares.items() if share.num_pipes}
        most_tensors = max(_LEAST_TENSORS, _TENSOR_BYTES // max(1, int(self._settings.tensor_bytes)))
        most_joins = 2 * self._settings.most_from_one_address
        return self._shares.setdefault(address, Share(most_tensors, most_joins, _JOIN_SECONDS))

    def _expected(self, number: int, host: str) -> tuple[Pipe, Filter]:
        with self._lock:
            if number not in self._further or self._further[number][1] != host:
                raise ProtocolError("it claims a further connection that nobody expects from it")
            pipe, _, forth = self._further.pop(number)
        return pipe, forth

    # --- called by the relay's threads -----------------------------------------------------------------------

    def _answered(self, pipe: Pipe, host: str, answer: tensorpipe.Answer) -> bytes:
        filters = further_filters(answer, pipe, pipe.calls)
        with self._lock:
            self._further.update({number: (pipe, host, forth) for number, forth in filters.items()})
        return answer.naming(answer.address)

    def _ended(self, pipe: Pipe, forth: Filter, peer: PendingPeer, reason: str) -> None:
        """TensorPipe gives up a pipe as a whole, so its further connections that are still expected will not come."""
        with self._lock:
            orphans = [number for number, (owner, _, _) in self._further.items() if owner is pipe]
            for number in orphans:
                del self._further[number]
            self._orphans.extend(orphans)
            if isinstance(forth, CallFilter):
                self._open_pipes.discard(pipe)
                pipe.share.num_pipes -= 1
                pipe.calls.end()
                pipe.results.end()
        if reason:
            self._pending.refusals.cut(pipe.name, peer.address, f"it sent {reason}")

    def _end_slow_pipes(self) -> None:
        """A tensor on its way takes memory of the agent, so a peer that does not send or read it is given up."""
        now = time.monotonic()
        with self._lock:
            slow = [pipe for pipe in self._open_pipes if min(pipe.calls.deadline, pipe.results.deadline) < now]
        for pipe in slow:
            log.warning("server: worker %s was cut off: it took too long to send or read a tensor", pipe.name)
            pipe.end()

    def _complete_orphans(self) -> None:
        """The agent keeps an incomplete pipe and its descriptors. So the gate makes the connections and ends them."""
        while self._orphans:
            number = self._orphans.popleft()
            try:
                with self._connect() as connection:
                    connection.sendall(tensorpipe.framed(tensorpipe.registration(number)))
            except OSError as error:
                log.debug("an incomplete pipe stays as it is: %s", error)


def main() -> int:
    """`Host` starts this with listening sockets: the public one, the agent's, and one for neighbours if there is one.

    Returns the exit code.
    """
    set_up_logging()
    name_process("gate")
    public, agent, *neighbours = (socket.socket(fileno=int(word)) for word in sys.argv[1:])
    control = socket.socket(fileno=0)
    settings = Settings(**json.loads(control.makefile("r").readline()))
    gate = Gate(public, agent, neighbours[0] if neighbours else None, control, settings)
    try:
        gate.check_agent()
    except (ProtocolError, OSError) as error:
        gate.report({"failed": f"torch {settings.torch} does not answer as it is known to: {error}"})
        return 1
    gate.run()
    return 0
