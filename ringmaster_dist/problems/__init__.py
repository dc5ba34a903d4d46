"""What is minimised. The server core and the worker's loop know a problem only by the protocol `Problem`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, cast

import torch

from ringmaster_dist.algorithm.layout import Layout, Parameter

# Returns True when the gradient that is being computed is not wanted any more.
Stop = Callable[[], bool]


def never() -> bool:
    return False


def clip_factor(length: float, longest: float) -> float:
    """The factor that makes a gradient of this norm no longer than ``longest``."""
    return min(1.0, longest / (length + 1e-6))


class Interrupted(Exception):
    """The gradient was not wanted any more, so its computation was stopped."""


class Problem(Protocol):
    """Named parameters, a stochastic gradient for ``(seed, worker, sequence)``, and an evaluation."""

    parameters: Sequence[Parameter]
    dtype: torch.dtype
    objective: str  # the key of `evaluate` that the run minimises
    quick_to_evaluate: bool  # whether `evaluate` is so cheap that it is called for every row of metrics

    def bind(self, layout: Layout) -> None:
        """Says where the parameters lie in the flat tensors. It is called once, before the methods below."""
        ...

    def initial(self, seed: int) -> torch.Tensor:
        """The first iterate, (layout.size,), in host memory."""
        ...

    def gradient(
        self, iterate: torch.Tensor, seed: int, worker_id: int, sequence: int, stop: Stop = never
    ) -> tuple[torch.Tensor, float]:
        """The gradient at the iterate for this draw, (layout.size,), in host memory, and the loss there.

        The next call may overwrite the tensor. Raises `Interrupted` if ``stop()`` became true on the way.
        """
        ...

    def evaluate(self, iterate: torch.Tensor) -> dict[str, float]:
        """Figures of merit of an iterate."""
        ...


class RowsProblem(Problem, Protocol):
    """A problem whose gradients can take any number of rows."""

    batch: int | None  # the usual number of rows, or None if gradients cannot take another number

    def gradient(
        self, iterate: torch.Tensor, seed: int, worker_id: int, sequence: int, stop: Stop = never,
        rows: int | None = None,
    ) -> tuple[torch.Tensor, float]:  # fmt: skip
        """The mean gradient of this many rows. None means the usual number."""
        ...


def gradient_of(
    problem: Problem, iterate: torch.Tensor, seed: int, worker_id: int, sequence: int, stop: Stop, rows: int
) -> tuple[torch.Tensor, float]:
    """The gradient, (layout.size,), of this many rows, and the loss. 0 rows stand for what the problem was made with.

    Only a `RowsProblem` is asked for a number of rows.
    """
    if not rows:
        return problem.gradient(iterate, seed, worker_id, sequence, stop)
    return cast(RowsProblem, problem).gradient(iterate, seed, worker_id, sequence, stop, rows)


def unwrapped(problem: Problem) -> Problem:
    """The problem itself, without the local steps around it."""
    inner: Problem = getattr(problem, "unwrapped", problem)
    return inner


def evaluate_at_the_end(problem: Problem, iterate: torch.Tensor) -> dict[str, float]:
    """The closing evaluation. A problem may use more data for it than for the evaluations during training."""
    thorough: Callable[[torch.Tensor], dict[str, float]] = getattr(problem, "evaluate_at_the_end", problem.evaluate)
    return thorough(iterate)


def evaluated_on(
    problem: Problem, *, at_the_end: bool, version: int | None = None, final_version: int | None = None
) -> str:
    """The data of an evaluation in words, or an empty string if the problem does not say.

    An evaluation of another version than the final one is named as such.
    """
    say: Callable[..., str] = getattr(problem, "evaluated_on", lambda at_the_end: "")
    data = say(at_the_end=at_the_end)
    return data if version == final_version else f"{data or 'the iterate'} after {version:,} updates"
