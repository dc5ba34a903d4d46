"""The filters between two RPC agents. They forward Python calls of bounded size, their results and tensors, only.

A holder of the token may act as a worker and as nothing else. Its calls reach the restricted unpickler. Torch would
also serve operators by name, remote references and autograd contexts. Those are messages of other types and end the
connection, as does any length that differs from what was announced or exceeds what the model needs. A server is trusted
no more: a worker's end of the tunnel checks its results in the same way. A filter forwards a message after it has
checked all of it. Of a tensor's bytes it checks the length.

Each end checks what comes from the other and lets its own agent's bytes pass. One thread uses a filter, and several
threads use a `Pipe`.
"""

from __future__ import annotations

import contextlib
import queue
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ringmaster_dist.transport import tensorpipe
from ringmaster_dist.transport.tensorpipe import LENGTH_BYTES, ProtocolError

_MOST_CALL_BYTES, _MOST_JOIN_BYTES = 1 << 10, 1 << 14  # a request to join lists the devices of a machine
_MOST_RESULT_BYTES = 1 << 20  # the largest result, a welcome, has the run's configuration
_MOST_SMALL_BYTES = 1 << 12  # brochures, descriptors
_ANNOUNCED_SECONDS = 60.0  # a tensor's bytes wait this long for the announcement on the other connection
_NO_LIMIT = float("inf")
_OVER = -1  # in place of an announced length
_MOST_TENSORS = 2  # of calls of one worker at a time; a worker has one, which may just have passed
_MOST_UNANSWERED = 16  # calls of one worker; a worker makes one at a time, and polls meanwhile
_CALLS_A_SECOND = 500.0  # of the workers at one address; more have to wait
_LEAST_BYTES_A_SECOND, _GRACE_SECONDS = 1 << 15, 30.0  # a tensor that is slower than both together is given up


class Share:
    """What the workers at one address may use of the server together; by default all. Any thread may call it.

    At most ``most_tensors`` are on their way, both ways. After ``most_joins``, one is allowed every so many seconds.
    After as many calls as there are in one second, they wait.
    """

    def __init__(self, most_tensors: float = _NO_LIMIT, most_joins: float = _NO_LIMIT, every: float = 1.0) -> None:
        self._most_tensors, self._most_joins, self._every = most_tensors, most_joins, every
        self._joins, self._since = most_joins, time.monotonic()
        self._calls_until = 0.0  # the moment until which the calls so far have used up the allowance
        self._lock = threading.Lock()
        self.num_pipes = self.num_tensors = 0

    @property
    def is_used_up(self) -> bool:
        return self.num_tensors >= self._most_tensors or self._calls_until > time.monotonic() + 1.0

    def add(self, tensors: int) -> None:
        with self._lock:
            self.num_tensors += tensors

    def call(self) -> None:
        """Counts a call."""
        if self._most_joins != _NO_LIMIT:
            with self._lock:
                self._calls_until = max(self._calls_until, time.monotonic()) + 1.0 / _CALLS_A_SECOND

    def join(self) -> None:
        """Counts a join. Raises ProtocolError if there were too many."""
        with self._lock:
            now = time.monotonic()
            self._joins = min(self._most_joins, self._joins + (now - self._since) / self._every)
            self._since = now
            if self._joins < 1:
                raise ProtocolError("more joins than a worker's machine needs")
            self._joins -= 1


class Flow:
    """The tensors that travel one way through a pipe, as bytes over a connection. Any thread may call this."""

    def __init__(self, share: Share) -> None:
        self._share = share
        self._announced: queue.SimpleQueue[int] = queue.SimpleQueue()  # lengths of tensors yet to come
        self.deadlines: deque[float] = deque()  # of the tensors that have not passed completely

    def announce(self, length: int) -> None:
        self.deadlines.append(time.monotonic() + _GRACE_SECONDS + length / _LEAST_BYTES_A_SECOND)
        self._share.add(1)
        self._announced.put(length)

    def next_announced(self) -> int:
        """The length of the next tensor. Blocks, since the announcement travels on another connection."""
        try:
            length = self._announced.get(timeout=_ANNOUNCED_SECONDS)
        except queue.Empty:
            raise ProtocolError("a tensor that was not announced") from None
        if length == _OVER:
            raise ConnectionAbortedError("the connection for calls has ended")
        return length

    def passed(self) -> None:
        with contextlib.suppress(IndexError):  # `end` was first
            self.deadlines.popleft()
            self._share.add(-1)

    @property
    def deadline(self) -> float:
        try:
            return self.deadlines[0]
        except IndexError:
            return float("inf")

    def end(self) -> None:
        """The pipe has ended, and with it the tensors on their way. A thread that waits for the next one is woken."""
        self._announced.put(_OVER)
        while self.deadlines:
            self.passed()


