"""What is being minimised. A problem is anything with the shape of `Problem`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from ringmaster_dist.algorithm.layout import Layout, Parameter


class Problem(Protocol):
    """Named parameters, a stochastic gradient for ``(seed, worker, sequence)``, and an evaluation."""

    parameters: Sequence[Parameter]
    dtype: torch.dtype
    objective: str  # the key of `evaluate` that says how well the run goes

    def initial(self, layout: Layout, seed: int) -> torch.Tensor:
        """The first iterate, flat."""
        ...

    def gradient(self, iterate: torch.Tensor, seed: int, worker_id: int, sequence: int) -> tuple[torch.Tensor, float]:
        """The gradient at the iterate for this draw, in fresh memory, and the loss there."""
        ...

    def evaluate(self, iterate: torch.Tensor) -> dict[str, float]:
        """Figures of merit of an iterate."""
        ...
