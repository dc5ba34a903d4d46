"""Several steps per push, for slow links. A worker takes H steps of its own and hands in the distance travelled.

    x_0 = the snapshot's iterate,  m = 0
    x_{j+1} = the update of `algorithm.update` at x_j, with the gradient of draw ``sequence * H + j``,  for j < H
    "gradient" = x_0 - x_H

The steps have a step size and a momentum of their own. The momentum begins at zero with every push, so the result is
still a function of (iterate, seed, worker, sequence). Therefore verdicts, interruption, replay and simulation are those
of any other problem. The server adds plain momentum: its layout has no oracle.

The steps are computed in host memory, also if the gradients come from an accelerator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch

from ringmaster_dist.algorithm.layout import Layout, Parameter
from ringmaster_dist.algorithm.update import Update
from ringmaster_dist.problems import Interrupted, Problem, Stop, never
from ringmaster_dist.problems.ranks import mean_loss


class LocalSteps:
    """The problem ``unwrapped``, except that its gradient is the distance of several steps.

    The loss of a push is the mean over its steps. One thread uses it at a time.
    """

    def __init__(
        self, unwrapped: Problem, layout: Layout, make_update: Callable[[Layout], Update], steps: int, *, eta: float,
        beta: float,
    ) -> None:  # fmt: skip
        """``layout`` has the oracles of the steps. ``make_update`` is called with the first gradient."""
        self.unwrapped = unwrapped
        # In this order, so that a layout without oracles has the same offsets.
        self.parameters: Sequence[Parameter] = layout.parameters
        self.dtype, self.objective = unwrapped.dtype, unwrapped.objective
        self.quick_to_evaluate = unwrapped.quick_to_evaluate
        self._layout, self._make_update = layout, make_update
        self._steps, self._eta, self._alpha = steps, eta, 1.0 - beta

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unwrapped, name)

    def bind(self, layout: Layout) -> None:
        assert layout.offsets == self._layout.offsets, "the server and the steps read a flat tensor alike"
        self.unwrapped.bind(self._layout)

    @cached_property
    def _update(self) -> Update:
        return self._make_update(self._layout)

    @cached_property
    def _buffers(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Iterate, momentum and distance, (size,) each. They are made with the first gradient."""
        iterate, momentum, distance = (torch.empty(self._layout.size, dtype=self.dtype) for _ in range(3))
        return iterate, momentum, distance

    def initial(self, seed: int) -> torch.Tensor:
        return self.unwrapped.initial(seed)

    def gradient(
        self, iterate: torch.Tensor, seed: int, worker_id: int, sequence: int, stop: Stop = never
    ) -> tuple[torch.Tensor, float]:
        """The distance, (size,). A gradient that is not finite is handed in instead, so that the server refuses it."""
        x, momentum, distance = self._buffers
        x.copy_(iterate)
        momentum.zero_()
        losses: list[float] = []
        for step in range(self._steps):
            if stop():  # not every problem looks
                raise Interrupted
            gradient, loss = self.unwrapped.gradient(
                x, seed, worker_id, sequence_of_step(step, self._steps, sequence), stop
            )
            gradient = gradient.detach()  # (size,)
            losses.append(float(loss))
            if not math.isfinite(float(gradient.sum())):
                return gradient, mean_loss(losses)
            self._update.apply(x, momentum, gradient, eta=self._eta, alpha=self._alpha, out=x)
        return torch.sub(iterate, x, out=distance), mean_loss(losses)

    def evaluate(self, iterate: torch.Tensor) -> dict[str, float]:
        return self.unwrapped.evaluate(iterate)


def sequence_of_step(step: int, num_steps: int, sequence: int) -> int:
    """The sequence of a step's draw. No two steps of a worker have the same.

    A rank of a group has a sequence of its own (`ranks.sequence_of`), so no two steps of a group have the same either.
    """
    return sequence * num_steps + step
