"""Memory for big tensors that is reused as soon as nothing refers to it.

Most of the cost of a fresh tensor is its page faults. While a tensor is being sent, only the transport refers to it, so
Python's reference count does not show that it is in use. The reference count of its storage does. If this torch does
not offer that count, memory is not reused.
"""

from __future__ import annotations

import threading

import torch

from ringmaster_dist import devices

_MOST_IDLE = 3  # beyond the memory that is in use
_count = getattr(torch._C, "_storage_Use_Count", None)


class Buffers:
    """Flat tensors of shape (size,) and one dtype, in host memory. Any thread may call this."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device | str = devices.CPU) -> None:
        """If ``device`` can copy by itself into page-locked memory, the memory is page-locked."""
        self._size, self._dtype, self._device = size, dtype, device
        self._all: list[tuple[torch.UntypedStorage, int]] = []  # each with its count while only this list refers to it
        self._lock = threading.Lock()

    def take(self) -> torch.Tensor:
        """Returns a tensor with undefined content. It belongs to the caller until the last reference to it is gone."""
        if _count is None:
            return self._allocated()
        with self._lock:
            idle = [entry for entry in self._all if _count(entry[0]._cdata) == entry[1]]
            for entry in idle[_MOST_IDLE:]:  # of peers that were slow, or have gone
                self._all.remove(entry)
            if idle:
                return torch.empty(0, dtype=self._dtype).set_(idle[0][0])
            tensor = self._allocated()
            storage = tensor.untyped_storage()
            self._all.append((storage, _count(storage._cdata) - 1))  # minus the tensor that is returned
            return tensor

    def _allocated(self) -> torch.Tensor:
        memory = devices.pinned(self._size, self._dtype, self._device)
        return torch.empty(self._size, dtype=self._dtype) if memory is None else memory

    def __len__(self) -> int:
        return len(self._all)
