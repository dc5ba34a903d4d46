"""The wire format of torch's TensorPipe agents, as far as the tunnel has to know it.

A connection carries frames. A frame is eight bytes of length (little-endian), then the content. A worker opens one
connection for its calls. The first frame is a greeting with the worker's name, and the second is a brochure, which
lists the transports and channels that the worker can use. The server's answer has the address where the server expects
further connections, and a registration number for each of them. A further connection begins with its number.

After that, every call is a descriptor, which states all lengths, and four payload frames: the message type, the message
id, the call, and a pickle that describes the tensors. Tensors travel on the connections of a channel. The channel
``basic`` sends their bytes. The channel ``cma``, between processes of one machine, sends their address in the sender's
memory.

Frames are encoded with libnop. Every function here raises `ProtocolError` for bytes that differ from what torch is
known to write. Nothing is guessed and nothing is skipped.
"""

from __future__ import annotations

import re
import struct
from typing import NamedTuple

LENGTH_BYTES = 8
# Torch RPC's message types for a call of a Python function, for its result, and for an exception in place of it.
PYTHON_CALL, PYTHON_RESULT, EXCEPTION = (struct.pack("<i", kind) for kind in (0x102, 0x203, 0x237))
_DESCRIPTOR_REPLY = 1  # the purpose of a pipe's second connection
_STRUCTURE, _ARRAY, _MAP, _BINARY, _STRING, _VARIANT = 0xB9, 0xBA, 0xBB, 0xBC, 0xBD, 0xB8
_BASIC_BROCHURE = (
    b"\xb9\x02\xbb\x01\xbd\x02uv\xbd\x04uv:*\xbb\x01\xbd\x05basic\xbb\x01\xb9\x02\xbd\x03cpu\x00\xbd\x03any"
)
_WIDTHS = {0x80: "<B", 0x81: "<H", 0x82: "<I", 0x83: "<Q"}


class ProtocolError(ValueError):
    """A peer sent something that a worker or server of this system never sends."""


class Reader:
    """Decodes one frame from front to back."""

    def __init__(self, frame: bytes) -> None:
        self._frame, self.position = frame, 0

    def _take(self, count: int) -> bytes:
        piece = self._frame[self.position : self.position + count]
        if len(piece) != count:
            raise ProtocolError("a frame that is cut short")
        self.position += count
        return piece

    def _prefix(self, prefix: int) -> None:
        if self._take(1)[0] != prefix:
            raise ProtocolError(f"a frame without {prefix:#x} where it belongs")

    def integer(self) -> int:
        first = self._take(1)[0]
        if first < 0x80:
            return first
        if first not in _WIDTHS:
            raise ProtocolError("a frame without a number where it belongs")
        layout = _WIDTHS[first]
        (value,) = struct.unpack(layout, self._take(struct.calcsize(layout)))
        # TensorPipe aborts its process at an encoding that it does not expect, such as a wide one of a small number.
        if encoded(value)[0] != first:
            raise ProtocolError("a number that is written in another way than torch does")
        return int(value)

    def text(self) -> str:
        self._prefix(_STRING)
        return self._take(self.integer()).decode("latin-1")

    def numbers(self) -> list[int]:
        """A vector of 64-bit numbers."""
        self._prefix(_BINARY)
        data = self._take(self.integer())
        if len(data) % 8:
            raise ProtocolError("a vector of odd length")
        return list(struct.unpack(f"<{len(data) // 8}Q", data))

    def structure(self, members: int) -> None:
        self._prefix(_STRUCTURE)
        if self.integer() != members:
            raise ProtocolError("a structure with other members")

    def variant(self) -> int:
        self._prefix(_VARIANT)
        return self.integer()

    def count(self, prefix: int) -> range:
        """The indices of an array's or a map's elements."""
        self._prefix(prefix)
        return range(self.integer())

    def cpu(self) -> None:
        """The CPU, the only device that tensors are sent from and to."""
        self.structure(2)
        if (self.text(), self.integer()) != ("cpu", 0):
            raise ProtocolError("a tensor that is not in the memory of the CPU")

    def end(self) -> None:
        if self.position != len(self._frame):
            raise ProtocolError("a frame with something behind its end")


def read_greeting(frame: bytes) -> str | int:
    """The first frame of a connection: the worker's name for a new pipe, else a registration number."""
    reader = Reader(frame)
    kind = reader.variant()
    reader.structure(1)
    if kind not in (0, 1):
        raise ProtocolError("a greeting of another kind")
    greeting = reader.text() if kind == 0 else reader.integer()
    reader.end()
    return greeting


