"""The contenders of a race in virtual time, which chooses their settings. It is the same for all and needs no pace.

Ours is `simulate`. DDP is a step with the rows of all workers that takes as long as its slowest worker. DiLoCo is a sum
of inner runs from the same weights, and a round takes as long as its slowest replica. Communication takes no time, and
nobody is killed.
"""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Iterator

import torch

from ringmaster_dist.bench.contest import DILOCO, OURS, Point, Trial
from ringmaster_dist.bench.rivals import (
    batch_of,
    bytes_of_all_reduce,
    config_of,
    local_steps,
    optimizers_of,
    outer_optimizer,
    problem_of,
)
from ringmaster_dist.config.compose import load
from ringmaster_dist.observe.loggers import Logger
from ringmaster_dist.observe.records import MetricsRow
from ringmaster_dist.observe.run_directory import RunDirectory
from ringmaster_dist.simulation.session import build_speeds, simulate

_SAMPLE_SECONDS = 0.5  # between two evaluations of ours


def play(trial: Trial, limit_seconds: float) -> list[Point]:
    """Plays a trial until its target or a limit. Returns its curve."""
    torch.set_num_threads(1)
    if trial.contender.kind == OURS:
        return _simulated(trial, limit_seconds)
    points = _diloco(trial) if trial.contender.kind == DILOCO else _synchronous(trial)
    curve = []
    for point in points:
        curve.append(point)
        if point.loss <= trial.cluster.target or point.seconds > limit_seconds:
            break
        if not math.isfinite(point.loss):
            break
    return curve


class _Watch(Logger):
    """Collects the evaluations of a simulation, and says when it may stop."""

    def __init__(self, target: float) -> None:
        self.curve: list[Point] = []
        self._target = target

    def row(self, row: MetricsRow) -> None:
        if "loss" in row.evaluation:  # a row without an update since the last one has no evaluation
            loss = row.evaluation["loss"]
            self.curve.append(Point(row.time, math.inf if loss is None else loss, row.version))

    def is_over(self) -> bool:
        return bool(self.curve) and (self.curve[-1].loss <= self._target or not math.isfinite(self.curve[-1].loss))


def _simulated(trial: Trial, limit: float) -> list[Point]:
    watch = _Watch(trial.cluster.target)
    samples = max(1, round(limit / _SAMPLE_SECONDS))
    overrides = [*trial.our_overrides, f"budget.seconds={limit:g}", f"run.samples={samples}",
                 "run.trace=false", "problem.final_tokens=128"]  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        directory = RunDirectory(scratch, name="twin")
        simulate(load(overrides), directory, should_stop=watch.is_over, logger=watch)
    return watch.curve


def _synchronous(trial: Trial) -> Iterator[Point]:
    """A point after every step."""
    config = config_of(trial)
    problem, speeds, batch = problem_of(config), build_speeds(config), config.problem.batch
    model, workers = problem.model, range(trial.cluster.workers)
    optimizers = optimizers_of(model, trial.contender.optimizer, trial.chosen["factor"])
    now, used, step = 0.0, 0.0, 0
    while True:
        # (workers * batch, context + 1); every worker has equally many rows, so this is the mean of their gradients
        rows = torch.cat([batch_of(problem, trial.seed, worker, step, batch) for worker in workers])
        _step(model, rows, optimizers)
        finished = [speeds.finish(worker, step, now) for worker in workers]
        used += sum(finished) - len(finished) * now
        now, step = max(finished), step + 1
        num_rows, num_bytes = step * len(workers) * batch, step * bytes_of_all_reduce(model, len(workers))
        yield Point(now, _loss(problem), step, num_rows, used, num_bytes)


def _diloco(trial: Trial) -> Iterator[Point]:
    """A point after every round."""
    config = config_of(trial)
    problem, speeds, batch = problem_of(config), build_speeds(config), config.problem.batch
    shared, steps = problem.model, local_steps(trial, config)
    replicas = [copy.deepcopy(shared) for _ in steps]
    inner = [optimizers_of(model, trial.contender.optimizer, trial.chosen["factor"]) for model in replicas]
    outer = outer_optimizer(shared)
    now, used, rounds = 0.0, 0.0, 0
    while True:
        ends = []
        for worker, (model, optimizers) in enumerate(zip(replicas, inner, strict=True)):
            model.load_state_dict(shared.state_dict())
            time = now
            for number in range(steps[worker]):
                sequence = rounds * steps[worker] + number
                _step(model, batch_of(problem, trial.seed, worker, sequence, batch), optimizers)
                time = speeds.finish(worker, sequence, time)
            ends.append(time)
        for parameters in zip(shared.parameters(), *(model.parameters() for model in replicas), strict=True):
            first, own = parameters[0], torch.stack([parameter.detach() for parameter in parameters[1:]])
            first.grad = first.detach() - own.mean(0)  # of the parameter's shape
        outer.step()
        used += sum(ends) - len(ends) * now
        now, rounds = max(ends), rounds + 1
        num_bytes = rounds * bytes_of_all_reduce(shared, len(steps))
        yield Point(now, _loss(problem), rounds, rounds * sum(steps) * batch, used, num_bytes)


def _step(model: torch.nn.Module, rows: torch.Tensor, optimizers: list[torch.optim.Optimizer]) -> None:
    torch.autograd.backward(model(rows[:, :-1], rows[:, 1:]))
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def _loss(problem: object) -> float:
    from ringmaster_dist.problems.nanochat.problem import NanoChatProblem

    assert isinstance(problem, NanoChatProblem)
    with torch.no_grad():
        loss = problem.score(problem.model, problem.validation_rows)["loss"]
    return loss if math.isfinite(loss) else math.inf
