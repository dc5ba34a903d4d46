"""How numbers travel. Gradients and iterates may be rounded to a shorter dtype for the wire.

The worker, the server and the replay round in the same way, so a replay of a run with a narrow wire finds the same
bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ringmaster_dist.buffers import Buffers


class Wire(NamedTuple):
    """The dtypes on the wire. None stands for the dtype that the problem computes in."""

    gradient_dtype: torch.dtype | None = None
    iterate_dtype: torch.dtype | None = None


class Codec:
    """Rounds flat tensors of shape (size,) for the wire, and widens them again, in memory that is reused."""

    def __init__(self, wire: Wire, size: int, dtype: torch.dtype) -> None:
        self.size, self._dtype = size, dtype
        self._gradient_dtype, self._iterate_dtype = wire.gradient_dtype or dtype, wire.iterate_dtype or dtype
        self._buffers: dict[torch.dtype, Buffers] = {}

    def encode_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        return self._to(gradient.detach(), self._gradient_dtype)

    def encode_iterate(self, iterate: torch.Tensor) -> torch.Tensor:
        return self._to(iterate, self._iterate_dtype)

    def decode_iterate(self, iterate: torch.Tensor) -> torch.Tensor:
        return self._to(iterate, self._dtype)

    def _to(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if tensor.dtype == dtype:
            return tensor
        return self._buffers.setdefault(dtype, Buffers(self.size, dtype)).take().copy_(tensor)
