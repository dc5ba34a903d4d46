"""One update of Algorithm 1: momentum, oracle, step, on flat buffers.

    m <- (1 - alpha) m + alpha g
    u  = (1 - alpha) m + alpha g        with Nesterov, else u = m
    x' = (1 - eta * weight_decay) x + eta * radius * lmo(u)        with the block's own weight decay and radius

The momentum starts at zero, so the first line holds for ``k = 0`` too. All blocks use one scratch buffer of the largest
block's size. The part without an oracle is computed in pieces that fit the cache.

Iterate, momentum and gradient are flat tensors ``(layout.size,)``. A gradient may also be packed (`quantized`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from ringmaster_dist import quantized
from ringmaster_dist.algorithm import geometry as oracles
from ringmaster_dist.algorithm.layout import Block, Layout

_PIECE = 1 << 16  # elements; three fp32 pieces fit the second-level cache of a core


class _Planned(NamedTuple):
    """A block with the memory that its updates use."""

    block: Block
    scratch: torch.Tensor  # (block.size,), or (_PIECE,) if the block has no oracle
    matrices: torch.Tensor | None  # the scratch as (num_matrices, rows, cols); None without an oracle
    workspace: oracles.Workspace | None  # only for orthogonalisation by iteration


class Update:
    """Applies updates to tensors of one layout. It owns scratch memory but no state. One thread uses it at a time."""

    def __init__(
        self,
        layout: Layout,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        nesterov: bool = True,
        orthogonalization: str = "polar_express",
        precision: torch.dtype | None = None,
    ) -> None:
        """``precision`` is the type of orthogonalisation by iteration. None is ``dtype``, as for everything else."""
        if orthogonalization not in oracles.ORTHOGONALIZATIONS:
            known = ", ".join(oracles.ORTHOGONALIZATIONS)
            raise ValueError(f"orthogonalization is {orthogonalization!r}; known: {known}")
        self.layout = layout
        self.dtype = dtype
        self.nesterov = nesterov
        self.orthogonalization = orthogonalization
        self._coefficients = oracles.COEFFICIENTS.get(orthogonalization)
        self.device = device = torch.device(device)
        largest = max(min(b.size, _PIECE) if b.geometry == "none" else b.size for b in layout.blocks)
        self._scratch = torch.empty(largest, dtype=dtype, device=device)
        self._wide: torch.Tensor | None = None  # for gradients of a shorter type, (largest,)
        # Blocks whose shapes are equal up to transposition, such as c_fc and c_proj, share a workspace.
        workspaces: dict[tuple[int, int, int], oracles.Workspace] = {}
        self._plan: list[_Planned] = []
        for block in layout.blocks:
            workspace = None
            if block.geometry == "spectral" and self._coefficients is not None:
                key = (block.num_matrices, min(block.rows, block.cols), max(block.rows, block.cols))
                workspace = workspaces.get(key) or oracles.Workspace(*key, dtype, device, precision)
                workspaces[key] = workspace
            scratch = self._scratch[: min(block.size, largest)]
            matrices = None if block.geometry == "none" else scratch.view(block.num_matrices, block.rows, block.cols)
            self._plan.append(_Planned(block, scratch, matrices, workspace))

    def apply(
        self,
        iterate: torch.Tensor,
        momentum: torch.Tensor,
        gradient: torch.Tensor,
        *,
        eta: float,
        alpha: float,
        out: torch.Tensor,
        rounded: torch.Tensor | None = None,
    ) -> None:
        """Writes the next iterate to ``out`` (which may be ``iterate``) and the next momentum over ``momentum``.

        The gradient may be of a shorter type, or packed, and is widened piece by piece. ``rounded`` receives the next
        iterate too, in its own type, while the pieces are in the cache. All other tensors are ``(layout.size,)``.
        """
        for block, scratch, matrices, workspace in self._plan:
            start, stop = block.start, block.stop
            keep, step = 1.0 - eta * block.weight_decay, eta * block.radius
            if matrices is None:
                for low in range(start, stop, _PIECE):
                    high = min(low + _PIECE, stop)
                    x, m, x_next = (t[low:high] for t in (iterate, momentum, out))
                    g = self._widened(gradient, low, high)
                    self._direction(m, g, alpha, piece := scratch[: high - low])
                    _step(x, piece, step, keep, x_next)
                    if rounded is not None:
                        rounded[low:high].copy_(x_next)
                continue
            if len(self._plan) == 1:  # for a small vector, slicing would cost as much as the arithmetic
                x, m, x_next = iterate, momentum, out
            else:
                x, m, x_next = (t[start:stop] for t in (iterate, momentum, out))
            self._direction(m, self._widened(gradient, start, stop), alpha, scratch)
            scale = self._oracle(matrices, block, workspace)
            _step(x, scratch, step * scale, keep, x_next)
            if rounded is not None:
                rounded[start:stop].copy_(x_next)

    def pieces(self, gradient: torch.Tensor) -> Iterator[tuple[int, int, torch.Tensor]]:
        """The numbers of a gradient, with the places at which each piece begins and ends. Only a packed one is cut.

        The next piece overwrites the memory of a piece.
        """
        size = self.layout.size
        if gradient.dtype != quantized.DTYPE:
            yield 0, size, gradient
            return
        length = min(_PIECE, len(self._scratch))
        for low in range(0, size, length):
            high = min(low + length, size)
            yield low, high, self._widened(gradient, low, high)

    def _widened(self, gradient: torch.Tensor, low: int, high: int) -> torch.Tensor:
        """The numbers ``low`` to ``high`` of a gradient, (high - low,), in the type of the update."""
        if gradient.dtype == self.dtype:
            return gradient if high - low == len(gradient) else gradient[low:high]
        if self._wide is None:
            self._wide = torch.empty_like(self._scratch)
        wide = self._wide[: high - low]
        if gradient.dtype == quantized.DTYPE:
            return quantized.unpack(gradient, self.layout.size, low, high, wide)
        return wide.copy_(gradient[low:high])

    def _direction(self, momentum: torch.Tensor, gradient: torch.Tensor, alpha: float, out: torch.Tensor) -> None:
        """Updates the momentum, and writes the input of the oracle to ``out``. All are (n,)."""
        momentum.lerp_(gradient, alpha)
        if self.nesterov:
            torch.lerp(momentum, gradient, alpha, out=out)
        else:
            out.copy_(momentum)

    def _oracle(self, matrices: torch.Tensor, block: Block, workspace: oracles.Workspace | None) -> float:
        """Overwrites the matrices, (num_matrices, rows, cols), by D and returns s, with ``lmo = -s D``."""
        if block.geometry != "spectral":
            return oracles.normalize_(matrices, block.geometry)
        scale = oracles.spectral_scale(block.rows, block.cols)
        if workspace is None:
            return scale * oracles.orthogonalize_exactly_(matrices)
        assert self._coefficients is not None
        return scale * oracles.orthogonalize_(matrices, self._coefficients, workspace)


def _step(x: torch.Tensor, direction: torch.Tensor, eta: float, keep: float, out: torch.Tensor) -> None:
    """``out = keep * x - eta * direction``, all of (n,)."""
    if keep == 1.0:
        torch.add(x, direction, alpha=-eta, out=out)
    else:
        torch.add(torch.mul(x, keep, out=out), direction, alpha=-eta, out=out)
