"""Computes the updates that the core has decided, and holds the one snapshot that workers get.

In host memory an update is computed and published in one go. On an accelerator there are three stages, each with a
thread and a stream of its own, so that they overlap:

    accepted gradients ── copy in ──► [two buffers] ── update ──► the newest iterate ── round, copy out ──► the snapshot

A stage waits until the device has finished before it hands over, so no stage sees memory that is still written. The
last stage copies only the newest iterate. If copies take longer than updates, it passes over the others.

`publish` and reads of `snapshot` happen under the lock of the service. Only one thread at a time calls `compute_next`.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

import torch

from ringmaster_dist import devices
from ringmaster_dist.buffers import Buffers
from ringmaster_dist.protocol import Snapshot
from ringmaster_dist.server.core import ServerCore
from ringmaster_dist.wire import Wire


class Publisher:
    """Computes in host memory that is reused, and rounds each iterate once, for all workers."""

    threads: Sequence[tuple[str, Callable[[], None]]] = ()  # the names and work of the threads that it needs

    def __init__(self, core: ServerCore, wire: Wire, publish: Callable[[Snapshot], None]) -> None:
        """The core may not change its snapshot by other means from now on.

        ``publish`` gets each snapshot that workers may have, in the dtype of the wire, and makes it `snapshot`.
        """
        self._core, self._publish = core, publish
        self._wire_dtype = wire.iterate_dtype or core.update.dtype
        self._prepare()
        self.snapshot = self._computed  # what workers get

    def _prepare(self) -> None:
        size, dtype, first = self._core.update.layout.size, self._core.update.dtype, self._core.snapshot
        self._iterates = Buffers(size, dtype)
        self._rounded = None if self._wire_dtype == dtype else Buffers(size, self._wire_dtype)
        if self._rounded is not None:
            first = first._replace(iterate=self._rounded.take().copy_(first.iterate))
        self._computed = first

    def accepted(self, gradient: torch.Tensor) -> None:
        """The core has decided something with this gradient, as it arrived. Calls have the order of the decisions."""

    def compute_next(self) -> None:
        """Computes the oldest thing decided. Workers get the result after `hand_out`."""
        core = self._core
        rounded = self._rounded.take() if self._rounded is not None else None
        core.apply_next(self._iterates.take(), rounded)
        if core.snapshot.version > self._computed.version:
            self._computed = core.snapshot if rounded is None else core.snapshot._replace(iterate=rounded)

    def hand_out(self) -> None:
        """Publishes the newest iterate, now or soon. The caller does not hold the lock."""
        self._publish(self._computed)

    def close(self) -> None:
        """Ends the threads. Nothing is computed any more."""


class DevicePublisher(Publisher):
    """Computes on an accelerator, and copies gradients in and snapshots out meanwhile."""

    def _prepare(self) -> None:
        update = self._core.update
        size, arriving, device = update.layout.size, self._core.gradient_size, update.device
        self._device = device
        self._arrived: queue.SimpleQueue[torch.Tensor | None] = queue.SimpleQueue()  # in host memory; None at the end
        self._free: queue.SimpleQueue[torch.Tensor | None] = queue.SimpleQueue()  # on the device, as are the next
        self._copied: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        for _ in range(2):  # one is in use by the update, and the next gradient is copied to the other
            self._free.put(torch.empty(arriving, dtype=self._core.gradient_dtype, device=device))
        self._on_host = Buffers(size, self._wire_dtype, device)
        self._is_newer, self._closing = threading.Event(), False
        self._computed = self._copy_out()
        self.threads = (("gradients", self._copy_gradients), ("snapshots", self._copy_snapshots))

    def accepted(self, gradient: torch.Tensor) -> None:
        self._arrived.put(gradient)

    def compute_next(self) -> None:
        copied = None if self._core.decided[0].gradient is None else self._copied.get()
        self._core.apply_next(copied=copied)
        devices.finish(self._device)
        if copied is not None:
            self._free.put(copied)

    def hand_out(self) -> None:
        self._is_newer.set()

    def close(self) -> None:
        self._closing = True
        self._arrived.put(None)
        self._free.put(None)
        self._is_newer.set()

    def _copy_gradients(self) -> None:
        with devices.own_stream(self._device):
            while (gradient := self._arrived.get()) is not None and (free := self._free.get()) is not None:
                free.copy_(gradient)
                devices.finish(self._device)
                self._copied.put(free)

    def _copy_snapshots(self) -> None:
        with devices.own_stream(self._device):
            while self._is_newer.wait() and not self._closing:
                self._is_newer.clear()
                if self._core.snapshot.version > self._computed.version:
                    self._computed = self._copy_out()
                    self._publish(self._computed)

    def _copy_out(self) -> Snapshot:
        newest = self._core.snapshot
        host = self._on_host.take()  # (size,)
        host.copy_(newest.iterate.to(self._wire_dtype), non_blocking=host.is_pinned())
        devices.finish(self._device)
        return newest._replace(iterate=host)
