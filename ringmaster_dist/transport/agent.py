"""Torch's RPC agent, as both ends use it: it listens on loopback alone, serves five calls and unpickles nothing else.

The server is a group of one agent. Each worker is rank 1 of a private group of two, whose store is in its own process.
The public ways to form a group do not fit workers that come and go. A static group needs every member at the start and
hangs when one is dead. A dynamic group makes each new member call every other member.

Torch RPC pickles calls and results. `restrict` replaces its unpickler, for the whole process, by one with an allowlist
of names: a server reads the five calls, a worker reads their results. A tensor travels as
``getattr(_InternalRPCPickler, "_tensor_receiver")(index)``. Some Pythons (3.11.0 to 3.11.3) send a verdict as
``getattr(Verdict, "STALE")``. So ``getattr`` is resolved to a function that knows these cases alone.

A pickle is a program. This one may not call what it names: a call is a name while the message is read, and is looked up
after that. It may not compute with what it builds either. It has no dictionary with entries, so nothing is hashed, and
a server makes no exceptions, so nothing is printed. (A few hundred bytes can stand for a tuple of 2^60 elements.)

This is the only file that uses private names of torch.distributed. `check_assumptions` names the first one
that is missing. A broken connection is final for an agent: to reconnect, stop the agent and start another.
"""

from __future__ import annotations

import builtins
import io
import os
import pickle
import pickletools
import platform
from typing import IO, Any, NamedTuple

import torch
from torch.distributed import HashStore, rpc  # type: ignore[attr-defined]
from torch.distributed.rpc import api, internal

from ringmaster_dist import __version__, protocol
from ringmaster_dist.protocol import (
    PROTOCOL_VERSION,
    Handlers,
    Interruptions,
    JoinRequest,
    Push,
    Reply,
    Staleness,
    Welcome,
)
from ringmaster_dist.transport.loopback import LOOPBACK, Listener, start_closed
from ringmaster_dist.transport.tensorpipe import name_of_call

SERVER = "server"  # the name of the server's agent

# --- the five calls, which run on the server -------------------------------------------------------------------------


_handlers: list[Handlers] = []  # one, once this process serves


def serve(handlers: Handlers) -> None:
    """From now on the calls that this process receives are passed to these handlers."""
    _handlers[:] = [handlers]


# Calls with @async_execution return a future, so that a worker that waits holds no thread of the server.


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def join(request: JoinRequest) -> torch.futures.Future[Welcome]:
    return _handlers[0].join(request)


def fetch(session: str, term: int, known_version: int, interruptions: Interruptions) -> Reply:
    return _handlers[0].fetch(session, term, known_version, interruptions)


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def push(session: str, push: Push) -> torch.futures.Future[Reply]:
    return _handlers[0].push(session, push)


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def await_stale(session: str, term: int, version: int) -> torch.futures.Future[Staleness]:
    return _handlers[0].await_stale(session, term, version)


def leave(session: str) -> None:
    _handlers[0].leave(session)


# --- the restricted unpickler ----------------------------------------------------------------------------------------

_CALLS = {function.__name__: function for function in (join, fetch, push, await_stale, leave)}
_NUM_ARGUMENTS = {"join": 1, "fetch": 4, "push": 2, "await_stale": 3, "leave": 1}
_SENT_BY_WORKERS = ("JoinRequest", "Device", "Push", "Interruptions")
_SENT_BY_SERVER = ("Welcome", "Reply", "Staleness", "Snapshot", "Receipt", "Verdict")
# The errors that a result may carry. A worker makes them from a text alone.
_EXCEPTIONS = ("Exception", "RuntimeError", "ValueError", "TypeError", "KeyError", "AttributeError", "IndexError")
# The instructions of our own pickles. Others set attributes (BUILD), allocate a memo of any size (BINPUT), look into
# registries (EXT1), repeat a value (DUP) or hash one (SETITEM).
_INSTRUCTIONS = frozenset(
    """PROTO FRAME STOP MARK MEMOIZE BINGET LONG_BINGET STACK_GLOBAL REDUCE NEWOBJ NONE NEWTRUE NEWFALSE BININT BININT1
    BININT2 LONG1 BINFLOAT SHORT_BINUNICODE BINUNICODE EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST APPEND APPENDS
    EMPTY_DICT""".split()  # noqa: SIM905
)
_MOST_REASON = 500  # letters
_MOST_BYTES = 1 << 20  # the longest message is a welcome, with the run's configuration


