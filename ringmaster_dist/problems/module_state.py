"""The state of a module that is not trained: its buffers, and among them the running statistics of batch norm.

A gradient is a function of the iterate and of its draw alone. But a forward pass in training mode changes some buffers,
such as running statistics or the vectors of spectral norm. So `Buffers` restores them before each gradient, and no
worker keeps running statistics. Where statistics are needed, they are computed for the given weights as the average
over some training batches ("precise batch norm").
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm

_SMALL = 1 << 16  # elements; a copy of so few costs less than to find out whether they have changed


class _Buffer(NamedTuple):
    owner: nn.Module
    name: str
    tensor: torch.Tensor | None
    initial: torch.Tensor | None
    is_saved: bool  # whether the module's state_dict has it


class Buffers:
    """The buffers of a module, with the values that they had when the module was made."""

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
        """Whether the module's state_dict has buffers at all."""
        return any(buffer.is_saved for buffer in self._all)

    @torch.no_grad()
    def restore(self) -> None:
        """Puts the initial values back.

        The version counter of a large buffer says whether it was written to. Batch norm does not count its writes, and
        neither do writes to ``buffer.data``. So the modules that `changing` has found are always restored.
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
        """The modules whose buffers differ from their initial values. Call it after a forward pass in training mode."""
        self._changing = [
            owner
            for owner, name, _, initial, _ in self._all
            if initial is not None
            and not ((now := owner._buffers.get(name)) is not None and torch.equal(now.detach(), initial))
        ]
        return self._changing


def fingerprint_of(module: nn.Module) -> str:
    """A hash of frozen parameters and buffers. They are not sent, so every machine has to make the same ones."""
    digest = hashlib.sha256()
    state = module.state_dict(keep_vars=True)
    fixed = {n: t for n, t in state.items() if isinstance(t, torch.Tensor) and not t.requires_grad}
    for name, tensor in fixed.items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16] if fixed else ""


def norms_of(module: nn.Module) -> list[_NormBase]:
    """The modules whose running statistics follow from the training batches. Leaves the module in training mode.

    A norm that stays in evaluation mode after ``module.train()`` is frozen and keeps its statistics.
    """
    module.train()
    return [
        m
        for m in module.modules()
        if isinstance(m, _NormBase) and m.training and m.track_running_stats and m.running_mean is not None
    ]


def estimate(module: nn.Module, forward: Callable[[int], None], num_draws: int) -> None:
    """Computes running statistics from ``forward(0)``, ``forward(1)``, ... with only the norms in training mode.

    A norm that no call reaches keeps its statistics, and so does every norm if there are no draws.
    """
    norms = norms_of(module)
    module.eval()
    if not norms or not num_draws:
        return
    before = [{name: b.clone() for name, b in norm.named_buffers()} for norm in norms]
    with _averaging(norms):
        for draw in range(num_draws):
            forward(draw)
    for norm, kept in zip(norms, before, strict=True):
        if not norm.num_batches_tracked:
            for name, buffer in norm.named_buffers():
                buffer.copy_(kept[name])
    module.eval()


def settle(module: nn.Module, changing: Sequence[nn.Module], forward: Callable[[int], None]) -> None:
    """One forward pass with these modules, but no norms, in training mode.

    After it an evaluation uses the same buffers as a gradient, for example those of spectral norm.
    """
    norms = norms_of(module)
    module.eval()
    others = [owner for owner in changing if owner not in norms]
    for owner in others:
        owner.training = True  # not its children
    if others:
        forward(0)
    module.eval()


@contextmanager
def _averaging(norms: list[_NormBase]) -> Iterator[None]:
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # a cumulative average
        norm.train()
    hooks = [norm.register_forward_pre_hook(_count) for norm in norms if isinstance(norm, _InstanceNorm)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum


def _count(norm: nn.Module, arguments: Any) -> None:
    """Instance norm has no cumulative average, so its momentum is set before each forward pass."""
    assert isinstance(norm, _NormBase)
    assert norm.num_batches_tracked is not None
    norm.num_batches_tracked.add_(1)
    norm.momentum = 1.0 / int(norm.num_batches_tracked)
