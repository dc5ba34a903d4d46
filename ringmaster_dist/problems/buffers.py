"""The buffers of a module as they were when it was made.

A forward pass in training mode changes some: running statistics, the vectors of spectral norm. A gradient must not
depend on the gradients before it, so they are put back.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn


class _Buffer(NamedTuple):
    owner: nn.Module
    name: str
    tensor: torch.Tensor | None
    initial: torch.Tensor | None


class Buffers:
    def __init__(self, module: nn.Module) -> None:
        self._all = [
            _Buffer(owner, name, tensor, None if tensor is None else tensor.detach().clone())
            for owner in module.modules()
            for name, tensor in owner._buffers.items()
        ]
        self._versions = [0 if b.tensor is None else b.tensor._version for b in self._all]

    @torch.no_grad()
    def restore(self) -> None:
        """Skips a buffer whose version counter shows that nobody has written to it.

        A vector is always copied: batch norm changes its running statistics without counting.
        """
        for i, (owner, name, tensor, initial) in enumerate(self._all):
            if owner._buffers.get(name) is not tensor:  # the forward pass assigned a new tensor
                owner._buffers[name] = tensor
            if tensor is None or initial is None:
                continue
            if tensor.ndim < 2 or tensor._version != self._versions[i]:
                tensor.copy_(initial)
                self._versions[i] = tensor._version
