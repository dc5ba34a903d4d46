"""A worker's end of the tunnel: its RPC agent connects to this process itself, which passes the bytes to the gate.

The agent is given an address on loopback where this module listens for as long as a pipe is being opened, and only for
sockets of this very process. The server's answer to the agent's brochure is the one message of TensorPipe that names an
address, to which the agent opens its further connections: it is rewritten to name this listener. If the answer is not
understood, nothing is passed on.
"""

from __future__ import annotations

import json
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable
from typing import Any

from ringmaster_dist.transport import identity, sieve, sockets, tensorpipe
from ringmaster_dist.transport.addresses import split
from ringmaster_dist.transport.errors import Mistrusted, Unreachable
from ringmaster_dist.transport.relay import Pair, Relay
from ringmaster_dist.transport.streams import PlainStream, Stream, TlsStream, read_frame, shut, tune
from ringmaster_dist.transport.tensorpipe import Unexpected

log = logging.getLogger(__name__)

_STORE_QUESTION = (
    b"\x00\xce\xf7\x85\x3c\x0d" + b"ring"
)  # to torch's TCPStore: it answers a ping with the same four bytes
_OLDER = "a server of ringmaster 0.1, or another torch job: install the same version on both"


def dial(server: str, context: ssl.SSLContext | None, seconds: float) -> PlainStream | TlsStream:
    """A connection to the server at HOST:PORT; with TLS, it has proven the token. Raises Unreachable, Mistrusted."""
    host, port = split(server)
    try:
        connection = socket.create_connection((host, port), timeout=seconds)
    except (OSError, UnicodeError) as error:
        raise Unreachable(f"no server at {server} ({getattr(error, 'strerror', None) or error})") from error
    tune(connection)
    if context is None:
        return PlainStream(connection)
    stream = TlsStream(connection, context, server_side=False)
    try:
        stream.handshake_blocking()
    except ssl.SSLCertVerificationError as error:
        connection.close()
        raise Mistrusted(_foreign_certificate(server, seconds)) from error
    except ssl.SSLError as error:
        connection.close()
        if error.reason == "WRONG_VERSION_NUMBER":
            raise Mistrusted(
                f"what listens at {server} does not speak TLS: it is another program, or a server with "
                "server.tls=false, which needs tls=false here"
            ) from error
        raise Unreachable(f"the server at {server} broke off the handshake ({error.reason})") from error
    except (OSError, EOFError) as error:
        connection.close()
        if _is_store(server, seconds):
            raise Mistrusted(f"what listens at {server} is a store of torch without TLS: {_OLDER}") from error
        raise Unreachable(
            f"something listens at {server}, but did not answer as a server of this system ({error})"
        ) from error
    return stream


def ask_about(server: str, token: str, seconds: float) -> dict[str, Any]:
    """The versions that a server runs, and by how much its clock is behind. Raises Unreachable, Mistrusted."""
    stream = dial(server, identity.worker_context(token, identity.ABOUT), seconds)
    asked, text, buffer = time.time(), b"", memoryview(bytearray(4096))
    try:
        while count := stream.receive_into(buffer):
            text += buffer[:count]
        about: dict[str, Any] = json.loads(text)
        about["skew_seconds"] = (asked + time.time()) / 2 - about["time"]
    except (OSError, ValueError) as error:
        raise Unreachable(f"the server at {server} did not say what it is ({error})") from error
    finally:
        stream.socket.close()
    return about


def is_ringmaster(server: str, seconds: float) -> bool:
    """Whether what listens there is a server of this system, by the certificate that it shows. Raises Unreachable."""
    try:
        connection = socket.create_connection(split(server), timeout=seconds)
    except OSError as error:
        raise Unreachable(f"no server at {server} ({error.strerror or error})") from error
    with connection:
        stream = TlsStream(connection, identity.stranger_context(), server_side=False)
        try:
            stream.handshake_blocking()
        except (OSError, EOFError):
            return False
        return identity.is_ours(stream.certificate)


def _foreign_certificate(server: str, seconds: float) -> str:
    """Why the certificate of what listens there is not the one that was expected."""
    if is_ringmaster(server, seconds):
        return f"the server at {server} has another token: copy RUN_DIR/token from its machine"
    return f"what listens at {server} is not a ringmaster server: its certificate is another program's"


def _is_store(server: str, seconds: float) -> bool:
    try:
        with socket.create_connection(split(server), timeout=min(seconds, 1.0)) as connection:
            connection.sendall(_STORE_QUESTION)
            return connection.recv(4) == _STORE_QUESTION[-4:]
    except OSError:
        return False


class Tunnel:
    """Carries one agent's connections. ``failure`` says why it was given up, if torch's bytes were the reason."""

    def __init__(self, first: Stream, again: Callable[[], Stream]) -> None:
        """``first`` is a connection to the server, ``again`` makes another."""
        self.failure = ""
        self._first: Stream | None = first
        self._again = again
        self._listener = socket.create_server((sockets.LOOPBACK, 0), backlog=8)
        self.address = f"{sockets.LOOPBACK}:{self._listener.getsockname()[1]}"
        self._pipe = sieve.Pipe("this worker", float("inf"))
        self._further: dict[int, type[sieve.Sieve]] = {}
        self._answered = threading.Event()
        self._relay = Relay()
        self._relay.start()
        threading.Thread(target=self._accept, name="tunnel", daemon=True).start()

    def close(self) -> None:
        self._relay.close()
        shut(self._listener)
        self._answered.set()
        if self._first is not None:
            shut(self._first.socket)

    def _accept(self) -> None:
        """The connection for calls, then as many as the server's answer asks for; then nobody is listened to."""
        with self._listener:
            try:
                self._take()
                self._answered.wait()
                for _ in range(len(self._further)):
                    self._take()
            except (OSError, Unreachable, Mistrusted, KeyError) as error:
                log.info("a connection to the server could not be made: %s", error)
                self._relay.close()
            except Unexpected as error:
                self._fail(str(error))

    def _take(self) -> None:
        """One connection of this process's agent. Raises OSError, Unexpected, Unreachable or Mistrusted."""
        while True:
            inside, _ = self._listener.accept()
            if sockets.is_own_peer(inside):
                break
            inside.close()
            log.warning("another program of this machine tried to use this worker's connection to the server")
        agent = PlainStream(tune(inside))
        frame = read_frame(agent)
        greeting = tensorpipe.read_greeting(frame)
        server, self._first = self._first or self._again(), None
        server.socket.settimeout(None)
        server.send(tensorpipe.framed(frame))
        if greeting.registration is None:
            kind: type[sieve.Sieve] = sieve.Calls
            back: sieve.Sieve = sieve.Answered(self._pipe, self._answer)
        else:
            kind, back = self._further[greeting.registration], sieve.Everything(self._pipe)
        self._relay.add(Pair(server, agent, back, kind(self._pipe), on_end=self._fail), big=kind is sieve.Tensors)

    def _answer(self, answer: tensorpipe.Answer) -> bytes:
        self._further = sieve.sieves_of(answer)
        self._answered.set()
        return answer.naming(self.address)

    def _fail(self, reason: str) -> None:
        """When a connection has ended: TensorPipe cannot go on without it."""
        self.failure = self.failure or reason
        self._answered.set()
        self._relay.close()
