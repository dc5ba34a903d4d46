"""How the ranks of a group share one gradient. A group of processes and a replay in one process use this arithmetic.

A group is one worker. Each of its ranks computes the gradient of a draw of its own, and the group's gradient is the
mean of these. The sum has the order of the ranks, element by element, so its bits do not depend on how the numbers
travel.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ringmaster_dist.problems import Problem, gradient_of, never


def sequence_of(rank: int, num_ranks: int, sequence: int) -> int:
    """The sequence of a rank's draw for the group's ``sequence``-th gradient.

    No two ranks have the same draw, and no other worker has one of them, because the worker is part of a draw. The
    ranks together draw what one worker with ``num_ranks`` times the rows would draw.
    """
    return sequence * num_ranks + rank


def mean_in_order(parts: Iterable[torch.Tensor]) -> torch.Tensor:
    """The mean of tensors of one shape and dtype. Each part is read before the next one is asked for."""
    total, num = None, 0
    for part in parts:
        total = part.clone() if total is None else total.add_(part)
        num += 1
    assert total is not None, "a mean needs a part"
    return total.div_(num)


def mean_loss(losses: Iterable[float]) -> float:
    return float(mean_in_order(torch.tensor(loss, dtype=torch.float64) for loss in losses))


def gradient_in_turn(
    problem: Problem, num_ranks: int, iterate: torch.Tensor, seed: int, worker_id: int, sequence: int, rows: int = 0
) -> tuple[torch.Tensor, float]:
    """The gradient of a group, (layout.size,), and its loss, computed rank after rank in this process.

    Each rank computes this many rows, or as many as the problem was made with if it is 0.
    """
    if num_ranks == 1:
        return gradient_of(problem, iterate, seed, worker_id, sequence, never, rows)
    losses: list[float] = []

    def gradients() -> Iterable[torch.Tensor]:
        for rank in range(num_ranks):
            drawn = sequence_of(rank, num_ranks, sequence)
            gradient, loss = gradient_of(problem, iterate, seed, worker_id, drawn, never, rows)
            losses.append(float(loss))
            yield gradient.detach().to(problem.dtype)

    return mean_in_order(gradients()), mean_loss(losses)
