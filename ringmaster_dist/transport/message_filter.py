"""The filter in front of the server's RPC agent. It forwards Python calls of bounded size and their tensors, only.

A holder of the token may act as a worker and as nothing else. Its calls reach the restricted unpickler. Torch would
also serve operators by name, remote references and autograd contexts. Those are messages of other types and end the
connection, as does any length that differs from what was announced or exceeds what the model needs. A filter forwards a
message after it has checked all of it. Of a tensor's bytes it checks the length.

A worker's end of the tunnel uses the same filters on its own agent. There a failure means that torch's bytes have
changed. One thread uses a filter, and several threads use a `Pipe`.
"""

from __future__ import annotations

import queue
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ringmaster_dist.transport import tensorpipe
from ringmaster_dist.transport.tensorpipe import LENGTH_BYTES, ProtocolError

_MOST_CALL_BYTES = 1 << 14  # the largest call, a request to join, has a few hundred
_MOST_SMALL_BYTES = 1 << 12  # brochures, descriptors
_ANNOUNCED_SECONDS = 60.0  # a tensor's bytes wait this long for the announcement on the other connection


@dataclass
class Pipe:
    """What the connections of one worker share."""

    name: str
    most_tensor_bytes: float
    owns_process: Callable[[int], bool] = lambda process: True  # whether the worker is this process of this machine
    shares_memory: bool = True  # whether the worker is on the server's machine; if not, cma is not offered
    sends_tensors: bool = False  # as bytes over a connection, not by their address
    _announced: queue.SimpleQueue[int] = field(default_factory=queue.SimpleQueue)  # lengths of tensors yet to come

    def announce(self, length: int) -> None:
        if self.sends_tensors:
            self._announced.put(length)

    def next_announced(self) -> int:
        """The length of the next tensor. Blocks, since the announcement travels on another connection."""
        try:
            return self._announced.get(timeout=_ANNOUNCED_SECONDS)
        except queue.Empty:
            raise ProtocolError("a tensor that was not announced") from None


class Filter:
    """Checks one connection, from the second frame on. Subclasses say what each frame may be.

    A frame is held back until all of it is checked, unless `passes_unseen` allows its length. If anything is wrong,
    `filter` raises `ProtocolError` and the frame is never forwarded.
    """

    most_bytes = 0  # of a frame
    where = ""  # the last words of the error about a longer frame

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe
        self._held = bytearray()  # the beginning of a frame, with its length
        self._checked = bytearray()  # frames that may pass
        self._passing = 0  # bytes of the current frame that may pass as they come

    def filter(self, data: memoryview) -> Iterator[bytes | memoryview]:
        """Yields what may pass of this data and of data that was held back before."""
        while data:
            if self._passing:
                yield from self._release()
                piece, data = data[: self._passing], data[self._passing :]
                self._passing -= len(piece)
                yield piece
                continue
            held = self._held
            missing = LENGTH_BYTES - len(held)
            if missing <= 0:
                missing += struct.unpack_from("<Q", held)[0]
            held += data[:missing]
            data = data[missing:]
            if len(held) < LENGTH_BYTES:
                continue
            (length,) = struct.unpack_from("<Q", held)
            if len(held) == LENGTH_BYTES and self.passes_unseen(length):
                self._passing = length
            elif len(held) < LENGTH_BYTES + length:
                continue
            else:
                held[:] = tensorpipe.framed(self.check(bytes(held[LENGTH_BYTES:])))
            self._checked += held
            held.clear()
        if self.is_between_messages:
            yield from self._release()

    def _release(self) -> Iterator[bytes]:
        if self._checked:
            yield bytes(self._checked)
            self._checked.clear()

    @property
    def is_between_messages(self) -> bool:
        """Whether the checked frames are whole messages, and not the beginning of one."""
        return True

    def passes_unseen(self, length: int) -> bool:
        """Called once with each frame's length. Returns whether its content passes unchecked. Raises if too long."""
        if length > self.most_bytes:
            raise ProtocolError(f"a frame of {length} bytes {self.where}")
        return False

    def check(self, frame: bytes) -> bytes:
        """Called with each whole frame that does not pass unseen. Returns the frame to forward."""
        return frame


