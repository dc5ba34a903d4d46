"""What a peer may send: the calls and words of this system, tensors, and nothing that runs.

Torch RPC pickles calls and results. Its unpickler is replaced, for the whole process, by one that resolves only the
names below. A tensor travels as ``getattr(_InternalRPCPickler, "_tensor_receiver")(index)``, and from some Pythons
(3.11.0 to 3.11.3) a verdict as ``getattr(Verdict, "STALE")``, so ``getattr`` is resolved to a function that knows these
cases alone.
"""

from __future__ import annotations

import builtins
import io
import pickle
import pickletools
from typing import IO, Any

from torch.distributed.rpc import internal

from ringmaster_dist import protocol

_CALLS = ("join", "fetch", "push", "await_stale", "leave")
_WORDS = ("JoinRequest", "Welcome", "Push", "Interruptions", "Reply", "Staleness", "Snapshot", "Receipt", "Verdict")
# What a result may say went wrong on the other side; they are only made from a text.
_EXCEPTIONS = ("Exception", "RuntimeError", "ValueError", "TypeError", "KeyError", "AttributeError", "IndexError")


def _only_what_is_known(owner: object, name: str) -> Any:
    if owner is internal._InternalRPCPickler and name == "_tensor_receiver":
        return internal._InternalRPCPickler._tensor_receiver
    if (owner is protocol.Verdict or owner is protocol.Staleness) and name in owner.__members__:
        return owner[name]
    raise pickle.UnpicklingError(f"refused: getattr of {name!r}")


# What a pickle of ours is made of. Others set attributes (BUILD), take room for a memo of any size (BINPUT), look into
# registries (EXT1) or repeat what is there (DUP).
_INSTRUCTIONS = frozenset(
    """PROTO FRAME STOP MARK MEMOIZE BINGET LONG_BINGET STACK_GLOBAL REDUCE NEWOBJ NONE NEWTRUE NEWFALSE BININT BININT1
    BININT2 LONG1 BINFLOAT SHORT_BINUNICODE BINUNICODE EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST APPEND APPENDS
    EMPTY_DICT SETITEM SETITEMS""".split()  # noqa: SIM905
)
_MOST_BYTES = 1 << 20  # the longest message is a welcome, with the run's configuration


class RestrictedUnpickler(pickle.Unpickler):
    """Looks at all instructions of a message before it follows the first."""

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
        if module == "ringmaster_dist.transport.surface" and name in _CALLS:
            from ringmaster_dist.transport import surface

            return getattr(surface, name)
        if module == protocol.__name__ and name in _WORDS:
            return getattr(protocol, name)
        if module == internal.__name__ and name in ("PythonUDF", "RemoteException", "_InternalRPCPickler"):
            return getattr(internal, name)
        if module == "builtins" and name == "getattr":
            return _only_what_is_known
        if module == "builtins" and name in _EXCEPTIONS:
            return getattr(builtins, name)
        raise pickle.UnpicklingError(f"refused: {module}.{name} is not part of this system's exchange")


def restrict() -> None:
    """From now on this process unpickles RPC messages with the list above."""
    if not hasattr(internal, "_unpickler"):
        raise RuntimeError("this torch has no torch.distributed.rpc.internal._unpickler to replace: refusing to serve")
    internal._unpickler = RestrictedUnpickler