def read_brochure(frame: bytes, without: str = "") -> bytes:
    """Checks the list of a worker's transports and channels, and returns it without one channel."""
    reader = Reader(frame)
    reader.structure(2)
    if [reader.text() for _ in reader.count(_MAP) for _ in range(2)] != ["uv", "uv:*"]:
        raise ProtocolError("a brochure of other transports than uv")
    start, names, kept = reader.position, set(), []
    for _ in reader.count(_MAP):
        begin = reader.position
        name = reader.text()
        _cpu_descriptor(reader)
        names.add(name)
        if name != without:
            kept.append(frame[begin : reader.position])
    reader.end()
    if names not in ({"basic"}, {"basic", "cma"}) or len(kept) > len(names):
        raise ProtocolError(f"a brochure of the channels {sorted(names)}")
    return frame[:start] + bytes([_MAP, len(kept)]) + b"".join(kept)


def opening(name: str) -> bytes:
    """The greeting and the brochure of a worker that can use sockets only."""
    greeting = bytes([_VARIANT, 0, _STRUCTURE, 1, _STRING, len(name)]) + name.encode()
    return framed(greeting) + framed(_BASIC_BROCHURE)


def registration(number: int) -> bytes:
    """The greeting of a further connection."""
    return bytes([_VARIANT, 1, _STRUCTURE, 1]) + encoded(number)


class Answer(NamedTuple):
    """The server's answer to a brochure."""

    before: bytes  # the part of the frame before the address
    address: str  # where the worker is to open its further connections
    after: bytes  # the part of the frame after the address
    reply: int  # the registration number of the pipe's second connection
    channels: dict[str, list[int]]  # the registration numbers of each channel's connections

    @property
    def frame(self) -> bytes:
        return self.naming(self.address)

    def naming(self, address: str) -> bytes:
        """The same answer with another address in it."""
        return self.before + bytes([_STRING, len(address)]) + address.encode() + self.after


def read_answer(frame: bytes) -> Answer:
    reader = Reader(frame)
    reader.structure(7)
    if reader.text() != "uv":
        raise ProtocolError("an answer that chooses another transport than uv")
    start = reader.position
    address = reader.text()
    end = reader.position
    replies = {reader.integer(): reader.integer() for _ in reader.count(_MAP)}
    reader.text()
    channels = {reader.text(): reader.numbers() for _ in reader.count(_MAP)}
    for _ in reader.count(_MAP):
        reader.text()
        _cpu_descriptor(reader)
    if len(reader.count(_MAP)) != 1 or len(reader.count(_ARRAY)) != 2:
        raise ProtocolError("an answer about other than a pair of devices")
    reader.cpu()
    reader.cpu()
    reader.text()
    reader.end()
    if set(replies) != {_DESCRIPTOR_REPLY} or len(address) >= 0x80:
        raise ProtocolError("an answer with other connections")
    if {name: len(numbers) for name, numbers in channels.items()} not in ({"basic": 1}, {"cma": 2}):
        raise ProtocolError(f"an answer that chooses the channels {sorted(channels)}")
    return Answer(frame[:start], address, frame[end:], replies[_DESCRIPTOR_REPLY], channels)


class Descriptor(NamedTuple):
    """The lengths of a message's parts, in bytes."""

    payloads: list[int]
    tensors: list[int]


def read_descriptor(frame: bytes) -> Descriptor:
    reader = Reader(frame)
    reader.structure(3)
    metadata = [reader.text()]
    payloads, tensors = [], []
    for _ in reader.count(_ARRAY):
        reader.structure(2)
        payloads.append(reader.integer())
        metadata.append(reader.text())
    for _ in reader.count(_ARRAY):
        reader.structure(4)
        tensors.append(reader.integer())
        reader.cpu()
        reader.cpu()
        metadata.append(reader.text())
    reader.end()
    if len(payloads) != 4 or any(metadata):
        raise ProtocolError("a message that is not one of torch RPC")
    return Descriptor(payloads, tensors)


def read_memory_address(frame: bytes) -> int:
    """The process that a ``cma`` descriptor names. The address in that process may be any."""
    reader = Reader(frame)
    reader.structure(2)
    process = reader.integer()
    reader.integer()
    reader.end()
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


def check_tensors(pickle: bytes, lengths: list[int]) -> None:
    """Checks that the pickle describes one plain vector of the announced length, or no tensor if none was announced."""
    if not lengths:
        if pickle != _EMPTY:
            raise ProtocolError("a description of tensors that were not sent")
        return
    found = _VECTOR.fullmatch(pickle)
    if found is None or len(lengths) != 1:
        raise ProtocolError("a tensor that is not one plain vector")
    kind, stored, size = found.groups()
    item_bytes = _ITEM_BYTES.get(kind, 0)
    if not item_bytes or any(_integer(text) * item_bytes != lengths[0] for text in (stored, size)):
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


def _cpu_descriptor(reader: Reader) -> None:
    """A channel's entry for the CPU, and for no other device."""
    if len(reader.count(_MAP)) != 1:
        raise ProtocolError("a channel for other devices than the CPU")
    reader.cpu()
    reader.text()