class CallFilter(Filter):
    """For the connection with the calls: a brochure, then messages. A message passes after all of it was checked."""

    def __init__(self, pipe: Pipe) -> None:
        super().__init__(pipe)
        self._has_brochure = False
        self._expected: list[int] = []  # the lengths of this message's payloads that are still to come
        self._tensors: list[int] = []

    def passes_unseen(self, length: int) -> bool:
        limit = self._expected[0] if self._expected else _MOST_SMALL_BYTES
        if length > limit or (self._expected and length != limit):
            raise ProtocolError(f"a frame of {length} bytes where {limit} are allowed")
        return False

    @property
    def is_between_messages(self) -> bool:
        return not self._expected

    def check(self, frame: bytes) -> bytes:
        if not self._has_brochure:
            frame = tensorpipe.read_brochure(frame, without="" if self._pipe.shares_memory else "cma")
            self._has_brochure = True
        elif not self._expected:
            self._begin(tensorpipe.read_descriptor(frame))
        else:
            self._expected.pop(0)
            remaining = len(self._expected)
            if remaining == 3 and frame != tensorpipe.PYTHON_CALL:
                raise ProtocolError(f"a message of type 0x{frame[::-1].hex()}, which is no call of this system")
            if remaining == 0:
                tensorpipe.check_tensors(frame, self._tensors)
        return frame

    def _begin(self, message: tensorpipe.Descriptor) -> None:
        kind, number, call, description = message.payloads
        if (kind, number) != (4, 8) or description > _MOST_SMALL_BYTES:
            raise ProtocolError("a message that is not one of torch RPC")
        if not call or 0 in message.tensors:  # torch sends nothing for an empty tensor, and expects nothing
            raise ProtocolError("an empty call or tensor")
        if call > _MOST_CALL_BYTES:
            raise ProtocolError(f"a call of {call} bytes; the longest of this system have {_MOST_CALL_BYTES}")
        if len(message.tensors) > 1 or sum(message.tensors) > self._pipe.most_tensor_bytes:
            most = f"one of {self._pipe.most_tensor_bytes:g} bytes"
            raise ProtocolError(f"tensors of {message.tensors} bytes where the model needs {most}")
        self._expected, self._tensors = list(message.payloads), message.tensors
        for length in message.tensors:
            self._pipe.announce(length)


class TensorFilter(Filter):
    """For the channel ``basic``: the bytes of each announced tensor, in the order of their announcements."""

    def passes_unseen(self, length: int) -> bool:
        announced = self._pipe.next_announced()
        if length != announced:
            raise ProtocolError(f"a tensor of {length} bytes that was announced with {announced}")
        return True


class MemoryAddressFilter(Filter):
    """For the first connection of the channel ``cma``: where in its own memory the worker has a tensor."""

    most_bytes, where = _MOST_SMALL_BYTES, "on a connection for addresses"

    def check(self, frame: bytes) -> bytes:
        process = tensorpipe.read_memory_address(frame)
        if not self._pipe.owns_process(process):
            raise ProtocolError(f"a tensor in the memory of process {process}, which is not the worker's")
        return frame


class CompletionFilter(Filter):
    """For the second connection of ``cma``: an empty frame for each tensor that the worker has read."""

    most_bytes, where = 0, "on a connection for empty ones"


class NothingPasses(Filter):
    """For the second connection of a pipe, which torch does not use for tensors in the memory of the CPU."""

    most_bytes, where = -1, "on a connection that torch does not use"


class AllPasses(Filter):
    """For bytes from the server. Its agent is trusted."""

    def filter(self, data: memoryview) -> Iterator[bytes | memoryview]:
        if data:
            yield data


class AnswerFilter(AllPasses):
    """For bytes from the server on a connection with calls. The answer to the brochure is read and may be replaced."""

    most_bytes, where = _MOST_SMALL_BYTES, "in place of an answer"

    def __init__(self, pipe: Pipe, on_answer: Callable[[tensorpipe.Answer], bytes]) -> None:
        """``on_answer`` returns the frame to forward in place of the answer."""
        super().__init__(pipe)
        self._on_answer, self._is_answered = on_answer, False

    def filter(self, data: memoryview) -> Iterator[bytes | memoryview]:
        if self._is_answered:
            yield from super().filter(data)
            return
        yield from Filter.filter(self, data)
        if self._is_answered:  # the bytes that came together with the answer
            yield bytes(self._held)

    def passes_unseen(self, length: int) -> bool:
        return self._is_answered or super().passes_unseen(length)

    def check(self, frame: bytes) -> bytes:
        answer = tensorpipe.read_answer(frame)
        self._is_answered = True
        self._pipe.sends_tensors = "basic" in answer.channels
        return self._on_answer(answer)


def further_filters(answer: tensorpipe.Answer) -> dict[int, type[Filter]]:
    """The filter for each further connection that the server's answer asks for, by registration number."""
    filters: dict[int, type[Filter]] = {answer.reply: NothingPasses}
    for name, numbers in answer.channels.items():
        kinds: list[type[Filter]] = [TensorFilter] if name == "basic" else [MemoryAddressFilter, CompletionFilter]
        filters.update(zip(numbers, kinds, strict=True))
    return filters
