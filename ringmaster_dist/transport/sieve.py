"""What a worker may send to the server's RPC agent: Python calls of bounded size, their tensors, nothing else.

A holder of the token is a worker and nothing more. Its calls reach the restricted unpickler. Torch would also serve
operators by name, remote references and autograd contexts; those are messages of other types and end the connection, as
does any length that differs from what was announced or exceeds what the model needs. The sieve forwards a message only
after it has checked all of it, except the bytes of its tensor, of which it has checked the length.

A worker's end of the tunnel uses the same sieve on its own agent: there it says that torch's bytes have changed.
"""

from __future__ import annotations

import queue
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ringmaster_dist.transport import tensorpipe
from ringmaster_dist.transport.tensorpipe import LENGTH_BYTES, Unexpected

MOST_CALL_BYTES = 1 << 14  # the largest call of ours, a request to join, has a few hundred
_MOST_SMALL_BYTES = 1 << 12  # brochures, descriptors
_ANNOUNCED_SECONDS = 60.0  # a tensor's bytes may come this long before the message they belong to


@dataclass
class Pipe:
    """What the connections of one worker have in common."""

    name: str
    most_tensor_bytes: float
    owns_process: Callable[[int], bool] = lambda process: True  # whether the worker is this process of this machine
    shares_memory: bool = True  # whether it is known to be on the server's machine; if not, cma is not offered
    sends_tensors: bool = False  # over a connection, not by their address
    _announced: queue.SimpleQueue[int] = field(default_factory=queue.SimpleQueue)  # bytes of tensors yet to come

    def announce(self, length: int) -> None:
        if self.sends_tensors:
            self._announced.put(length)

    def next_announced(self) -> int:
        """The length of the next tensor. Waits: its message travels on another connection and may be behind it."""
        try:
            return self._announced.get(timeout=_ANNOUNCED_SECONDS)
        except queue.Empty:
            raise Unexpected("a tensor that was not announced") from None


