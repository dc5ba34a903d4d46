"""Why a replay may find other bits: the user's gradient, or the user's factory, does not repeat."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ringmaster_dist.config.build import build_layout, build_problem
from ringmaster_dist.config.schema import Config
from ringmaster_dist.problems import Problem
from ringmaster_dist.wire import Codec


class Computed(NamedTuple):
    """A gradient that the replay has computed, so that it can be computed again."""

    problem: Problem
    iterate: torch.Tensor
    version: int
    worker: int
    sequence: int


def why_different(config: Config, wire: Codec, computed: Computed) -> str:
    """For the end of a sentence; empty if both repeat."""
    torch.set_num_threads(config.cluster.threads)  # as the workers
    return _gradient_twice(config, wire, computed) + _factory_twice(config, computed.problem)


def _gradient_twice(config: Config, wire: Codec, computed: Computed) -> str:
    problem, _, version, worker, sequence = computed
    iterate = wire.decode_iterate(wire.encode_iterate(computed.iterate))
    first, first_loss = problem.gradient(iterate, config.run.seed, worker, sequence)
    first = first.detach().clone()
    second, second_loss = problem.gradient(iterate, config.run.seed, worker, sequence)
    if first_loss == second_loss and torch.equal(first, second):
        return ""
    gave = f"{float(first_loss)!r} and {float(second_loss)!r}"
    if first_loss == second_loss:
        gave = f"the same loss {float(first_loss)!r} and two different gradients"
    return (
        f"; the gradient is not a function of its arguments: computed twice at version {version} for worker {worker}, "
        f"sequence {sequence}, it gave {gave}"
    )


def _factory_twice(config: Config, problem: Problem) -> str:
    if config.problem.name != "python":
        return ""
    other = build_problem(config)
    build_layout(config, other)
    same_start = torch.equal(problem.initial(config.run.seed), other.initial(config.run.seed))
    if same_start and getattr(problem, "data_fingerprint", "") == getattr(other, "data_fingerprint", ""):
        return ""
    return f"; the factory {config.problem.target} gives other weights each time it is called"