@dataclass(eq=False)
class Pipe:
    """What the connections of one worker share."""

    name: str
    most_tensor_bytes: float
    share: Share = field(default_factory=Share)
    process: int = 0  # the peer's on this machine, which may share its memory; 0 if there is none
    sends_tensors: bool | None = None  # as bytes over a connection, or by their address; None before the answer
    num_unanswered: int = 0  # calls
    end: Callable[[], None] = lambda: None  # ends all connections

    def __post_init__(self) -> None:
        self.calls, self.results = Flow(self.share), Flow(self.share)


class Filter:
    """Checks one connection, from the second frame on. This one passes frames up to a length.

    A frame is held back until all of it is checked, unless `passes_unseen` allows its length. If anything is wrong,
    `filter` raises `ProtocolError` and the frame is never forwarded.
    """

    def __init__(self, most_bytes: int = _MOST_SMALL_BYTES, where: str = "where short ones are allowed") -> None:
        self._most_bytes, self._where = most_bytes, where
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
                if not self._passing:
                    self.passed()
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
        if length > self._most_bytes:
            raise ProtocolError(f"a frame of {length} bytes {self._where}")
        return False

    def passed(self) -> None:
        """Called when a frame that passes unseen has been forwarded completely."""

    @property
    def is_waiting(self) -> bool:
        """Whether nothing more should be read at the moment."""
        return False

    def check(self, frame: bytes) -> bytes:
        """Called with each whole frame that does not pass unseen. Returns the frame to forward."""
        return frame


class AllPasses(Filter):
    """For bytes from this end's own agent."""

    def filter(self, data: memoryview) -> Iterator[memoryview]:
        yield data


class MessageFilter(Filter):
    """For the connection with the calls: a first frame, then messages. A message passes after all of it was checked."""

    kinds: frozenset[bytes]  # of messages that may pass
    most_message_bytes: int

    def __init__(self, pipe: Pipe) -> None:
        super().__init__()
        self._pipe, self._has_first = pipe, False
        self._expected: list[int] = []  # the lengths of this message's payloads that are still to come
        self._tensor: int | None = None  # the length of its tensor

    def passes_unseen(self, length: int) -> bool:
        limit = self._expected[0] if self._expected else _MOST_SMALL_BYTES
        if length > limit or (self._expected and length != limit):
            raise ProtocolError(f"a frame of {length} bytes where {limit} are allowed")
        return False

    @property
    def is_between_messages(self) -> bool:
        return not self._expected

    def check(self, frame: bytes) -> bytes:
        if not self._has_first:
            frame, self._has_first = self.check_first(frame), True
        elif not self._expected:
            self._begin(*tensorpipe.read_descriptor(frame))
        else:
            self._expected.pop(0)
            remaining = len(self._expected)
            if remaining == 3 and frame not in self.kinds:
                raise ProtocolError(f"a message of type 0x{frame[::-1].hex()}, which is none of this system")
            if remaining == 1:
                self.check_message(frame)
            if remaining == 0:
                tensorpipe.check_tensor(frame, self._tensor)
                self.counted(self._tensor)
        return frame

    def _begin(self, payloads: list[int], tensor: int | None) -> None:
        kind, number, length, description = payloads
        if (kind, number) != (4, 8) or description > _MOST_SMALL_BYTES:
            raise ProtocolError("a message that is not one of torch RPC")
        if not length or tensor == 0:  # torch sends nothing for an empty tensor, and expects nothing
            raise ProtocolError("an empty message or tensor")
        if length > self.most_message_bytes:
            raise ProtocolError(f"a message of {length} bytes; the longest have {self.most_message_bytes}")
        if (tensor or 0) > self._pipe.most_tensor_bytes:
            raise ProtocolError(f"a tensor of {tensor} bytes where the model needs {self._pipe.most_tensor_bytes:g}")
        self._expected, self._tensor = payloads, tensor

    def check_first(self, frame: bytes) -> bytes:
        """Called with the first frame. Returns the frame to forward in its place."""
        raise NotImplementedError

    def check_message(self, message: bytes) -> None:
        """Called with the pickle of the call or the result."""

    def counted(self, tensor: int | None) -> None:
        """Called once for each message, with the length of its tensor, before it is forwarded."""
        raise NotImplementedError


