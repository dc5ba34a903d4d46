"""Holds the one snapshot that workers get, and rounds it for the wire, in reused memory.

Only one thread at a time calls `compute_next`. `publish` and reads of `snapshot` happen under the lock of the service.
"""

from __future__ import annotations

from ringmaster_dist.buffers import Buffers
from ringmaster_dist.server.core import ServerCore
from ringmaster_dist.wire import Wire


class Publisher:
    """Computes what the core has decided into memory that is reused, and rounds each iterate once, for all workers."""

    def __init__(self, core: ServerCore, wire: Wire) -> None:
        """The core may not change its snapshot by other means from now on."""
        size, dtype = core.update.layout.size, core.update.dtype
        wire_dtype = wire.iterate_dtype or dtype
        self._core = core
        self._iterates = Buffers(size, dtype)
        self._rounded = None if wire_dtype == dtype else Buffers(size, wire_dtype)
        first = core.snapshot
        if self._rounded is not None:
            first = first._replace(iterate=self._rounded.take().copy_(first.iterate))
        self._computed = first
        self.snapshot = first  # what workers get, in the dtype of the wire

    def compute_next(self) -> None:
        """Computes the oldest thing decided. Workers get the result after `publish`."""
        core = self._core
        rounded = self._rounded.take() if self._rounded is not None else None
        core.apply_next(self._iterates.take(), rounded)
        if core.snapshot.version > self._computed.version:
            self._computed = core.snapshot if rounded is None else core.snapshot._replace(iterate=rounded)

    def publish(self) -> None:
        self.snapshot = self._computed
