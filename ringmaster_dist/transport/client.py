"""A worker's end of the transport: torch's RPC agent, and the tunnel that carries its bytes to the server's gate.

The agent gets an address on loopback where the tunnel listens while a pipe is opened, and only for sockets of this very
process. One message of TensorPipe names an address: the server's answer to the brochure, which says where the agent has
to open its further connections. The tunnel rewrites it to name its own listener. If the tunnel does not understand the
answer, it forwards nothing. The agent's own listener accepts no connection.
"""

from __future__ import annotations

import logging
import os
import platform
import re
import secrets
import socket
import ssl
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.distributed import rpc

from ringmaster_dist.addresses import address_of, joined, split
from ringmaster_dist.protocol import Interruptions, JoinRequest, Push, Reply, Staleness, Welcome
from ringmaster_dist.transport import (
    AuthenticationFailed,
    Incompatible,
    Unreachable,
    agent,
    identity,
    loopback,
    tensorpipe,
)
from ringmaster_dist.transport.message_filter import (
    AllPasses,
    Filter,
    Pipe,
    ResultFilter,
    TensorFilter,
    further_filters,
)
from ringmaster_dist.transport.relay import Pair, Relay, Side
from ringmaster_dist.transport.streams import Stream, TlsStream, read_frame, shut, tune
from ringmaster_dist.transport.tensorpipe import ProtocolError

log = logging.getLogger(__name__)

_Answer = TypeVar("_Answer", Welcome, Reply)


class Client:
    """A worker's connection: the five calls. The worker's main thread makes them.

    RPC threads also call `await_stale`, when a poll is asked again.

    Every call blocks for at most ``call_seconds``, apart from `await_stale`, which does not block. A call raises
    `Unreachable` if the connection is lost and `Incompatible` if a retry would not help. The constructor blocks for at
    most ``connect_seconds`` per connection and raises `Unreachable` or `AuthenticationFailed`.
    """

    def __init__(
        self, server: str, *, token: str, connect_seconds: float, call_seconds: float, tls: bool = True,
        insecure: bool = False, most_tensor_bytes: float | None = None,
    ) -> None:  # fmt: skip
        """``most_tensor_bytes`` is the longest tensor that the server may send. If it is not known, all memory is."""
        self._server, self._seconds, self.is_proven = server, call_seconds, tls
        context = identity.worker_context(token) if tls else None
        machine = re.sub("[^A-Za-z0-9-]", "-", platform.node())[:64]  # an agent's name may have no other letters
        name = f"{machine}:{os.getpid()}:{secrets.token_hex(8)}"
        first = dial(server, context, connect_seconds)
        process = loopback.greet_neighbour(split(server)[1], joined(*address_of(first.socket.getsockname())))
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        pipe = Pipe("the server", most_tensor_bytes or memory, process=process)
        self._tunnel = Tunnel(first, lambda: dial(server, context, connect_seconds), pipe)
        try:
            agent.start_worker_agent(name, self._tunnel.address, call_seconds, cma=bool(process), insecure=insecure)
        except loopback.NotClosed as error:
            self.close()
            raise AuthenticationFailed(str(error).replace("server.insecure", "insecure")) from error
        except (OSError, RuntimeError) as error:
            self.close()
            raise Unreachable(f"no agent can be started for the server at {server}: {error}") from error

    def close(self) -> None:
        """Drops the connection. Another client may be made in the same process afterwards."""
        agent.stop_agent()
        self._tunnel.close()

    def join(self, request: JoinRequest) -> Welcome:
        return self._checked(Welcome, self._call(agent.join, request))

    def fetch(self, session: str, term: int, known_version: int, interruptions: Interruptions) -> Reply:
        return self._checked(Reply, self._call(agent.fetch, session, term, known_version, interruptions))

    def push(self, session: str, push: Push) -> Reply:
        """Idempotent: a push that is repeated, because a round takes longer than the timeout, counts once."""
        return self._checked(Reply, self._call(agent.push, session, push))

    def leave(self, session: str) -> None:
        self._call(agent.leave, session)

    def await_stale(self, session: str, term: int, version: int, answer: Callable[[Staleness], None]) -> None:
        """Does not block. Another thread calls ``answer``, with UNKNOWN if the connection broke."""

        def done(future: torch.futures.Future[Staleness]) -> None:
            try:
                answer(future.value())
            except RuntimeError:
                answer(Staleness.UNKNOWN)

        try:
            future = rpc.rpc_async(agent.SERVER, agent.await_stale, args=(session, term, version), timeout=0.0)
        except RuntimeError as error:
            raise Unreachable(self._lost()) from error
        future.add_done_callback(done)

    def _checked(self, kind: type[_Answer], answer: Any) -> _Answer:
        if isinstance(answer, kind) and answer.is_well_formed():
            return answer
        raise Incompatible(f"the server at {self._server} gave an answer that is none of this system")

    def _lost(self) -> str:
        hint = "" if self.is_proven else ", which may expect TLS: tls=false was given here"
        return f"lost the server at {self._server}{hint}"

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return rpc.rpc_sync(agent.SERVER, function, args=arguments, timeout=self._seconds)
        except Exception as error:
            # A RuntimeError may come from the network or from an agent that is being replaced, so a retry may help.
            # An UnpicklingError and other kinds of error are the server's answer to this very call.
            text = str(error)
            refused = "UnpicklingError" in text or text.startswith(("TypeError", "ValueError", "AttributeError"))
            if refused or not isinstance(error, RuntimeError):
                raise Incompatible(f"the server at {self._server} cannot take the call: {_main_line(text)}") from error
            if self._tunnel.failure:
                raise Incompatible(
                    f"torch {torch.__version__} and the server at {self._server} exchange bytes that this version of "
                    f"ringmaster does not know: {self._tunnel.failure}"
                ) from error
            raise Unreachable(self._lost()) from error