class _Call(NamedTuple):
    """The name of a call, while its message is read."""

    name: str


class RestrictedUnpickler(pickle.Unpickler):
    """Checks all instructions of a message before it executes the first. The two roles are below."""

    def __init__(self, file: IO[bytes]) -> None:
        self._message = file.read(_MOST_BYTES + 1)
        super().__init__(io.BytesIO(self._message))

    def load(self) -> Any:
        if len(self._message) > _MOST_BYTES:
            raise pickle.UnpicklingError(f"refused: a message of more than {_MOST_BYTES} bytes")
        try:
            for instruction, _, _ in pickletools.genops(self._message):
                if instruction.name not in _INSTRUCTIONS:
                    raise pickle.UnpicklingError(f"refused: a message with the instruction {instruction.name}")
        except ValueError as error:
            raise pickle.UnpicklingError(f"refused: a message that is not a pickle ({error})") from error
        return super().load()

    def find_class(self, module: str, name: str) -> Any:
        if module == internal.__name__ and name == "_InternalRPCPickler":
            return internal._InternalRPCPickler
        found = self.allowed(module, name)
        if found is None:
            what = f"{module}.{name}"[:80]
            raise pickle.UnpicklingError(f"refused: {what!a} is not part of this system's exchange")
        return found

    def allowed(self, module: str, name: str) -> Any:
        """The object that this role may name so, or None."""
        raise NotImplementedError


class ServersUnpickler(RestrictedUnpickler):
    """Reads calls."""

    def allowed(self, module: str, name: str) -> Any:
        if module == __name__ and name in _CALLS:
            return _Call(name)
        if module == protocol.__name__ and name in _SENT_BY_WORKERS:
            return getattr(protocol, name)
        if module == internal.__name__ and name == "PythonUDF":
            return internal.PythonUDF
        return _tensor_receiver if (module, name) == ("builtins", "getattr") else None

    def load(self) -> Any:
        """A call. In place of one that is refused, a call that answers so: torch would log a traceback for an error."""
        try:
            return self._checked(super().load())
        except Exception as error:
            return internal.PythonUDF(_refuse, (f"{type(error).__name__}: {error}"[:_MOST_REASON],), {})

    def _checked(self, call: Any) -> Any:
        good = type(call) is internal.PythonUDF and type(call.func) is _Call and type(call.args) is tuple
        if not good or type(call.kwargs) is not dict or call.kwargs or call.func.name != name_of_call(self._message):
            raise pickle.UnpicklingError("refused: a message that is not one of the five calls")
        if len(call.args) != _NUM_ARGUMENTS[call.func.name]:
            raise pickle.UnpicklingError(f"refused: {call.func.name} with {len(call.args)} arguments")
        return call._replace(func=_CALLS[call.func.name])


class WorkersUnpickler(RestrictedUnpickler):
    """Reads results."""

    def allowed(self, module: str, name: str) -> Any:
        if module == protocol.__name__ and name in _SENT_BY_SERVER:
            return getattr(protocol, name)
        if module == internal.__name__ and name == "RemoteException":
            return internal.RemoteException
        if module == "builtins" and name in _EXCEPTIONS:
            return getattr(builtins, name)
        return _tensor_receiver_or_member if (module, name) == ("builtins", "getattr") else None


def _tensor_receiver(owner: object, name: object) -> Any:
    if owner is internal._InternalRPCPickler and type(name) is str and name == "_tensor_receiver":
        return internal._InternalRPCPickler._tensor_receiver
    raise pickle.UnpicklingError("refused: getattr of something else")


