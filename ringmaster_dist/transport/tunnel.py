"""A worker's end of the tunnel: its RPC agent connects to this process itself, and the bytes go on to the server's gate.

The agent is given an address on loopback where this module listens for as long as a pipe is being opened, and only for
sockets of this very process. The server's answer to the agent's brochure is the one message of TensorPipe that names an
address, to which the agent opens its further connections: it is rewritten to name this listener. If the answer is not
understood, nothing is passed on. Each connection has two threads of this process.
"""

from __future__ import annotations

import logging
import socket
import ssl
import threading
from collections.abc import Callable

from ringmaster_dist.transport import identity, sieve, sockets, tensorpipe
from ringmaster_dist.transport.addresses import split
from ringmaster_dist.transport.errors import Mistrusted, Unreachable
from ringmaster_dist.transport.streams import PIECE_BYTES, PlainStream, Stream, TlsStream, read_frame, shut, tune
from ringmaster_dist.transport.tensorpipe import Unexpected

log = logging.getLogger(__name__)

_STORE_QUESTION = b"\x00\xce\xf7\x85\x3c\x0d" + b"ring"  # to torch's TCPStore: it answers a ping with the same four bytes
_OLDER = "a server of ringmaster 0.1, or another torch job: install the same version on both"


def dial(server: str, context: ssl.SSLContext | None, seconds: float) -> PlainStream | TlsStream:
    """A connection to the server at HOST:PORT; with TLS, both ends have proven the token. Raises Unreachable, Mistrusted."""
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


def _foreign_certificate(server: str, seconds: float) -> str:
    """Why the certificate of what listens there is not the one that was expected."""
    try:
        stream = TlsStream(
            socket.create_connection(split(server), timeout=seconds), identity.stranger_context(), server_side=False
        )
        stream.handshake_blocking()
        ours = identity.is_ours(stream.certificate)
        stream.socket.close()
    except (OSError, EOFError):
        ours = False
    if ours:
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

    def __init__(self, first: Stream, again: Callable[[], Stream], seconds: float) -> None:
        """``first`` is a connection to the server, ``again`` makes another; both wait at most ``seconds``."""
        self.failure = ""
        self._first: Stream | None = first
        self._again, self._seconds = again, seconds
        self._listener = socket.create_server((sockets.LOOPBACK, 0), backlog=8)
        self.address = f"{sockets.LOOPBACK}:{self._listener.getsockname()[1]}"
        self._lock = threading.Lock()
        self._open: set[socket.socket] = {first.socket}
        self._closed = False
        self._pipe = sieve.Pipe("this worker", float("inf"))
        self._further: dict[int, type[sieve.Sieve]] = {}
        self._answered = threading.Event()
        threading.Thread(target=self._accept, name="tunnel", daemon=True).start()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            connections = list(self._open)
        shut(self._listener)
        for connection in connections:
            shut(connection)

    def _accept(self) -> None:
        """The connection for calls, then as many as the server's answer asks for; then nobody is listened to."""
        expected = 1
        with self._listener:
            while expected:
                try:
                    connection, _ = self._listener.accept()
                except OSError:  # closed
                    return
                if not sockets.is_own_peer(connection):
                    connection.close()
                    log.warning("another program of this machine tried to use this worker's connection to the server")
                    continue
                expected -= 1
                threading.Thread(target=self._carry, args=(connection,), daemon=True).start()
                if not expected and not self._answered.is_set():
                    self._answered.wait()
                    expected = len(self._further)

    def _carry(self, inside: socket.socket) -> None:
        agent, server = PlainStream(tune(inside)), None
        try:
            greeting = tensorpipe.read_greeting(frame := read_frame(agent))
            server = self._take_connection()
            server.socket.settimeout(None)
            self._hold(inside, server.socket)
            server.send(tensorpipe.framed(frame))
            if greeting.registration is None:
                kind: type[sieve.Sieve] = sieve.Calls
                inwards = self._answer_and_carry
            else:
                kind, inwards = self._further[greeting.registration], _carry_back
            other = threading.Thread(target=self._run, args=(inwards, server, agent), daemon=True)
            other.start()
            self._run(self._carry_out, agent, server, kind(self._pipe))
            other.join()
        except (OSError, Unreachable, Mistrusted, KeyError) as error:
            log.info("a connection to the server could not be made: %s", error)
        except Unexpected as error:
            self.failure = str(error)
        for connection in (inside, server.socket if server else None):
            if connection is not None:
                shut(connection)
                connection.close()
        self._answered.set()

    def _run(self, work: Callable[..., None], source: Stream, target: Stream, *arguments: object) -> None:
        try:
            work(source, target, *arguments)
        except Unexpected as error:
            self.failure = str(error)
        except OSError as error:
            log.debug("a connection to the server has ended: %s", error)
        shut(source.socket)
        shut(target.socket)

    def _carry_out(self, agent: Stream, server: Stream, sifter: sieve.Sieve) -> None:
        buffer = memoryview(bytearray(PIECE_BYTES))
        while count := agent.receive_into(buffer):
            for piece in sifter.sift(buffer[:count]):
                server.send(piece)

    def _answer_and_carry(self, server: Stream, agent: Stream) -> None:
        answer = tensorpipe.read_answer(read_frame(server))
        self._further = sieve.sieves_of(answer)
        self._answered.set()
        agent.send(tensorpipe.framed(answer.naming(self.address)))
        _carry_back(server, agent)

    def _take_connection(self) -> Stream:
        with self._lock:
            first, self._first = self._first, None
        return first or self._again()

    def _hold(self, *connections: socket.socket) -> None:
        with self._lock:
            self._open.update(connections)
            if self._closed:
                raise OSError("the tunnel is closed")


def _carry_back(server: Stream, agent: Stream) -> None:
    buffer = memoryview(bytearray(PIECE_BYTES))
    while count := server.receive_into(buffer):
        agent.send(buffer[:count])