def _main_line(text: str) -> str:
    """The line of a remote error that says what went wrong."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in lines if "On WorkerInfo(" not in line), text)


class Tunnel:
    """Carries one agent's connections. ``failure`` says why it was given up, if torch's bytes were the reason.

    The thread ``tunnel`` accepts the agent's connections, and the relay's threads carry their bytes.
    """

    def __init__(self, first: Stream, dial_again: Callable[[], Stream], pipe: Pipe) -> None:
        """``first`` is a connection to the server, and ``dial_again`` makes another."""
        self.failure = ""
        self._first: Stream | None = first
        self._dial_again = dial_again
        self._listener = socket.create_server((loopback.LOOPBACK, 0), backlog=8)
        self.address = f"{loopback.LOOPBACK}:{self._listener.getsockname()[1]}"
        self._pipe = pipe
        self._further: dict[int, Filter] = {}
        self._is_answered = threading.Event()
        self._relay = Relay()
        threading.Thread(target=self._accept_all, name="tunnel", daemon=True).start()

    def close(self) -> None:
        self._relay.close()
        shut(self._listener)
        self._is_answered.set()
        if self._first is not None:
            shut(self._first.socket)

    def _accept_all(self) -> None:
        """Accepts the connection for calls, then as many as the server's answer asks for. Then the listener closes."""
        with self._listener:
            try:
                self._accept()
                self._is_answered.wait()
                for _ in range(len(self._further)):
                    self._accept()
            except (OSError, Unreachable, AuthenticationFailed, KeyError) as error:
                log.info("a connection to the server could not be made: %s", error)
                self._relay.close()
            except ProtocolError as error:
                self._end(str(error))

    def _accept(self) -> None:
        """Connects one connection of the agent. Raises OSError, ProtocolError, Unreachable, AuthenticationFailed."""
        while True:
            inside, _ = self._listener.accept()
            if loopback.is_own_peer(inside):
                break
            inside.close()
            log.warning("another program of this machine tried to use this worker's connection to the server")
        local = Stream(tune(inside))
        frame = read_frame(local)
        greeting = tensorpipe.read_greeting(frame)
        server, self._first = self._first or self._dial_again(), None
        server.socket.settimeout(None)
        server.send(tensorpipe.framed(frame))
        back = ResultFilter(self._pipe, self._answer) if isinstance(greeting, str) else self._further[greeting]
        pair = Pair(Side(server, back), Side(local, AllPasses()), self._end)
        self._relay.add(pair, big=isinstance(back, TensorFilter))

    def _answer(self, answer: tensorpipe.Answer) -> bytes:
        self._further = further_filters(answer, self._pipe, self._pipe.results)
        self._is_answered.set()
        return answer.naming(self.address)

    def _end(self, reason: str) -> None:
        """Called when one connection has ended. TensorPipe needs all of them, so the others end too."""
        self.failure = self.failure or reason
        self._is_answered.set()
        self._relay.close()


def dial(server: str, context: ssl.SSLContext | None, seconds: float) -> Stream:
    """A connection to the server at HOST:PORT. With TLS, both ends have proven the token.

    Blocks for at most ``seconds`` in each step. Raises Unreachable, AuthenticationFailed.
    """
    connection = tune(_connect(server, seconds))
    if context is None:
        return Stream(connection)
    stream = TlsStream(connection, context, server_side=False)
    try:
        stream.handshake_blocking()
    except (OSError, EOFError) as error:
        connection.close()
        raise _handshake_failure(server, seconds, error) from error
    return stream


def _handshake_failure(server: str, seconds: float, error: Exception) -> Unreachable | AuthenticationFailed:
    """What a failed handshake means for the user."""
    if isinstance(error, ssl.SSLCertVerificationError):
        if is_ringmaster(server, seconds):
            return AuthenticationFailed(
                f"the server at {server} has another token: copy RUN_DIR/token from its machine"
            )
        return AuthenticationFailed(
            f"what listens at {server} is not a ringmaster server: its certificate is another program's"
        )
    if isinstance(error, ssl.SSLError):
        if error.reason == "WRONG_VERSION_NUMBER":
            return AuthenticationFailed(
                f"what listens at {server} does not speak TLS: it is another program, or a server with "
                "server.tls=false, which needs tls=false here"
            )
        return Unreachable(f"the server at {server} broke off the handshake ({error.reason})")
    return Unreachable(f"something listens at {server}, but did not answer as a server of this system ({error})")


def _connect(server: str, seconds: float) -> socket.socket:
    try:
        return socket.create_connection(split(server), timeout=seconds)
    except (OSError, UnicodeError) as error:
        raise Unreachable(f"no server at {server} ({getattr(error, 'strerror', None) or error})") from error


def is_ringmaster(server: str, seconds: float) -> bool:
    """Whether a server of this system listens there, according to its certificate. Raises Unreachable."""
    with _connect(server, seconds) as connection:
        stream = TlsStream(connection, identity.unverified_context(), server_side=False)
        try:
            stream.handshake_blocking()
        except (OSError, EOFError):
            return False
        return identity.is_ours(stream.certificate)
