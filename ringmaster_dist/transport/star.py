"""A star of torch RPC agents: the server is a group of one, each worker is rank 1 of a private group of two.

The public ways to form a group do not fit workers that come and go: a static group needs everybody at the start and
hangs when one is dead, a dynamic one makes each joiner call every member. Here a worker only ever knows the server.
Its two-member group lives in a store of its own process, where the server's address is copied to.

This file uses names of torch that begin with an underscore. `check_assumptions` says which is gone, should one be.
A broken pipe is final for an agent: to reconnect, close the client and make a new one.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import rpc
from torch.distributed.rpc import api

from ringmaster_dist.protocol import Interruptions, JoinRequest, Push, Reply, Staleness, Welcome
from ringmaster_dist.transport import about, addresses, surface
from ringmaster_dist.transport.guard import Guard
from ringmaster_dist.transport.lookup import look_up
from ringmaster_dist.transport.unpickling import restrict

_SERVER = "server"


class Unreachable(Exception):
    """The server cannot be reached; the message says where it was looked for."""


class Misunderstood(Exception):
    """The server was reached and could make nothing of the call: asking again will not help."""


def check_assumptions() -> None:
    """Raises with the name of the first private part of torch that is not there."""
    from torch._C import _distributed_autograd, _distributed_rpc

    for owner, name in (
        (_distributed_autograd, "_init"),
        (_distributed_rpc, "TensorPipeAgent"),
        (api, "_init_rpc_states"),
        (api, "_reset_current_rpc_agent"),
        (rpc.internal, "_unpickler"),
        (rpc.internal, "_InternalRPCPickler"),
    ):
        if not hasattr(owner, name):
            raise RuntimeError(
                f"torch {torch.__version__} has no {owner.__name__}.{name}, which the RPC star stands on"
            )


def _start_agent(store: dist.Store, name: str, rank: int, world_size: int, threads: int, timeout: float) -> Any:
    """Makes an agent and makes it the current one."""
    from torch._C._distributed_autograd import _init
    from torch._C._distributed_rpc import TensorPipeAgent

    restrict()
    _init(rank)
    # Not shared memory: its reactor spins, and with more processes than cores it starved single workers for seconds.
    # Between processes of one machine tensors are read across (cma), elsewhere they take the socket.
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=threads, rpc_timeout=timeout, _transports=["uv"], _channels=["cma", "basic"]
    )
    agent = TensorPipeAgent(store, name, rank, world_size, options, {}, [])
    api._init_rpc_states(agent)
    return agent


class Host:
    """The server's end. Serves from the moment it is made until `close`. Raises OSError or AddressError."""

    def __init__(self, handlers: surface.Handlers, host: str, port: int, *, threads: int, timeout: float) -> None:
        check_assumptions()
        address = addresses.listen_at(host)
        listener = socket.create_server((address, port), backlog=1024)
        self.address = f"{host}:{listener.getsockname()[1]}"
        surface.serve(handlers)
        self._store = dist.TCPStore(
            address,
            listener.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout),
            master_listen_fd=listener.detach(),
        )
        self._threads, self._timeout = threads, timeout
        self._guard = Guard(self._start)
        self._next_beat = 0.0
        addresses.check_published(host, address, self._store.get(f"{_SERVER}/addrs/{_SERVER}").decode())

    def _start(self) -> tuple[Any, int]:
        """A new agent beside the one there may be. The store has its address, where workers look for it."""
        if api._is_current_rpc_agent_set():
            api._reset_current_rpc_agent()
        store = dist.PrefixStore(_SERVER, self._store)
        agent = _start_agent(store, _SERVER, 0, 1, self._threads, self._timeout)
        return agent, int(store.get(f"addrs/{_SERVER}").decode().rpartition(":")[2])

    @property
    def num_connected(self) -> int:
        """How many connections workers have opened so far; one that connects anew counts again."""
        return int(self._store.add("joined", 0))

    def tell(self, token: str) -> None:
        """Describes this server to who looks into its store (see about.py)."""
        about.tell(self._store, token)

    def beat(self) -> None:
        """Tells the time there, if it is time to."""
        now = time.monotonic()
        if now >= self._next_beat:
            self._next_beat = now + about.BEAT_SECONDS
            about.tell_time(self._store)

    def close(self) -> None:
        """Ends the serving. One whose agent was replaced is ended by the end of the process alone."""
        self._guard.close()
        if not self._guard.num_replaced:
            rpc.shutdown(graceful=False)


class Client:
    """A worker's end: the five calls, each with its own timeout. Every call may raise `Unreachable`."""

    def __init__(self, server: str, *, connect_seconds: float, call_seconds: float) -> None:
        host, _, port = server.rpartition(":")
        self._server, self._seconds = server, call_seconds
        try:  # with a plain socket first: c10d writes a stack trace on every failed connect
            addresses.route_to(host)
            socket.create_connection((host, int(port)), timeout=connect_seconds).close()
        except OSError as error:
            raise Unreachable(f"no server at {server} ({error.strerror or error})") from error
        found = look_up(host, int(port), f"{_SERVER}/addrs/{_SERVER}", connect_seconds)
        if found is None:
            raise Unreachable(f"something listens at {server}, but did not answer as a server of this system")
        private = dist.HashStore()  # in this process: to make the agent takes nobody else
        private.set("names/0", _SERVER)
        private.set(f"addrs/{_SERVER}", found.address)
        try:
            _start_agent(private, f"worker-{found.number}", 1, 2, 4, call_seconds)
        except RuntimeError as error:
            raise Unreachable(f"no agent can be started for the server at {server}: {error}") from error

    def close(self) -> None:
        """Drops the connection; a new client may be made afterwards, in the same process."""
        if api._is_current_rpc_agent_set():
            rpc.shutdown(graceful=False)

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
            raise Unreachable(f"lost the server at {self._server}") from error
        future.add_done_callback(done)

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
            raise Unreachable(f"lost the server at {self._server}") from error


def _gist(text: str) -> str:
    """The line of a remote error that says what it was."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in lines if "On WorkerInfo(" not in line), text)
