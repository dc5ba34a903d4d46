"""The wire format of torch's TensorPipe agents, as far as the tunnel has to know it.

A connection carries frames. A frame is eight bytes of length (little-endian), then the content. A worker opens one
connection for its calls. The first frame is a greeting with the worker's name, and the second is a brochure, which
lists the transports and channels that the worker can use. The server's answer has the address where the server expects
further connections, and a registration number for each of them. A further connection begins with its number.

After that, every call is a descriptor, which states all lengths, and four payload frames: the message type, the message
id, the call, and a pickle that describes the tensors. Tensors travel on the connections of a channel. The channel
``basic`` sends their bytes. The channel ``cma``, between processes of one machine, sends their address in the sender's
memory.

Frames are encoded with libnop. What torch writes has one form, so each kind of frame has one pattern here. A function
raises `ProtocolError` for a frame that does not match as a whole. Nothing is guessed and nothing is skipped.
"""

from __future__ import annotations

import re
import struct
from typing import NamedTuple

LENGTH_BYTES = 8
# Torch RPC's message types for a call of a Python function, for its result, and for an exception in place of it.
PYTHON_CALL, PYTHON_RESULT, EXCEPTION = (struct.pack("<i", kind) for kind in (0x102, 0x203, 0x237))
_WIDTHS = {0x80: "<B", 0x81: "<H", 0x82: "<I", 0x83: "<Q"}

# Variants begin with b8, structures b9, arrays ba, maps bb, vectors bc, texts bd. A number and the length follow.
_NUMBER = rb"([\0-\x7f]|\x80.|\x81..|\x82.{4}|\x83.{8})"
_TEXT = rb"\xbd([\0-\x7f][\x20-\x7e]*)"  # with its length
_CPU = rb"\xb9\x02\xbd\x03cpu\0"  # the only device that tensors are sent from and to
_ON_CPU = rb"\xbb\x01" + _CPU  # the device that a channel is for, and then the channel's name for this machine
_BASIC = rb"\xbd\x05basic" + _ON_CPU + rb"\xbd\x03any"
_CMA = rb"\xbd\x03cma" + _ON_CPU + _TEXT
_UV = rb"\xbd\x04uv:\*"
_GREETING = rb"\xb8(?:\0\xb9\x01" + _TEXT + rb"|\x01\xb9\x01" + _NUMBER + rb")"
_BROCHURE = (
    rb"\xb9\x02\xbb\x01\xbd\x02uv" + _UV
    + rb"\xbb(?:\x01" + _BASIC + rb"|\x02(?:" + _BASIC + _CMA + rb"|" + _CMA + _BASIC + rb"))"
)  # fmt: skip
_ANSWER = (
    rb"(\xb9\x07\xbd\x02uv)" + _TEXT + rb"(\xbb\x01\x01" + _NUMBER + _UV
    + rb"\xbb\x01(?:\xbd\x05basic\xbc\x08(.{8})\xbb\x01" + _BASIC + rb"|\xbd\x03cma\xbc\x10(.{16})\xbb\x01" + _CMA
    + rb")\xbb\x01\xba\x02" + _CPU * 2 + rb"\xbd(?:\x05basic|\x03cma))"
)  # fmt: skip
_PAYLOAD = rb"\xb9\x02" + _NUMBER + rb"\xbd\0"
_DESCRIPTOR = (
    rb"\xb9\x03\xbd\0\xba\x04" + _PAYLOAD * 4 + rb"\xba(?:\0|\x01\xb9\x04" + _NUMBER + _CPU * 2 + rb"\xbd\0)"
)  # fmt: skip
_MEMORY_ADDRESS = rb"\xb9\x02" + _NUMBER * 2


class ProtocolError(ValueError):
    """A peer sent something that a worker or server of this system never sends."""


def _parts(pattern: bytes, frame: bytes, what: str) -> tuple[bytes, ...]:
    found = re.fullmatch(pattern, frame, re.DOTALL)
    if found is None:
        raise ProtocolError(f"{what} that differs from what torch writes")
    return found.groups()


def _text(part: bytes) -> str:
    if part[0] != len(part) - 1:
        raise ProtocolError("a text of another length than it says")
    return part[1:].decode()


def _number(part: bytes) -> int:
    value = part[0] if len(part) == 1 else int.from_bytes(part[1:], "little")
    # TensorPipe aborts its process at an encoding that it does not expect, such as a wide one of a small number.
    if encoded(value) != part:
        raise ProtocolError("a number that is written in another way than torch does")
    return value


def read_greeting(frame: bytes) -> str | int:
    """The first frame of a connection: the worker's name for a new pipe, else a registration number."""
    name, number = _parts(_GREETING, frame, "a greeting")
    return _text(name) if name is not None else _number(number)


def read_brochure(frame: bytes) -> bool:
    """Checks the list of a worker's transports and channels. Returns whether it offers to share its memory."""
    machines = [_text(part) for part in _parts(_BROCHURE, frame, "a brochure") if part is not None]
    return bool(machines)


def opening(name: str) -> bytes:
    """The greeting and the brochure of a worker that can use sockets only."""
    greeting = b"\xb8\0\xb9\x01\xbd" + bytes([len(name)]) + name.encode()
    brochure = b"\xb9\x02\xbb\x01\xbd\x02uv\xbd\x04uv:*\xbb\x01\xbd\x05basic\xbb\x01\xb9\x02\xbd\x03cpu\0\xbd\x03any"
    return framed(greeting) + framed(brochure)


