"""Ray actors as a synchronous parameter server: each actor computes a paced gradient, and the driver makes the step.

The weights go to the actors through Ray's object store, which maps the same pages into every process of one machine.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from ringmaster_dist.bench.contest import Trial
from ringmaster_dist.bench.rivals import Member, optimizers_of, size_of


class Gradients:
    """The body of an actor."""

    def __init__(self, trial: Trial, index: int, folder: Path) -> None:
        self._member = Member(trial, index, folder)

    def is_ready(self) -> bool:
        return True

    def gradient(self, weights: Any, sequence: int, at_seconds: float) -> Any:
        """The gradient at the weights, (size,) each, after the seconds that it is assigned."""
        began, model = time.monotonic(), self._member.model
        torch.nn.utils.vector_to_parameters(torch.from_numpy(weights.copy()), model.parameters())
        model.zero_grad()
        rows = self._member.rows(sequence)  # (batch, context + 1)
        torch.autograd.backward(model(rows[:, :-1], rows[:, 1:]))
        assigned = self._member.assigned(self._member.index, sequence, at_seconds)
        time.sleep(max(0.0, began + assigned - time.monotonic()))
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).numpy()


def driver(trial: Trial, index: int, folder: Path) -> None:
    """The process that starts the actors and makes the steps. It runs until the bench ends it."""
    import ray

    workers = trial.cluster.workers
    ray.init(num_cpus=workers, include_dashboard=False, log_to_driver=False, configure_logging=False,
             object_store_memory=200_000_000)  # fmt: skip
    actors = [ray.remote(Gradients).remote(trial, worker, folder) for worker in range(workers)]
    ray.get([actor.is_ready.remote() for actor in actors])
    member = Member(trial, index, folder)
    optimizers = optimizers_of(member.model, trial.contender.optimizer, trial.chosen["factor"])
    parameters, size, batch = list(member.model.parameters()), size_of(member.model), member.config.problem.batch
    used, step = 0.0, 0
    member.start_together()
    while True:
        at_seconds = member.seconds
        weights = ray.put(torch.nn.utils.parameters_to_vector(parameters).detach().numpy())
        gradients = ray.get([actor.gradient.remote(weights, step, at_seconds) for actor in actors])
        mean = torch.stack([torch.from_numpy(gradient) for gradient in gradients]).mean(0)  # (size,)
        for parameter, part in zip(parameters, torch.split(mean, [p.numel() for p in parameters]), strict=True):
            parameter.grad = part.view_as(parameter)
        for optimizer in optimizers:
            optimizer.step()
        used += sum(member.mean_seconds(worker, at_seconds) for worker in range(workers))
        step += 1
        member.publish(step, step * workers * batch, used, step * workers * 2.0 * 4 * size)
