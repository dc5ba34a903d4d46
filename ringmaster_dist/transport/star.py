"""A star of torch RPC agents: the server is a group of one, each worker is rank 1 of a private group of two.

The public ways to form a group do not fit workers that come and go: a static group needs everybody at the start and
hangs when one is dead, a dynamic one makes each joiner call every member. Here a worker only ever knows the server, and
both groups live in a store of their own process: nothing but agents and the gate's public port ever listens.

Agents listen on loopback. The server's accepts connections from its gate alone (see gate.py, sockets.py); a worker's,
which nobody has to reach, accepts none.

This file uses names of torch that begin with an underscore. `check_assumptions` says which is gone, should one be.
A broken pipe is final for an agent: to reconnect, close the client and make a new one.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import platform
import re
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import rpc
from torch.distributed.rpc import api

from ringmaster_dist import __version__
from ringmaster_dist.protocol import PROTOCOL_VERSION, Interruptions, JoinRequest, Push, Reply, Staleness, Welcome
from ringmaster_dist.transport import addresses, identity, sockets, surface
from ringmaster_dist.transport.errors import Misunderstood, Unreachable
from ringmaster_dist.transport.streams import shut
from ringmaster_dist.transport.tunnel import Tunnel, dial
from ringmaster_dist.transport.unpickling import ServersUnpickler, WorkersUnpickler, restrict

log = logging.getLogger(__name__)

_SERVER = "server"
_LOOK_SECONDS = 0.5
_MOST_GATE_DEATHS, _GATE_DEATHS_SECONDS = 10, 60.0
_MOST_DESCRIPTORS, _KEPT_DESCRIPTORS, _DESCRIPTORS_OF_A_PIPE = 1 << 20, 128, 4
_START_SECONDS, _END_SECONDS = 30.0, 3.0
_START_GATE = """import sys
path, *sys.argv[1:] = sys.argv[1:]
sys.path[:] = __import__("json").loads(path)
from ringmaster_dist.transport import gate
sys.exit(gate.main())"""
_numbers = itertools.count()  # an agent's name must be new, also within a process


def check_assumptions() -> None:
    """Raises with the name of the first private part of torch that is not there."""
    from torch._C import _distributed_autograd, _distributed_rpc

    for owner, name in (
        (_distributed_autograd, "_init"),
        (_distributed_rpc, "TensorPipeAgent"),
        (api, "_init_rpc_states"),
        (rpc.internal, "_unpickler"),
        (rpc.internal, "_InternalRPCPickler"),
    ):
        if not hasattr(owner, name):
            raise RuntimeError(
                f"torch {torch.__version__} has no {owner.__name__}.{name}, which the RPC star stands on"
            )


def _start_agent(store: dist.Store, name: str, rank: int, world_size: int, threads: int, timeout: float) -> int:
    """Makes an agent and makes it the current one; returns the port of loopback that it listens on."""
    from torch._C._distributed_autograd import _init
    from torch._C._distributed_rpc import TensorPipeAgent

    restrict(ServersUnpickler if rank == 0 else WorkersUnpickler)
    os.environ["TP_SOCKET_IFNAME"] = "lo"  # where TensorPipe listens; whatever the user has set would open a port
    _init(rank)
    # Not shared memory: its reactor spins, and with more processes than cores it starved single workers for seconds.
    # Between processes of one machine tensors are read across (cma), elsewhere they take the socket.
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=threads, rpc_timeout=timeout, _transports=["uv"], _channels=["cma", "basic"]
    )
    api._init_rpc_states(TensorPipeAgent(store, name, rank, world_size, options, {}, []))
    where = store.get(f"addrs/{name}").decode()
    if not where.startswith(f"uv://{sockets.LOOPBACK}:"):
        rpc.shutdown(graceful=False)
        raise RuntimeError(f"torch {torch.__version__} listens at {where} instead of {sockets.LOOPBACK}: refusing")
    return int(where.rpartition(":")[2])


class Host:
    """The server's end. Serves from the moment it is made until `close`.

    Raises OSError or AddressError where it cannot listen, Mistrusted where the certificate library is missing, and
    RuntimeError where torch is not the one that is known. ``tensor_bytes`` is the largest tensor a worker may send.
    """

    def __init__(
        self, handlers: surface.Handlers, host: str, port: int, *, token: str, tensor_bytes: int, threads: int,
        timeout: float, tls: bool = True, handshake_seconds: float,
    ) -> None:  # fmt: skip
        check_assumptions()
        if tls:
            identity.require_library()
        self._public = addresses.listen(host, port)
        self.address = addresses.published(host, self._public.getsockname()[1])
        self._settings = {
            "token": token, "tls": tls, "handshake_seconds": handshake_seconds, "tensor_bytes": tensor_bytes,
            "torch": torch.__version__, "about": versions(), "most_pipes": _most_pipes(),
        }  # fmt: skip
        self._counts = {"pipes": 0, "received": 0, "sent": 0, "refused": 0}
        self._failure = ""
        self._closing = threading.Event()
        surface.serve(handlers)
        agent_port = _start_agent(dist.HashStore(), _SERVER, 0, 1, threads, timeout)
        self._descriptor, self._agent = sockets.own_listener(agent_port)
        try:
            self._settings["key"] = sockets.close_to_others(self._agent).hex()
        except OSError as error:
            rpc.shutdown(graceful=False)
            raise RuntimeError(f"this kernel cannot keep other users away from torch's RPC agent: {error}") from error
        sockets.cut_accepted(agent_port)
        self._inode = os.fstat(self._descriptor).st_ino
        self._ready = threading.Event()
        self._process, self._control = self._start_gate()
        self._watcher = threading.Thread(target=self._watch, name="gate", daemon=True)
        self._watcher.start()
        if not self._ready.wait(_START_SECONDS) or self._failure:
            self.close()
            raise RuntimeError(self._failure or "the gate did not start")

    def check(self) -> None:
        """Raises RuntimeError if nobody can reach this server any more."""
        if self._failure:
            raise RuntimeError(self._failure)

    @property
    def counts(self) -> dict[str, int]:
        """Of this host so far. ``pipes``: how many times workers have connected; one that reconnects counts again.
        ``received`` and ``sent``: bytes through the tunnel, without what processes of one machine read across.
        ``refused``: peers that had not proven the token, or not introduced themselves.
        """
        return dict(self._counts)

    def close(self) -> None:
        """Ends the serving; what was answered last is still delivered."""
        self._closing.set()
        if api._is_current_rpc_agent_set():
            rpc.shutdown(graceful=False)
        self._public.close()
        self._agent.close()
        shut(self._control)
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _start_gate(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        ours, its = socket.socketpair()
        handed = (self._public.fileno(), self._agent.fileno())
        # Isolated, with a path without the current folder: whoever can write there cannot have the gate import it.
        path = [place for place in sys.path if place not in ("", os.getcwd())] + [str(Path(__file__).parents[2])]
        command = [sys.executable, "-I", "-c", _START_GATE, json.dumps(path), *map(str, handed)]
        with its:
            process = subprocess.Popen(command, stdin=its, stdout=subprocess.DEVNULL, pass_fds=handed)
        ours.sendall(json.dumps(self._settings).encode() + b"\n")
        return process, ours

    def _watch(self) -> None:
        """Keeps the gate alive and its counts at hand; notices when the agent does not listen any more."""
        before = dict(self._counts)  # of earlier gates
        deaths: list[float] = []
        while not self._closing.is_set() and not self._failure:
            try:
                self._follow_gate(before)
            except OSError as error:
                log.debug("the gate's control connection: %s", error)
            if self._closing.is_set() or self._failure:
                break
            now = time.monotonic()
            deaths = [death for death in deaths if now - death < _GATE_DEATHS_SECONDS] + [now]
            if len(deaths) > _MOST_GATE_DEATHS:
                self._failure = f"the gate has died {len(deaths)} times within {_GATE_DEATHS_SECONDS:g} s"
                break
            self._process.kill()
            log.warning("server: the gate has died (exit code %s): starting another", self._process.wait())
            before = dict(self._counts)
            try:
                self._process, self._control = self._start_gate()
            except OSError as error:
                self._failure = f"another gate could not be started: {error}"

        self._ready.set()

    def _follow_gate(self, before: dict[str, int]) -> None:
        """Until it dies, or the agent has failed."""
        self._control.settimeout(_LOOK_SECONDS)
        line = b""
        while not self._closing.is_set():
            try:
                data = self._control.recv(4096)
                if not data:
                    return
                *lines, line = (line + data).split(b"\n")
                for facts in map(json.loads, lines):
                    if "failed" in facts:
                        self._failure = facts["failed"]
                        return
                    self._counts = {name: before[name] + facts[name] for name in before}
                    self._ready.set()
            except TimeoutError:
                pass
            if not self._agent_listens():
                self._failure = "torch's RPC agent has stopped listening"
                return

    def _agent_listens(self) -> bool:
        try:
            return os.fstat(self._descriptor).st_ino == self._inode
        except OSError:
            return False


def _most_pipes() -> int:
    """As many as this process has file descriptors for, with some kept for checkpoints and everything else."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return max(1, (limit - _KEPT_DESCRIPTORS) // _DESCRIPTORS_OF_A_PIPE)