def _tensor_receiver_or_member(owner: object, name: object) -> Any:
    if (owner is protocol.Verdict or owner is protocol.Staleness) and type(name) is str and name in owner.__members__:
        return owner[name]
    return _tensor_receiver(owner, name)


def _refuse(reason: str) -> internal.RemoteException:
    return internal.RemoteException(reason, RuntimeError)


def restrict(unpickler: type[RestrictedUnpickler]) -> None:
    """From now on this process unpickles RPC messages in one of the two roles. Raises RuntimeError."""
    if not hasattr(internal, "_unpickler"):
        raise RuntimeError("this torch has no torch.distributed.rpc.internal._unpickler to replace: refusing to serve")
    internal._unpickler = unpickler


# --- the agent -------------------------------------------------------------------------------------------------------


def check_assumptions() -> None:
    """Raises RuntimeError with the name of the first private part of torch that is missing."""
    from torch._C import _distributed_autograd, _distributed_rpc

    for owner, name in (
        (_distributed_autograd, "_init"),
        (_distributed_rpc, "TensorPipeAgent"),
        (api, "_init_rpc_states"),
        (internal, "_unpickler"),
        (internal, "_InternalRPCPickler"),
    ):
        if not hasattr(owner, name):
            raise RuntimeError(f"torch {torch.__version__} has no {owner.__name__}.{name}, which the transport needs")


def start_server_agent(threads: int, seconds: float, *, insecure: bool = False) -> Listener:
    """Starts the server's agent. ``threads`` run the calls, and ``seconds`` is torch's timeout. Raises RuntimeError."""
    return start_closed(lambda: _start(HashStore(), SERVER, 0, 1, threads, seconds), insecure=insecure)


def start_worker_agent(
    name: str, server_address: str, seconds: float, *, cma: bool = False, insecure: bool = False
) -> None:
    """Starts a worker's agent that knows a server at this HOST:PORT. Nobody can connect to it. Raises RuntimeError.

    With ``cma`` it shares memory with that server's process.
    """
    store = HashStore()
    store.set("names/0", SERVER)
    store.set(f"addrs/{SERVER}", f"uv://{server_address}")
    start_closed(lambda: _start(store, name, 1, 2, 4, seconds, cma), insecure=insecure).socket.close()


def _start(
    store: HashStore, name: str, rank: int, world_size: int, threads: int, seconds: float, cma: bool = True
) -> None:
    """Makes an agent the current one of this process."""
    from torch._C._distributed_autograd import _init
    from torch._C._distributed_rpc import TensorPipeAgent

    restrict(ServersUnpickler if rank == 0 else WorkersUnpickler)
    os.environ["TP_SOCKET_IFNAME"] = "lo"  # where TensorPipe listens; a value of the user's would open a public port
    _init(rank)
    # The shared-memory transport is left out: its reactor spins, and with more processes than cores it starved single
    # workers for seconds. Between processes of one machine tensors are read across (cma), else they take the socket.
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=threads, rpc_timeout=seconds, _transports=["uv"],
        _channels=["cma", "basic"] if cma else ["basic"],
    )  # fmt: skip
    api._init_rpc_states(TensorPipeAgent(store, name, rank, world_size, options, {}, []))  # type: ignore[no-untyped-call]
    address = store.get(f"addrs/{name}").decode()
    if not address.startswith(f"uv://{LOOPBACK}:"):
        stop_agent()
        raise RuntimeError(f"torch {torch.__version__} listens at {address} instead of {LOOPBACK}: refusing")


def stop_agent() -> None:
    """Stops the agent of this process, if there is one. Another may be started afterwards."""
    if api._is_current_rpc_agent_set():  # type: ignore[attr-defined]
        rpc.shutdown(graceful=False)


def versions() -> dict[str, Any]:
    """What this end of a connection runs."""
    return {
        "program": __version__,
        "protocol": PROTOCOL_VERSION,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
