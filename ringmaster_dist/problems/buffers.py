"""The buffers of a module as they were when it was made.

A forward pass in training mode changes some: running statistics, the vectors of spectral norm. A gradient must not
depend on the gradients before it, so they are put back.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

_SMALL = 1 << 16  # elements; to copy so few costs less than to ask whether they have changed


class _Buffer(NamedTuple):
    owner: nn.Module
    name: str
    tensor: torch.Tensor | None
    initial: torch.Tensor | None
    is_saved: bool  # with the state of the module


class Buffers:
    def __init__(self, module: nn.Module) -> None:
        self._all = [
            _Buffer(
                owner,
                name,
                tensor,
                None if tensor is None else tensor.detach().clone(),
                name not in owner._non_persistent_buffers_set,
            )
            for owner in module.modules()
            for name, tensor in owner._buffers.items()
        ]
        self._versions = [0 if b.tensor is None else b.tensor._version for b in self._all]
        self._changing: list[nn.Module] = []

    @property
    def has_saved(self) -> bool:
        """Whether the module's state has buffers at all."""
        return any(buffer.is_saved for buffer in self._all)

    @torch.no_grad()
    def restore(self) -> None:
        """Puts the initial values back.

        Of a large buffer the version counter says whether it was written to. Batch norm does not count its writes, and
        neither does who writes to ``buffer.data``: a module that was seen to do so is always restored.
        """
        for i, (owner, name, tensor, initial, _) in enumerate(self._all):
            if owner._buffers.get(name) is not tensor:  # the forward pass assigned a new tensor
                owner._buffers[name] = tensor
            if tensor is None or initial is None:
                continue
            if tensor.numel() <= _SMALL or tensor._version != self._versions[i] or owner in self._changing:
                tensor.copy_(initial)
                self._versions[i] = tensor._version

    def changing(self) -> list[nn.Module]:
        """The modules whose buffers differ from their initial values now, after a forward pass in training mode."""
        self._changing = [
            owner
            for owner, name, _, initial, _ in self._all
            if initial is not None
            and not ((now := owner._buffers.get(name)) is not None and torch.equal(now.detach(), initial))
        ]
        return self._changing
