"""What a peer may send: the calls and words of this system, tensors, and nothing that runs.

Torch RPC pickles calls and results. Its unpickler is replaced, for the whole process, by one that resolves only the
names that the other role sends: a server reads calls, a worker reads results. A tensor travels as
``getattr(_InternalRPCPickler, "_tensor_receiver")(index)``, and from some Pythons (3.11.0 to 3.11.3) a verdict as
``getattr(Verdict, "STALE")``, so ``getattr`` is resolved to a function that knows these cases alone.

A pickle is a program. This one may not call what it names (a call is handed out as a name, and looked up when the whole
message has been read), nor compute with what it builds: there are no dictionaries with entries, so nothing is hashed,
and a server makes no exceptions, so nothing is printed. A few hundred bytes can stand for a tuple of 2^60 elements.
"""

from __future__ import annotations

import builtins
import io
import pickle
import pickletools
from typing import IO, Any, NamedTuple

from torch.distributed.rpc import internal

from ringmaster_dist import protocol

_CALLS = ("join", "fetch", "push", "await_stale", "leave")
_SENT_BY_WORKERS = ("JoinRequest", "Push", "Interruptions")
_SENT_BY_SERVER = ("Welcome", "Reply", "Staleness", "Snapshot", "Receipt", "Verdict")
# What a result may say went wrong on the other side; they are only made from a text.
_EXCEPTIONS = ("Exception", "RuntimeError", "ValueError", "TypeError", "KeyError", "AttributeError", "IndexError")
# What a pickle of ours is made of. Others set attributes (BUILD), take room for a memo of any size (BINPUT), look into
# registries (EXT1), repeat what is there (DUP) or hash it (SETITEM).
_INSTRUCTIONS = frozenset(
    """PROTO FRAME STOP MARK MEMOIZE BINGET LONG_BINGET STACK_GLOBAL REDUCE NEWOBJ NONE NEWTRUE NEWFALSE BININT BININT1
    BININT2 LONG1 BINFLOAT SHORT_BINUNICODE BINUNICODE EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST APPEND APPENDS
    EMPTY_DICT""".split()  # noqa: SIM905
)
_MOST_BYTES = 1 << 20  # the longest message is a welcome, with the run's configuration


class _Call(NamedTuple):
    """The name of a call, while its message is read."""

    name: str


class RestrictedUnpickler(pickle.Unpickler):
    """Looks at all instructions of a message before it follows the first. The two roles are below."""

    def __init__(self, file: IO[bytes]) -> None:
        message = file.read(_MOST_BYTES + 1)
        if len(message) > _MOST_BYTES:
            raise pickle.UnpicklingError(f"refused: a message of more than {_MOST_BYTES} bytes")
        try:
            for instruction, _, _ in pickletools.genops(message):
                if instruction.name not in _INSTRUCTIONS:
                    raise pickle.UnpicklingError(f"refused: a message with the instruction {instruction.name}")
        except ValueError as error:
            raise pickle.UnpicklingError(f"refused: a message that is not a pickle ({error})") from error
        super().__init__(io.BytesIO(message))

    def find_class(self, module: str, name: str) -> Any:
        if module == internal.__name__ and name == "_InternalRPCPickler":
            return internal._InternalRPCPickler
        found = self.known(module, name)
        if found is None:
            what = f"{module}.{name}"[:80]
            raise pickle.UnpicklingError(f"refused: {what!a} is not part of this system's exchange")
        return found

    def known(self, module: str, name: str) -> Any:
        """What a name stands for in this role; None: nothing."""
        raise NotImplementedError


class ServersUnpickler(RestrictedUnpickler):
    """Of calls."""

    def known(self, module: str, name: str) -> Any:
        if module == "ringmaster_dist.transport.surface" and name in _CALLS:
            return _Call(name)
        if module == protocol.__name__ and name in _SENT_BY_WORKERS:
            return getattr(protocol, name)
        if module == internal.__name__ and name == "PythonUDF":
            return internal.PythonUDF
        return _tensor_receiver if (module, name) == ("builtins", "getattr") else None

    def load(self) -> Any:
        from ringmaster_dist.transport import surface

        call = super().load()
        good = type(call) is internal.PythonUDF and type(call.func) is _Call and type(call.args) is tuple
        if not good or type(call.kwargs) is not dict or call.kwargs:
            raise pickle.UnpicklingError("refused: a message that is not one of the five calls")
        return call._replace(func=getattr(surface, call.func.name))


class WorkersUnpickler(RestrictedUnpickler):
    """Of results."""

    def known(self, module: str, name: str) -> Any:
        if module == protocol.__name__ and name in _SENT_BY_SERVER:
            return getattr(protocol, name)
        if module == internal.__name__ and name == "RemoteException":
            return internal.RemoteException
        if module == "builtins" and name in _EXCEPTIONS:
            return getattr(builtins, name)
        return _tensor_receiver_or_word if (module, name) == ("builtins", "getattr") else None


def _tensor_receiver(owner: object, name: object) -> Any:
    if owner is internal._InternalRPCPickler and type(name) is str and name == "_tensor_receiver":
        return internal._InternalRPCPickler._tensor_receiver
    raise pickle.UnpicklingError("refused: getattr of something else")


def _tensor_receiver_or_word(owner: object, name: object) -> Any:
    if (owner is protocol.Verdict or owner is protocol.Staleness) and type(name) is str and name in owner.__members__:
        return owner[name]
    return _tensor_receiver(owner, name)


def restrict(unpickler: type[RestrictedUnpickler]) -> None:
    """From now on this process unpickles RPC messages in one of the two roles."""
    if not hasattr(internal, "_unpickler"):
        raise RuntimeError("this torch has no torch.distributed.rpc.internal._unpickler to replace: refusing to serve")
    internal._unpickler = unpickler
