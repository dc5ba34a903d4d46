"""The ranks of one group: processes of one machine that compute one gradient together.

Numbers in host memory travel by gloo over loopback. If each rank has an accelerator of its own, iterates and gradients
travel by the accelerators' library (NCCL). Only tensors of fixed types travel, and no pickles. The main thread of a
process makes the calls that wait for other ranks, and every rank makes the same ones in the same order. Any thread may
call `interrupt` and `is_interrupted`.

Nobody waits for a rank that has died, because its connections close at once. A rank that lives and does not answer is
given up after `_STUCK_SECONDS`. Only the wait for the first rank's next order has no limit, because the first rank may
wait for its server.
"""

from __future__ import annotations

import logging
import mmap
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

from ringmaster_dist import devices
from ringmaster_dist.errors import Mistake
from ringmaster_dist.files import open_private
from ringmaster_dist.meeting import meeting_file
from ringmaster_dist.problems.ranks import mean_in_order

log = logging.getLogger(__name__)

FIRST = 0  # the rank that talks to the server
_STUCK_SECONDS = 600.0
_FOR_EVER = timedelta(days=3650)
_ORDER_NUMBERS = 6
_FLAG_BYTES = 8


class RankLost(Mistake):
    """Another rank of the group has died or does not answer. The group cannot continue."""


class Ranks:
    """The group as one of its ranks sees it. Every method but the two about interruption may raise `RankLost`."""

    def __init__(self, rank: int, num: int, start: str) -> None:
        """Blocks until all ranks are there. ``start`` tells the starts of one torchrun apart."""
        self.rank, self.num = rank, num
        self.is_broken = False  # True when this rank has missed a call that all ranks make together
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # its sockets are open to anybody who reaches them
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        self._path = meeting_file("group", f"-{start}.store")
        self._flag = self._open_flag()
        limit = timedelta(seconds=_STUCK_SECONDS)
        with self._together():
            store = FileStore(str(self._path), num)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=num, timeout=limit)
            self._patient = dist.new_group(backend="gloo", timeout=_FOR_EVER)
        self._exchange: HostExchange | DeviceExchange = HostExchange(rank, num, 0, torch.float32)

    def _open_flag(self) -> memoryview:
        """Memory that all ranks share: the number of the last order that is interrupted."""
        with open_private(self._path.with_suffix(".flag"), "a+b") as file:
            if os.fstat(file.fileno()).st_size < _FLAG_BYTES:
                os.truncate(file.fileno(), _FLAG_BYTES)  # to zeros, whichever rank is the first
            return memoryview(mmap.mmap(file.fileno(), _FLAG_BYTES)).cast("q")

    def close(self) -> None:
        """Removes the files of the group. The first rank calls it when all ranks have met for the last time."""
        for path in (self._path, self._path.with_suffix(".flag")):
            path.unlink(missing_ok=True)

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Around calls that all ranks make together."""
        try:
            yield
        except BaseException as error:
            self.is_broken = True
            if not isinstance(error, RuntimeError):
                raise
            log.info("rank %d: a call to the other ranks failed: %s", self.rank, error)
            raise RankLost("another rank of the group has died or does not answer") from error

    # --- orders ----------------------------------------------------------------------------------------------

    def order(self, *numbers: int) -> list[int]:
        """The first rank gives an order, and the others call this without numbers and wait for it."""
        padded = [*numbers, *[0] * (_ORDER_NUMBERS - len(numbers))]
        told = torch.tensor(padded, dtype=torch.int64)  # (6,)
        with self._together():
            dist.broadcast(told, FIRST, group=self._patient)
        return [int(number) for number in told]

    def text(self, source: int, text: str, num_bytes: int) -> str:
        """The text of the rank ``source``, which all ranks know to have this many bytes."""
        if num_bytes == 0:
            return ""
        told = torch.zeros(num_bytes, dtype=torch.uint8)  # (num_bytes,)
        if self.rank == source:
            told.copy_(torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8))
        with self._together():
            dist.broadcast(told, source, group=self._patient)
        return bytes(told.tolist()).decode()

    def compare(self, *numbers: float, patient: bool = False) -> list[list[float]]:
        """The numbers of every rank, by rank. Exact for whole numbers below 2**53."""
        mine = torch.tensor(numbers, dtype=torch.float64)  # (len(numbers),)
        every = [torch.empty_like(mine) for _ in range(self.num)]
        with self._together():
            dist.all_gather(every, mine, group=self._patient if patient else None)
        return [row.tolist() for row in every]

    # --- interruption ----------------------------------------------------------------------------------------

    def interrupt(self, number: int) -> None:
        """Tells all ranks that the order of this number, and those before it, need not be finished."""
        self._flag[0] = number

    def is_interrupted(self, number: int) -> bool:
        return self._flag[0] >= number

    # --- the numbers of a gradient ---------------------------------------------------------------------------

    def choose_exchange(self, device: str, size: int, dtype: torch.dtype) -> None:
        """Says how iterates and gradients, (size,), travel: by the accelerators if each rank has one of its own."""
        kind = torch.device(device).type
        rows = self.compare(zlib.crc32(kind.encode()), zlib.crc32(device.encode()), patient=True)
        is_own = len({name for _, name in rows}) == self.num and len({of_kind for of_kind, _ in rows}) == 1
        backend = dist.Backend.default_device_backend_map.get(kind, "gloo") if is_own else "gloo"
        if backend == "gloo" or not dist.is_backend_available(backend):
            backend, self._exchange = "gloo", HostExchange(self.rank, self.num, size, dtype)
        elif isinstance(self._exchange, HostExchange):
            with self._together():
                group = dist.new_group(backend=backend, timeout=timedelta(seconds=_STUCK_SECONDS))
            self._exchange = DeviceExchange(self.rank, self.num, size, dtype, device, group)
        log.info("rank %d of %d exchanges gradients by %s", self.rank, self.num, backend)

    def share(self, iterate: torch.Tensor) -> torch.Tensor:
        """The first rank's iterate, (size,), in host memory. The others give memory for it."""
        with self._together():
            return self._exchange.share(iterate)

    def mean(self, gradient: torch.Tensor) -> torch.Tensor:
        """The mean of all gradients, (size,), in host memory. It is defined on the first rank only."""
        with self._together():
            return self._exchange.mean(gradient)