def versions() -> dict[str, Any]:
    """What this end of a connection runs."""
    return {
        "program": __version__,
        "protocol": PROTOCOL_VERSION,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


class Client:
    """A worker's end: the five calls, each with its own timeout. Every call may raise `Unreachable`.

    To make one raises `Unreachable`, or `Mistrusted` where a retry would not help.
    """

    def __init__(
        self, server: str, *, token: str, connect_seconds: float, call_seconds: float, tls: bool = True
    ) -> None:
        self._server, self._seconds, self.is_proven = server, call_seconds, tls
        context = identity.worker_context(token) if tls else None
        first = dial(server, context, connect_seconds)
        self._tunnel = Tunnel(first, lambda: dial(server, context, connect_seconds))
        private = dist.HashStore()
        private.set("names/0", _SERVER)
        private.set(f"addrs/{_SERVER}", f"uv://{self._tunnel.address}")
        machine = re.sub("[^A-Za-z0-9-]", "-", platform.node())[:64]  # an agent's name may have no other letters
        name = f"{machine}:{os.getpid()}:{next(_numbers)}"
        try:
            port = _start_agent(private, name, 1, 2, 4, call_seconds)
            with sockets.own_listener(port)[1] as listener:
                sockets.close_to_others(listener)  # and nobody keeps the key: nobody connects to a worker
            sockets.cut_accepted(port)
        except (OSError, RuntimeError) as error:
            self.close()
            raise Unreachable(f"no agent can be started for the server at {server}: {error}") from error

    def close(self) -> None:
        """Drops the connection; a new client may be made afterwards, in the same process."""
        if api._is_current_rpc_agent_set():
            rpc.shutdown(graceful=False)
        self._tunnel.close()

    def join(self, request: JoinRequest) -> Welcome:
        welcome: Welcome = self._call(surface.join, request)
        return welcome

    def fetch(self, session: str, term: int, known_version: int, interruptions: Interruptions) -> Reply:
        reply: Reply = self._call(surface.fetch, session, term, known_version, interruptions)
        return reply

    def push(self, session: str, push: Push) -> Reply:
        """May have to be repeated where a round takes longer than the timeout; that changes nothing on the server."""
        reply: Reply = self._call(surface.push, session, push)
        return reply

    def leave(self, session: str) -> None:
        self._call(surface.leave, session)

    def await_stale(self, session: str, term: int, version: int, answer: Callable[[Staleness], None]) -> None:
        """Asks, does not wait: ``answer`` is called from another thread, with UNKNOWN if the connection broke."""

        def done(future: torch.futures.Future[Staleness]) -> None:
            try:
                answer(future.value())
            except RuntimeError:
                answer(Staleness.UNKNOWN)

        try:
            future = rpc.rpc_async(_SERVER, surface.await_stale, args=(session, term, version), timeout=0.0)
        except RuntimeError as error:
            raise Unreachable(self._lost()) from error
        future.add_done_callback(done)

    def _lost(self) -> str:
        hint = "" if self.is_proven else ", which may expect TLS: tls=false was given here"
        return f"lost the server at {self._server}{hint}"

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return rpc.rpc_sync(_SERVER, function, args=arguments, timeout=self._seconds)
        except Exception as error:
            # A RuntimeError may be the network's, or of an agent that is just being replaced: asking again may help.
            # What is not unpickled, and other kinds of error, are the answer of the server to this very call.
            text = str(error)
            refused = "UnpicklingError" in text or text.startswith(("TypeError", "ValueError", "AttributeError"))
            if refused or not isinstance(error, RuntimeError):
                raise Misunderstood(f"the server at {self._server} cannot take the call: {_gist(text)}") from error
            if self._tunnel.failure:
                raise Misunderstood(
                    f"torch {torch.__version__} and the server at {self._server} exchange bytes that this version of "
                    f"ringmaster does not know: {self._tunnel.failure}"
                ) from error
            raise Unreachable(self._lost()) from error


def _gist(text: str) -> str:
    """The line of a remote error that says what it was."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in lines if "On WorkerInfo(" not in line), text)
