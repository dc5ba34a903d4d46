"""What is being minimised. A problem is anything with the shape of `Problem`; nobody else knows which it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from ringmaster_dist.algorithm.layout import Layout, Parameter

# Asked now and then while a gradient is computed: whether it is still wanted.
Stop = Callable[[], bool]


def never() -> bool:
    return False


def clip_factor(length: float, longest: float) -> float:
    """What a gradient of this length is multiplied by, so that it is no longer than ``longest``."""
    return min(1.0, longest / (length + 1e-6))


class Interrupted(Exception):
    """The gradient was not wanted any more; what was done for it is thrown away."""


class Problem(Protocol):
    """Named parameters, a stochastic gradient for ``(seed, worker, sequence)``, and an evaluation."""

    parameters: Sequence[Parameter]
    dtype: torch.dtype
    objective: str  # the key of `evaluate` that says how well the run goes
    quick_to_evaluate: bool  # whether `evaluate` costs next to nothing

    def bind(self, layout: Layout) -> None:
        """Told once, before anything below: where the parameters lie in the flat tensors."""
        ...

    def initial(self, seed: int) -> torch.Tensor:
        """The first iterate, flat."""
        ...

    def gradient(
        self, iterate: torch.Tensor, seed: int, worker_id: int, sequence: int, stop: Stop = never
    ) -> tuple[torch.Tensor, float]:
        """The gradient at the iterate for this draw, and the loss there.

        The tensor may be written again by the next call. Raises `Interrupted` if it noticed that ``stop()`` is true.
        """
        ...

    def evaluate(self, iterate: torch.Tensor) -> dict[str, float]:
        """Figures of merit of an iterate."""
        ...


def evaluate_at_the_end(problem: Problem, iterate: torch.Tensor) -> dict[str, float]:
    """The closing evaluation: a problem may look at more data for it than while it trains."""
    thorough: Callable[[torch.Tensor], dict[str, float]] = getattr(problem, "evaluate_at_the_end", problem.evaluate)
    return thorough(iterate)


def evaluated_on(problem: Problem, *, at_the_end: bool) -> str:
    """What an evaluation looks at, in words; empty where the problem does not say."""
    say: Callable[..., str] = getattr(problem, "evaluated_on", lambda at_the_end: "")
    return say(at_the_end=at_the_end)