class HostExchange:
    """By gloo. Each rank sums one piece of the gradient in the order of the ranks, and the first rank gets the pieces.

    gloo's own all-reduce would send as much, but its order depends on the number of ranks and on the piece.
    """

    def __init__(self, rank: int, num: int, size: int, dtype: torch.dtype) -> None:
        self._rank, self._num = rank, num
        self._sizes = [size // num + (owner < size % num) for owner in range(num)]  # of the pieces, by rank
        self._mine = self._sizes[rank]
        self._parts = torch.empty(num * self._mine, dtype=dtype)  # this rank's piece of every gradient
        self._mean = torch.empty(size if rank == FIRST else 0, dtype=dtype)

    def share(self, iterate: torch.Tensor) -> torch.Tensor:
        dist.broadcast(iterate, FIRST)
        return iterate

    def mean(self, gradient: torch.Tensor) -> torch.Tensor:
        dist.all_to_all_single(self._parts, gradient, [self._mine] * self._num, self._sizes)
        piece = mean_in_order(self._parts.view(self._num, self._mine).unbind())  # (mine,)
        if self._rank != FIRST:
            dist.send(piece, FIRST)
            return self._mean
        places = torch.split(self._mean, self._sizes)
        places[FIRST].copy_(piece)
        arriving = [dist.irecv(places[rank], rank) for rank in range(self._num) if rank != FIRST]
        for piece_of_another in arriving:
            assert piece_of_another is not None
            piece_of_another.wait()
        return self._mean


class DeviceExchange:
    """By the library of the accelerators, in device memory. The library chooses the order of the sum."""

    def __init__(
        self, rank: int, num: int, size: int, dtype: torch.dtype, device: str, group: dist.ProcessGroup | None = None
    ) -> None:
        self._rank, self._num, self._group = rank, num, group
        self._memory = torch.empty(size, dtype=dtype, device=device)  # (size,)
        self._iterate = devices.HostMemory(size, dtype, device)
        self._gradient = devices.HostMemory(size, dtype, device)

    def share(self, iterate: torch.Tensor) -> torch.Tensor:
        if self._rank == FIRST:
            self._memory.copy_(iterate)
        dist.broadcast(self._memory, FIRST, group=self._group)
        return self._iterate.receive(self._memory)

    def mean(self, gradient: torch.Tensor) -> torch.Tensor:
        self._memory.copy_(gradient)
        dist.all_reduce(self._memory, group=self._group)
        return self._gradient.receive(self._memory.div_(self._num))
