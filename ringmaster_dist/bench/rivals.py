"""What the rivals of a race have in common: rates, optimizers, and processes that compute at the assigned pace.

A rival runs in processes of its own, with the data, model, rows and seconds per gradient of our workers. They start
from a fork server that has imported torch, as ours do. All wait until every process is ready, and then the clock
starts. Now and then one of them publishes the weights, with what was done so far. The bench evaluates these files,
and ends the trial when the loss is low enough. So an evaluation costs a rival no time of its clock.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ringmaster_dist import randomness
from ringmaster_dist.bench.contest import Point, Trial
from ringmaster_dist.config.build import build_problem
from ringmaster_dist.config.compose import compose, to_typed
from ringmaster_dist.config.errors import UserError
from ringmaster_dist.config.profile_file import cluster_seconds
from ringmaster_dist.config.schema import Config
from ringmaster_dist.problems.module import role_by_shape
from ringmaster_dist.problems.nanochat.problem import NanoChatProblem
from ringmaster_dist.profiles import jittered_seconds, rate_at

# The rates at factor 1. Those with AdamW are the winners of ``ringmaster experiment radii``; SGD has one rate for all.
_RATES = {"matrix": 0.02, "embedding": 0.2, "output": 0.01, "scalar": 0.01}
_SGD_RATE = 2.5
_MOMENTUM = 0.95
_BETAS, _EPSILON = (0.8, 0.95), 1e-10  # of AdamW, as in nanochat
OUTER_RATE, OUTER_MOMENTUM = 0.7, 0.9  # of DiLoCo, as in its paper

_BUILT, _READY, _START, _SNAPSHOT, _OUTPUT, _FAILURE = "built", "ready", "start", "snapshot", "output", "failure"
_TICK_SECONDS = 0.02
_LAST_LINES = 5  # of a process that failed
_READY_SECONDS = 180.0  # within which all processes have to be ready


def config_of(trial: Trial) -> Config:
    return to_typed(compose(trial.rival_overrides, "train"), real_time=True)


def problem_of(config: Config) -> NanoChatProblem:
    problem = build_problem(config)
    assert isinstance(problem, NanoChatProblem)
    return problem


def optimizers_of(model: torch.nn.Module, kind: str, factor: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, which is the last one, and AdamW (``adamw``) or SGD (``sgd``) for the rest."""
    by_role: dict[str, list[torch.nn.Parameter]] = {role: [] for role in _RATES}
    for name, parameter in model.named_parameters():
        by_role[role_by_shape(name, parameter)].append(parameter)
    matrices = by_role.pop("matrix")
    if kind == "sgd":
        rest = [parameter for parameters in by_role.values() for parameter in parameters]
        eta = factor * _SGD_RATE
        other: torch.optim.Optimizer = torch.optim.SGD(
            rest, lr=eta * (1 - _MOMENTUM), momentum=_MOMENTUM, nesterov=True
        )
    else:
        eta = factor * _RATES["matrix"]
        groups = [{"params": each, "lr": factor * _RATES[role]} for role, each in by_role.items() if each]
        other = torch.optim.AdamW(groups, betas=_BETAS, eps=_EPSILON, weight_decay=0.0)
    return [other, torch.optim.Muon(matrices, lr=eta, momentum=_MOMENTUM, nesterov=True, weight_decay=0.0)]


def outer_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    """DiLoCo's step of the shared weights, along the mean distance that the replicas have moved."""
    return torch.optim.SGD(model.parameters(), lr=OUTER_RATE, momentum=OUTER_MOMENTUM, nesterov=True)


def local_steps(trial: Trial, config: Config) -> list[int]:
    """DiLoCo's local steps of each replica. Scaled ones take about the time that the slowest needs for its steps."""
    steps, times = int(trial.chosen["steps"]), cluster_seconds(config, trial.cluster.workers)
    if not trial.contender.scaled:
        return [steps] * len(times)
    return [max(1, round(steps * float(times.max()) / float(seconds))) for seconds in times]


def batch_of(problem: NanoChatProblem, seed: int, worker: int, sequence: int, count: int) -> torch.Tensor:
    """The rows of one gradient, (count, context + 1), the same that our worker would take."""
    return torch.from_numpy(problem.rows.sample(seed, worker, sequence, count).astype(np.int64))


