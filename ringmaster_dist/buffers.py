"""Memory for big tensors, used again as soon as nobody refers to it: most of what a fresh one costs is its pages.

A tensor that is being sent is referred to by the transport alone, so Python's own counts do not tell: the storage's
does. Where torch does not say it, memory is not used again.
"""

from __future__ import annotations

import threading

import torch

_count = getattr(torch._C, "_storage_Use_Count", None)


class Buffers:
    """Flat tensors of one size and type. May be asked by any thread."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        self._size, self._dtype = size, dtype
        self._all: list[tuple[torch.UntypedStorage, int]] = []  # with its count when only this list refers to it
        self._lock = threading.Lock()

    def take(self) -> torch.Tensor:
        """One whose content nobody needs; it is this caller's until the last reference to it is gone."""
        if _count is None:
            return torch.empty(self._size, dtype=self._dtype)
        with self._lock:
            for storage, idle in self._all:
                if _count(storage._cdata) == idle:
                    return torch.empty(0, dtype=self._dtype).set_(storage)
            tensor = torch.empty(self._size, dtype=self._dtype)
            storage = tensor.untyped_storage()
            self._all.append((storage, _count(storage._cdata) - 1))  # less the tensor that is handed out
            return tensor

    def __len__(self) -> int:
        return len(self._all)