class Sieve:
    """Checks one connection, from its second frame on. `sift` raises `Unexpected`."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe
        self._held = bytearray()  # a frame that is not whole yet, with its length
        self._checked = bytearray()  # frames that may pass
        self._passing = 0  # bytes of the current frame that may pass as they come

    def sift(self, data: memoryview) -> Iterator[bytes | memoryview]:
        """What of this, and of what was held back before, may pass."""
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
            if len(held) == LENGTH_BYTES and self.passes(length):
                self._passing = length
            elif len(held) < LENGTH_BYTES + length:
                continue
            else:
                held[:] = tensorpipe.framed(self.check(bytes(held[LENGTH_BYTES:])))
            self._checked += held
            held.clear()
        if self.is_whole:
            yield from self._release()

    def _release(self) -> Iterator[bytes]:
        if self._checked:
            yield bytes(self._checked)
            self._checked.clear()

    @property
    def is_whole(self) -> bool:
        """Whether what was checked so far is good by itself, and not the beginning of something longer."""
        return True

    def passes(self, length: int) -> bool:
        """Called once with the length of each frame: whether its content passes unseen. Raises if it is too long."""
        raise NotImplementedError

    def check(self, frame: bytes) -> bytes:
        """Called with each whole frame that does not pass unseen; returns what passes in its place."""
        return frame


class Calls(Sieve):
    """The connection with the calls: a brochure, then messages."""

    def __init__(self, pipe: Pipe) -> None:
        super().__init__(pipe)
        self._has_brochure = False
        self._expected: list[int] = []  # the lengths of this message's payloads that are still to come
        self._tensors: list[int] = []

    def passes(self, length: int) -> bool:
        limit = self._expected[0] if self._expected else _MOST_SMALL_BYTES
        if length > limit or (self._expected and length != limit):
            raise Unexpected(f"a frame of {length} bytes where {limit} are allowed")
        return False

    @property
    def is_whole(self) -> bool:
        """A message passes as a whole, when all of it was checked."""
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
                raise Unexpected(f"a message of type 0x{frame[::-1].hex()}, which is no call of this system")
            if remaining == 0:
                tensorpipe.check_tensors(frame, self._tensors)
        return frame

    def _begin(self, message: tensorpipe.Descriptor) -> None:
        kind, number, call, description = message.payloads
        if (kind, number) != (4, 8) or description > _MOST_SMALL_BYTES:
            raise Unexpected("a message that is not one of torch RPC")
        if not call or 0 in message.tensors:  # torch sends nothing for an empty tensor, and expects nothing
            raise Unexpected("an empty call or tensor")
        if call > MOST_CALL_BYTES:
            raise Unexpected(f"a call of {call} bytes; the longest of this system have {MOST_CALL_BYTES}")
        if len(message.tensors) > 1 or sum(message.tensors) > self._pipe.most_tensor_bytes:
            most = f"one of {self._pipe.most_tensor_bytes:g} bytes"
            raise Unexpected(f"tensors of {message.tensors} bytes where the model needs {most}")
        self._expected, self._tensors = list(message.payloads), message.tensors
        for length in message.tensors:
            self._pipe.announce(length)


class Tensors(Sieve):
    """The channel ``basic``: the bytes of each tensor that was announced, in that order."""

    def passes(self, length: int) -> bool:
        announced = self._pipe.next_announced()
        if length != announced:
            raise Unexpected(f"a tensor of {length} bytes that was announced with {announced}")
        return True


class Addresses(Sieve):
    """The first connection of the channel ``cma``: where in its own memory the worker has a tensor."""

    def passes(self, length: int) -> bool:
        if length > _MOST_SMALL_BYTES:
            raise Unexpected(f"a frame of {length} bytes on a connection for addresses")
        return False

    def check(self, frame: bytes) -> bytes:
        process = tensorpipe.read_memory_address(frame)
        if not self._pipe.owns_process(process):
            raise Unexpected(f"a tensor in the memory of process {process}, which is not the worker's")
        return frame


class Completions(Sieve):
    """The second connection of ``cma``: an empty frame for each tensor that the worker has read."""

    def passes(self, length: int) -> bool:
        if length:
            raise Unexpected(f"a frame of {length} bytes on a connection for empty ones")
        return False


class Silence(Sieve):
    """The second connection of a pipe: torch says nothing on it where tensors are in the memory of the CPU."""

    def passes(self, length: int) -> bool:
        raise Unexpected("a frame on a connection that torch does not use")


class Everything(Sieve):
    """From the server: its agent is trusted, and its bytes pass as they are."""

    def sift(self, data: memoryview) -> Iterator[bytes | memoryview]:
        if data:
            yield data


class Answered(Everything):
    """From the server on a connection with calls: the answer to the brochure is read, and perhaps changed."""

    def __init__(self, pipe: Pipe, answered: Callable[[tensorpipe.Answer], bytes]) -> None:
        """``answered`` gets it and returns the frame that is passed on."""
        super().__init__(pipe)
        self._answered, self._is_answered = answered, False

    def sift(self, data: memoryview) -> Iterator[bytes | memoryview]:
        if self._is_answered:
            yield from super().sift(data)
            return
        yield from Sieve.sift(self, data)
        if self._is_answered:  # what followed it at once passes too
            yield bytes(self._held)

    def passes(self, length: int) -> bool:
        if self._is_answered:
            return True
        if length > _MOST_SMALL_BYTES:
            raise Unexpected(f"an answer of {length} bytes")
        return False

    def check(self, frame: bytes) -> bytes:
        answer = tensorpipe.read_answer(frame)
        self._is_answered = True
        self._pipe.sends_tensors = "basic" in answer.channels
        return self._answered(answer)


def sieves_of(answer: tensorpipe.Answer) -> dict[int, type[Sieve]]:
    """The sieve for each further connection that the server's answer asks for, by registration number."""
    sieves: dict[int, type[Sieve]] = {answer.reply: Silence}
    for name, numbers in answer.channels.items():
        kinds: list[type[Sieve]] = [Tensors] if name == "basic" else [Addresses, Completions]
        sieves.update(zip(numbers, kinds, strict=True))
    return sieves