class CallFilter(MessageFilter):
    """For calls, which go to the server."""

    kinds = frozenset({tensorpipe.PYTHON_CALL})
    most_message_bytes = _MOST_JOIN_BYTES

    @property
    def is_waiting(self) -> bool:
        return self._pipe.share.is_used_up

    def check_first(self, frame: bytes) -> bytes:
        if tensorpipe.read_brochure(frame) and not self._pipe.process:
            raise ProtocolError("a brochure that shares the memory of an unknown process")
        return frame

    def check_message(self, message: bytes) -> None:
        self._pipe.share.call()
        if tensorpipe.name_of_call(message[1:]) == "join":  # after a byte that says how it is executed
            self._pipe.share.join()
        elif len(message) > _MOST_CALL_BYTES:
            raise ProtocolError(f"a call of {len(message)} bytes; the longest have {_MOST_CALL_BYTES}")

    def counted(self, tensor: int | None) -> None:
        if self._pipe.sends_tensors is None:  # its tensors would be counted wrongly, and torch waits for the answer
            raise ProtocolError("a call before the server's answer to its brochure")
        self._pipe.num_unanswered += 1
        if self._pipe.num_unanswered > _MOST_UNANSWERED:
            raise ProtocolError("more calls than it reads answers to")
        if tensor and len(self._pipe.calls.deadlines) >= _MOST_TENSORS:
            raise ProtocolError("a tensor before the bytes of those before it")
        if tensor and self._pipe.sends_tensors:
            self._pipe.calls.announce(tensor)


class ResultFilter(MessageFilter):
    """For results, which go to a worker. The first frame is the answer to the brochure."""

    kinds = frozenset({tensorpipe.PYTHON_RESULT, tensorpipe.EXCEPTION})
    most_message_bytes = _MOST_RESULT_BYTES

    def __init__(self, pipe: Pipe, on_answer: Callable[[tensorpipe.Answer], bytes]) -> None:
        """``on_answer`` returns the frame to forward in place of the answer."""
        super().__init__(pipe)
        self._on_answer = on_answer

    def check_first(self, frame: bytes) -> bytes:
        answer = tensorpipe.read_answer(frame)
        if answer.channel == "cma" and not self._pipe.process:
            raise ProtocolError("an answer that shares memory with an unknown process")
        self._pipe.sends_tensors = answer.channel == "basic"
        return self._on_answer(answer)

    def counted(self, tensor: int | None) -> None:
        self._pipe.num_unanswered -= 1
        if tensor and self._pipe.sends_tensors:
            self._pipe.results.announce(tensor)


class TensorFilter(Filter):
    """For the channel ``basic``: the bytes of each announced tensor, in the order of their announcements."""

    def __init__(self, flow: Flow) -> None:
        super().__init__()
        self._flow = flow

    def passes_unseen(self, length: int) -> bool:
        announced = self._flow.next_announced()
        if length != announced:
            raise ProtocolError(f"a tensor of {length} bytes that was announced with {announced}")
        return True

    def passed(self) -> None:
        self._flow.passed()


class MemoryAddressFilter(Filter):
    """For the first connection of the channel ``cma``: where in its own memory the peer has a tensor."""

    def __init__(self, process: int) -> None:
        super().__init__()
        self._process = process

    def check(self, frame: bytes) -> bytes:
        process = tensorpipe.read_memory_address(frame)
        if process != self._process:
            raise ProtocolError(f"a tensor in the memory of process {process}, which is not the peer's")
        return frame


def further_filters(answer: tensorpipe.Answer, pipe: Pipe, tensors: Flow) -> dict[int, Filter]:
    """The filter for each further connection that the server's answer asks for, by registration number."""
    if answer.channel == "basic":
        filters: list[Filter] = [TensorFilter(tensors)]
    else:  # the second one of cma has an empty frame for each tensor that the peer has read
        filters = [MemoryAddressFilter(pipe.process), Filter(0, "on a connection for empty ones")]
    unused = Filter(-1, "on a connection that torch does not use for tensors in the memory of the CPU")
    return {answer.reply: unused, **dict(zip(answer.numbers, filters, strict=True))}
