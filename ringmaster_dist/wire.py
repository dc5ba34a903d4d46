"""How numbers travel. Gradients and iterates may be rounded to a shorter dtype for the wire, gradients also to int8.

The worker, the server and the replay round in the same way, so a replay of a run with a narrow wire finds the same
bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ringmaster_dist import devices, quantized, randomness
from ringmaster_dist.buffers import Buffers


class Wire(NamedTuple):
    """The dtypes on the wire. None stands for the dtype that the problem computes in. int8 is for gradients only."""

    gradient_dtype: torch.dtype | None = None
    iterate_dtype: torch.dtype | None = None


class Codec:
    """Rounds flat tensors of shape (size,) for the wire, and widens them again, in host memory that is reused."""

    def __init__(
        self, wire: Wire, size: int, dtype: torch.dtype, device: torch.device | str = devices.CPU, *,
        copies: bool = False,
    ) -> None:  # fmt: skip
        """``device`` is where gradients are computed. With ``copies`` an encoded gradient is never the caller's memory,
        so the caller may overwrite the gradient while it is sent."""
        self.size, self._dtype, self._device = size, dtype, device
        self._gradient_dtype, self._iterate_dtype = wire.gradient_dtype or dtype, wire.iterate_dtype or dtype
        self._copies = copies
        self._buffers: dict[torch.dtype, Buffers] = {}
        self._quantizers: dict[torch.device, quantized.Quantizer] = {}

    @property
    def gradient_bytes(self) -> int:
        return quantized.length(self.size, self._gradient_dtype) * self._gradient_dtype.itemsize

    @property
    def iterate_bytes(self) -> int:
        return self.size * self._iterate_dtype.itemsize

    def encode_gradient(self, gradient: torch.Tensor, seed: int, worker: int, sequence: int) -> torch.Tensor:
        """The gradient, (size,) on any device, as it travels. For int8 the last three numbers determine the rounding.

        It is rounded where it is, so an accelerator sends only the rounded numbers to host memory.
        """
        gradient = gradient.detach()
        if self._gradient_dtype != quantized.DTYPE:
            encoded = self._to(gradient, self._gradient_dtype)
            return self._take(encoded.dtype).copy_(encoded) if self._copies and encoded is gradient else encoded
        quantizer = self._quantizers.get(gradient.device)
        if quantizer is None:
            quantizer = self._quantizers[gradient.device] = quantized.Quantizer(self.size, gradient.device)
        key = randomness.bits(randomness.worker_key(seed, randomness.STREAM_ROUNDING, worker), sequence)
        return quantizer.pack(gradient, key, self._take(quantized.DTYPE))

    def encode_iterate(self, iterate: torch.Tensor) -> torch.Tensor:
        return self._to(iterate, self._iterate_dtype)

    def decode_iterate(self, iterate: torch.Tensor) -> torch.Tensor:
        return self._to(iterate, self._dtype)

    def _to(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The tensor in this dtype and in host memory."""
        if devices.is_cpu(tensor.device):
            return tensor if tensor.dtype == dtype else self._take(dtype).copy_(tensor)
        return self._take(dtype).copy_(tensor.to(dtype))  # rounded on the device, so that fewer bytes are copied

    def _take(self, dtype: torch.dtype) -> torch.Tensor:
        if dtype not in self._buffers:
            self._buffers[dtype] = Buffers(quantized.length(self.size, dtype), dtype, self._device)
        return self._buffers[dtype].take()
