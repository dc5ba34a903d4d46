"""One update of Algorithm 1: momentum, oracle, step, on flat buffers.

    m <- (1 - alpha) m + alpha g
    u  = (1 - alpha) m + alpha g        with Nesterov, else u = m
    x' = (1 - eta * weight_decay) x + eta * radius * lmo(u)        with the block's own weight decay and radius

The momentum starts at zero, which makes the first line serve for ``k = 0`` too. Work goes block by block
through one scratch buffer of the largest block's size; the part without an oracle goes in cache-sized pieces.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ringmaster_dist.algorithm import geometry as oracles
from ringmaster_dist.algorithm.layout import Block, Layout

_PIECE = 1 << 16  # elements; three such fp32 pieces fit a core's second-level cache


class _Planned(NamedTuple):
    """A block with the memory its updates use."""

    block: Block
    scratch: torch.Tensor
    matrices: torch.Tensor | None  # the scratch as a batch of matrices; None where no oracle is asked
    workspace: oracles.Workspace | None


class Update:
    """Applies updates to buffers of one layout. Owns scratch memory, no state: not for two threads at once."""

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
        """``precision`` is what orthogonalisation by iteration computes in; None: ``dtype``, as everything else."""
        if orthogonalization not in oracles.ORTHOGONALIZATIONS:
            known = ", ".join(oracles.ORTHOGONALIZATIONS)
            raise ValueError(f"orthogonalization is {orthogonalization!r}; known: {known}")
        self.layout = layout
        self.dtype = dtype
        self.nesterov = nesterov
        self.orthogonalization = orthogonalization
        self._coefficients = oracles.COEFFICIENTS.get(orthogonalization)
        device = torch.device(device)
        largest = max(min(b.size, _PIECE) if b.geometry == "none" else b.size for b in layout.blocks)
        self._scratch = torch.empty(largest, dtype=dtype, device=device)
        self._wide: torch.Tensor | None = None  # for gradients of a shorter type
        # Blocks of one shape (a stack of c_fc and the transposes of c_proj) share their workspace.
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

        The gradient may be of a shorter type: it is widened piece by piece. ``rounded`` gets the next iterate too, in
        its own type, while the pieces are at hand.
        """
        for block, scratch, matrices, workspace in self._plan:
            start, stop = block.start, block.stop
            keep, step = 1.0 - eta * block.weight_decay, eta * block.radius
            if matrices is None:
                for low in range(start, stop, _PIECE):
                    high = min(low + _PIECE, stop)
                    x, m, g, x_next = (t[low:high] for t in (iterate, momentum, gradient, out))
                    self._direction(m, self._widened(g), alpha, piece := scratch[: high - low])
                    _step(x, piece, step, keep, x_next)
                    if rounded is not None:
                        rounded[low:high].copy_(x_next)
                continue
            if len(self._plan) == 1:  # spare the slicing, it costs a small vector as much as the arithmetic
                x, m, g, x_next = iterate, momentum, gradient, out
            else:
                x, m, g, x_next = (t[start:stop] for t in (iterate, momentum, gradient, out))
            self._direction(m, self._widened(g), alpha, scratch)
            scale = self._oracle(matrices, block, workspace)
            _step(x, scratch, step * scale, keep, x_next)
            if rounded is not None:
                rounded[start:stop].copy_(x_next)

    def _widened(self, gradient: torch.Tensor) -> torch.Tensor:
        if gradient.dtype == self.dtype:
            return gradient
        if self._wide is None:
            self._wide = torch.empty_like(self._scratch)
        return self._wide[: gradient.numel()].copy_(gradient)

    def _direction(self, momentum: torch.Tensor, gradient: torch.Tensor, alpha: float, out: torch.Tensor) -> None:
        """Moves the momentum and writes to ``out`` what the oracle is asked about."""
        momentum.lerp_(gradient, alpha)
        if self.nesterov:
            torch.lerp(momentum, gradient, alpha, out=out)
        else:
            out.copy_(momentum)

    def _oracle(self, matrices: torch.Tensor, block: Block, workspace: oracles.Workspace | None) -> float:
        """Overwrites the matrices by D and returns s, with ``lmo = -s D``."""
        if block.geometry != "spectral":
            return oracles.normalize_(matrices, block.geometry)
        scale = oracles.spectral_scale(block.rows, block.cols)
        if workspace is None:
            return scale * oracles.orthogonalize_exactly_(matrices)
        assert self._coefficients is not None
        return scale * oracles.orthogonalize_(matrices, self._coefficients, workspace)


def _step(x: torch.Tensor, direction: torch.Tensor, eta: float, keep: float, out: torch.Tensor) -> None:
    """``out = keep * x - eta * direction``."""
    if keep == 1.0:
        torch.add(x, direction, alpha=-eta, out=out)
    else:
        torch.add(torch.mul(x, keep, out=out), direction, alpha=-eta, out=out)
