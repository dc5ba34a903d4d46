"""How numbers travel: gradients and iterates may be rounded to a shorter type for the wire.

Both ends and the replay round here and nowhere else, so a replay of a run with a narrow wire finds the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ringmaster_dist.buffers import Buffers
from ringmaster_dist.protocol import Snapshot


class Wire(NamedTuple):
    """Types on the wire; None: the type the problem computes in."""

    gradient_dtype: torch.dtype | None = None
    iterate_dtype: torch.dtype | None = None


class Ends:
    """The roundings at both ends of a wire, for tensors of one size; memory for them is used again."""

    def __init__(self, wire: Wire, size: int, dtype: torch.dtype) -> None:
        self._size, self._dtype = size, dtype
        self._gradient_dtype, self._iterate_dtype = wire.gradient_dtype or dtype, wire.iterate_dtype or dtype
        self._buffers: dict[torch.dtype, Buffers] = {}

    def pack_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        return self._to(gradient.detach(), self._gradient_dtype)

    def pack_iterate(self, iterate: torch.Tensor) -> torch.Tensor:
        return self._to(iterate, self._iterate_dtype)

    def pack(self, snapshot: Snapshot) -> Snapshot:
        return snapshot._replace(iterate=self.pack_iterate(snapshot.iterate))

    def unpack_iterate(self, iterate: torch.Tensor) -> torch.Tensor:
        return self._to(iterate, self._dtype)

    def empty(self) -> torch.Tensor:
        """Memory for an iterate."""
        return self._of(self._dtype).take()

    @property
    def empty_rounded(self) -> Callable[[], torch.Tensor] | None:
        """Memory for an iterate as it travels; None where that is as it is."""
        return None if self._iterate_dtype == self._dtype else self._of(self._iterate_dtype).take

    def _to(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return tensor if tensor.dtype == dtype else self._of(dtype).take().copy_(tensor)

    def _of(self, dtype: torch.dtype) -> Buffers:
        return self._buffers.setdefault(dtype, Buffers(self._size, dtype))