def registration(number: int) -> bytes:
    """The greeting of a further connection."""
    return b"\xb8\x01\xb9\x01" + encoded(number)


class Answer(NamedTuple):
    """The server's answer to a brochure."""

    before: bytes  # the part of the frame before the address
    address: str  # where the worker is to open its further connections
    after: bytes  # the part of the frame after the address
    reply: int  # the registration number of the pipe's second connection
    channel: str  # basic or cma
    numbers: tuple[int, ...]  # the registration numbers of the channel's connections

    def naming(self, address: str) -> bytes:
        """The same answer with another address in it."""
        return self.before + b"\xbd" + bytes([len(address)]) + address.encode() + self.after


def read_answer(frame: bytes) -> Answer:
    before, address, after, reply, basic, cma, machine = _parts(_ANSWER, frame, "an answer")
    channel, numbers = ("basic", basic) if basic is not None else ("cma", cma)
    if machine is not None:
        _text(machine)
    if not after.endswith(channel.encode()):
        raise ProtocolError("an answer that chooses two channels")
    return Answer(
        before, _text(address), after, _number(reply), channel, struct.unpack(f"<{len(numbers) // 8}Q", numbers)
    )


def read_descriptor(frame: bytes) -> tuple[list[int], int | None]:
    """The lengths of a message's payloads and of its tensor, in bytes."""
    *payloads, tensor = _parts(_DESCRIPTOR, frame, "a message")
    return [_number(part) for part in payloads], None if tensor is None else _number(tensor)


def read_memory_address(frame: bytes) -> int:
    """The process that a ``cma`` descriptor names. The address in that process may be any."""
    process, _ = (_number(part) for part in _parts(_MEMORY_ADDRESS, frame, "an address"))
    if process >= 1 << 31:
        raise ProtocolError("a number that is no process")
    return process


# Workers send one vector of shape (n,) without strides or offset. Torch's C++ unpickler does not compare sizes with the
# bytes that arrived, so a larger size would make it read out of bounds.
_INTEGER = rb"(K.|M..|J....|\x8a\x08.{8})"
_EMPTY = b"\x80\x02ctorch.jit._pickle\nbuild_tensorlist\nq\x00(](etR."
_VECTOR = re.compile(
    rb"\x80\x02ctorch\.jit\._pickle\nbuild_tensorlist\nq\x00\(\]\("
    rb"ctorch\._utils\n_rebuild_tensor_v2\nq\x01\(\(X\x07\0\0\0storageq\x02ctorch\n(\w{1,16})Storage\nq\x03"
    rb"X\x01\0\0\0000q\x04X\x03\0\0\0cpuq\x05" + _INTEGER + rb"tQq\x06K\0\(" + _INTEGER + rb"t\(K\x01t\x89"
    rb"ccollections\nOrderedDict\nq\x07\)RtRq\x08etR\.",
    re.DOTALL,
)
_ITEM_BYTES = {b"Double": 8, b"Float": 4, b"Half": 2, b"BFloat16": 2, b"Long": 8, b"Int": 4, b"Short": 2, b"Char": 1}


def check_tensor(pickle: bytes, length: int | None) -> None:
    """Checks that the pickle describes one plain vector of the announced length, or no tensor if none was announced."""
    if length is None:
        if pickle != _EMPTY:
            raise ProtocolError("a description of tensors that were not sent")
        return
    found = _VECTOR.fullmatch(pickle)
    if found is None:
        raise ProtocolError("a tensor that is not one plain vector")
    kind, stored, size = found.groups()
    item_bytes = _ITEM_BYTES.get(kind, 0)
    if not item_bytes or any(_integer(text) * item_bytes != length for text in (stored, size)):
        raise ProtocolError("a tensor of another size than the bytes that came")


def _integer(text: bytes) -> int:
    """A number of the pickle, decoded as the unpickler decodes it."""
    digits = text[2:] if text[:1] == b"\x8a" else text[1:]
    return int.from_bytes(digits, "little", signed=text[:1] in b"J\x8a")


_CALL = re.compile(
    rb"\x80[\x04\x05]\x95.{8}\x8c\x1etorch\.distributed\.rpc\.internal\x94\x8c\x09PythonUDF\x94\x93\x94"
    rb"\x8c\x1fringmaster_dist\.transport\.agent\x94\x8c.(join|fetch|push|await_stale|leave)\x94\x93\x94",
    re.DOTALL,
)


def name_of_call(pickle: bytes) -> str:
    """The name of the function that a call's pickle begins with. The unpickler checks that it calls this one."""
    found = _CALL.match(pickle)
    if found is None:
        raise ProtocolError("a call of none of this system's functions")
    return found[1].decode()


def framed(frame: bytes) -> bytes:
    return struct.pack("<Q", len(frame)) + frame


def encoded(value: int) -> bytes:
    """The shortest encoding of a non-negative number."""
    if value < 0x80:
        return bytes([value])
    prefix, layout = next((p, layout) for p, layout in _WIDTHS.items() if value < 1 << (8 * struct.calcsize(layout)))
    return bytes([prefix]) + struct.pack(layout, value)