def size_of(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def bytes_of_all_reduce(model: torch.nn.Module, members: int) -> float:
    """What all members together send in one all-reduce of float32 over a ring. It is computed and not measured."""
    return 2.0 * (members - 1) * 4 * size_of(model)


# --- in a process of the rival -----------------------------------------------------------------------------------


class Member:
    """One process of a rival: its model and data, its pace, and its part in the folder of the trial."""

    def __init__(self, trial: Trial, index: int, folder: Path) -> None:
        torch.set_num_threads(1)  # as our workers have by default
        self.trial, self.index, self.folder = trial, index, folder
        self.config = config_of(trial)
        self.problem = problem_of(self.config)
        self.model = self.problem.model
        self._base = cluster_seconds(self.config, trial.cluster.workers)
        self._keys = [
            randomness.worker_key(trial.seed, randomness.STREAM_JITTER, worker) for worker in range(len(self._base))
        ]
        self._started = 0.0

    def wait_until_all_are_built(self) -> None:
        """Blocks until every process has come this far."""
        (self.folder / f"{_BUILT}-{self.index}").touch()
        while len(list(self.folder.glob(f"{_BUILT}-*"))) < self.trial.cluster.workers:
            time.sleep(_TICK_SECONDS)

    def start_together(self) -> None:
        """Blocks until all processes are ready. A process that was restarted does not wait."""
        (self.folder / f"{_READY}-{self.index}").touch()
        while not (self.folder / _START).exists():
            time.sleep(_TICK_SECONDS)
        self._started = float((self.folder / _START).read_text())

    @property
    def is_late(self) -> bool:
        """Whether the trial has begun, so that this process replaces one that was killed."""
        return (self.folder / _START).exists()

    @property
    def seconds(self) -> float:
        """Since the start of the trial."""
        return time.monotonic() - self._started

    def assigned(self, worker: int, sequence: int, at_seconds: float) -> float:
        """The seconds that a gradient of a worker takes, if it begins at this time of the trial."""
        usual = float(self._base[worker]) / rate_at(self.config.cluster.phases, worker, at_seconds)
        return jittered_seconds(usual, self.config.cluster.jitter, self._keys[worker], sequence)

    def mean_seconds(self, worker: int, at_seconds: float) -> float:
        """The mean over the jitter, which is half-normal."""
        usual = float(self._base[worker]) / rate_at(self.config.cluster.phases, worker, at_seconds)
        return usual * (1.0 + self.config.cluster.jitter * math.sqrt(2.0 / math.pi))

    def rows(self, sequence: int) -> torch.Tensor:
        return batch_of(self.problem, self.trial.seed, self.index, sequence, self.config.problem.batch)

    def publish(self, updates: int, rows: float, used_seconds: float, num_bytes: float) -> None:
        """Writes the weights and the totals so far, for the bench to evaluate."""
        flat = torch.nn.utils.parameters_to_vector(self.model.parameters()).detach()  # (size,)
        point = Point(self.seconds, float("inf"), updates, rows, used_seconds, num_bytes)
        save({"point": list(point), "weights": flat}, self.folder / f"{_SNAPSHOT}-{updates:07d}")


def save(what: Any, path: Path) -> None:
    """Writes a file that appears whole."""
    part = path.with_name(f"part-{path.name}-{os.getpid()}")  # torch refuses a name that begins with a dot
    torch.save(what, part)
    part.replace(path)


# --- in the bench ------------------------------------------------------------------------------------------------


def fork_server() -> ForkServerContext:
    """Starts processes with one thread each, which have imported torch already."""
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ringmaster_dist.bench.twins", "torch._dynamo"])  # optimizers import the second
    return context


class Crew:
    """The processes of a rival, which run ``body(trial, index, folder)``. The bench's main thread calls `tick` often.

    A process that dies is started again. ``together`` says that the others then start again with it, as torchrun does.
    """

    def __init__(
        self, trial: Trial, body: Callable[[Trial, int, Path], None], num: int, folder: Path, *, together: bool
    ) -> None:
        self._trial, self._body, self._folder, self._together = trial, body, folder, together
        self._context = fork_server()
        self._processes = [self._started(index) for index in range(num)]
        self._began = time.monotonic()
        self.started_at: float | None = None  # when all were ready
        self._num_kills = 0

    def _started(self, index: int) -> ForkServerProcess:
        process = self._context.Process(
            target=_run, args=(self._body, self._trial, index, self._folder, os.getpid()), daemon=True
        )
        process.start()
        return process

    @property
    def seconds(self) -> float:
        """Since the start of the trial; 0 before it."""
        return 0.0 if self.started_at is None else time.monotonic() - self.started_at

    def tick(self) -> None:
        """Starts the clock when all are ready, kills a process when that is due, and restarts those that died."""
        if self.started_at is None:
            if len(list(self._folder.glob(f"{_READY}-*"))) == len(self._processes):
                now = time.monotonic()
                hidden = self._folder / f".{_START}"
                hidden.write_text(repr(now))
                hidden.replace(self._folder / _START)
                self.started_at = now
            elif time.monotonic() - self._began > _READY_SECONDS or any(p.exitcode for p in self._processes):
                raise UserError(f"{self._trial.contender.title} did not start: {self._first_error()}")
            return
        every = self._trial.cluster.kill_seconds
        if every and self.seconds >= (self._num_kills + 1) * every:
            self._num_kills += 1
            victim = self._processes[victim_of(self._trial.seed, self._num_kills, len(self._processes))]
            if victim.pid is not None and victim.exitcode is None:
                os.kill(victim.pid, signal.SIGKILL)
                victim.join()
        dead = [index for index, process in enumerate(self._processes) if process.exitcode is not None]
        if dead and not every:
            raise UserError(f"a process of {self._trial.contender.title} died: {self._first_error()}")
        if dead and self._together:
            self._end()
            dead = list(range(len(self._processes)))
        for index in dead:
            self._processes[index] = self._started(index)

    def snapshots(self) -> Iterator[tuple[Point, torch.Tensor]]:
        """What was published and not yet read, in order. A file is removed when it is read."""
        for path in sorted(self._folder.glob(f"{_SNAPSHOT}-*")):
            read = torch.load(path)
            path.unlink()
            yield Point(*read["point"]), read["weights"]

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *exception: object) -> None:
        self._end()

    def _end(self) -> None:
        for process in self._processes:
            if process.pid is not None and process.exitcode is None:
                process.kill()
        for process in self._processes:
            process.join()

    def _first_error(self) -> str:
        """The error of the first process that failed, because the others fail by it. Else what one was doing."""
        if failures := sorted(self._folder.glob(f"{_FAILURE}-*"), key=lambda path: path.stat().st_mtime):
            return failures[0].read_text()
        codes = enumerate(process.exitcode for process in self._processes)
        ended = [(index, f"ended with exit code {code}") for index, code in codes if code is not None]
        ready = {path.name for path in self._folder.glob(f"{_READY}-*")}
        late = [(n, "is not ready") for n in range(len(self._processes)) if f"{_READY}-{n}" not in ready]
        index, state = [*ended, *late][0]
        output = self._folder / f"{_OUTPUT}-{index}"
        lines = [line for line in output.read_text().split("\n") if line] if output.exists() else []
        return f"process {index} {state}; it wrote: {' / '.join(lines[-_LAST_LINES:]) or 'nothing'}"


def victim_of(seed: int, number: int, members: int) -> int:
    """Which member is killed. Every member has its turn, in an order that depends on the seed."""
    return (seed + 3 * number) % members


def _run(body: Callable[[Trial, int, Path], None], trial: Trial, index: int, folder: Path, parent: int) -> None:
    """The main function of a rival's process. It writes to files, and ends when the bench has ended."""
    _end_with(parent)
    output = os.open(folder / f"{_OUTPUT}-{index}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 2)
    os.dup2(output, 1)
    try:
        body(trial, index, folder)
    except BaseException as error:
        (folder / f"{_FAILURE}-{index}").write_text(f"process {index}: {type(error).__name__}: {error}")
        os._exit(1)
    os._exit(0)  # gloo's threads may abort when one member leaves before the others


def _end_with(parent: int) -> None:
    import threading

    def look() -> None:
        while Path(f"/proc/{parent}").exists():
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=look, daemon=True).start()
