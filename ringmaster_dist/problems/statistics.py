"""The running statistics of batch norm, computed for given weights.

No worker keeps them while it trains, because a gradient is a function of the iterate and of its draw alone. So they are
computed where they are needed, as the average over some training batches ("precise batch norm").
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm


def norms_of(module: nn.Module) -> list[_NormBase]:
    """The modules whose running statistics follow from the training batches.

    A norm that stays in evaluation mode after ``module.train()`` is frozen: it keeps the statistics it has.
    """
    module.train()
    return [
        m
        for m in module.modules()
        if isinstance(m, _NormBase) and m.training and m.track_running_stats and m.running_mean is not None
    ]


def estimate(module: nn.Module, forward: Callable[[int], None], num_draws: int) -> None:
    """Calls ``forward(0)``, ``forward(1)``, ... with nothing but the norms in training mode.

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
    """One forward pass with these modules in training mode, so that an evaluation computes with the buffers that a
    gradient computes with: those of spectral norm, for example."""
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
    """Instance norm does not know the cumulative average, so its momentum is set before each forward pass."""
    assert isinstance(norm, _NormBase)
    assert norm.num_batches_tracked is not None
    norm.num_batches_tracked.add_(1)
    norm.momentum = 1.0 / int(norm.num_batches_tracked)
