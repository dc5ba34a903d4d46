"""What a method would do on a cluster, played in virtual time with a problem that costs nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ringmaster_dist.algorithm.layout import GEOMETRY_MAPS, Layout
from ringmaster_dist.algorithm.methods import Method
from ringmaster_dist.algorithm.rows import RowsBySpeed
from ringmaster_dist.algorithm.update import Update
from ringmaster_dist.observe.measures import per_second, wasted_fraction
from ringmaster_dist.problems import Stop, never
from ringmaster_dist.problems.quadratic import Quadratic
from ringmaster_dist.server.core import ServerCore
from ringmaster_dist.simulation.simulator import Simulator
from ringmaster_dist.simulation.speeds import Speeds

_SLOWEST_GRADIENTS, _LEAST_GRADIENTS = 60, 4  # a horizon, in gradients of the slowest worker
_ENOUGH_GRADIENTS = 20_000  # of all of them: more than this tells nothing new


def horizon_of(times: Sequence[float]) -> float:
    """How many virtual seconds say enough of workers with these seconds per gradient."""
    slowest, enough = max(times), _ENOUGH_GRADIENTS / sum(1.0 / seconds for seconds in times)
    return max(_LEAST_GRADIENTS * slowest, min(_SLOWEST_GRADIENTS * slowest, enough))


class RowsForFree(Quadratic):
    """A quadratic whose gradient is the same for any number of rows."""

    batch = 1

    def gradient(
        self, iterate: torch.Tensor, seed: int, worker_id: int, sequence: int, stop: Stop = never,
        rows: int | None = None,
    ) -> tuple[torch.Tensor, float]:  # fmt: skip
        return super().gradient(iterate, seed, worker_id, sequence, stop)


class Forecast(NamedTuple):
    updates_per_second: float
    gradients_per_second: float  # that arrive
    accepted: NDArray[np.int64]  # by worker
    arrived: NDArray[np.int64]
    begun: NDArray[np.int64]  # with what was interrupted
    wasted_fraction: float
    work_per_second: float  # that is accepted, in gradients of the usual number of rows
    rows: list[int]  # by worker, at the end; zeros if rows are not assigned

    @property
    def starving(self) -> list[int]:
        """Workers of which nothing is ever accepted."""
        return np.flatnonzero(self.accepted == 0).tolist()


def forecast(
    seconds: Sequence[float], method: Method, *, jitter: float, interrupt: bool, horizon_seconds: float, seed: int = 0,
    rows: RowsBySpeed | None = None,
) -> Forecast:  # fmt: skip
    """Plays ``horizon_seconds`` of a cluster with these seconds per gradient. If ``rows`` assigns rows, the seconds are
    those of a gradient with the usual number of rows."""
    problem = RowsForFree(2)
    layout = Layout(problem.parameters, GEOMETRY_MAPS["euclidean"])
    core = ServerCore(problem.initial(seed), method, Update(layout, dtype=problem.dtype), rows=rows)
    speeds = Speeds(seconds, jitter=jitter, seed=seed)
    simulator = Simulator(core, problem, speeds, seed=seed, interrupt=interrupt)
    simulator.run(seconds=horizon_seconds)
    records = [core.workers[worker] for worker in range(speeds.num_workers)]
    accepted = np.array([record.accepted for record in records])
    work = float(accepted.sum())
    if rows is not None:
        work = sum(rows.weight(rows.accepted_rows(worker)) for worker in range(speeds.num_workers))
    used, wasted = float(simulator.used_seconds.sum()), float(simulator.wasted_seconds.sum())
    return Forecast(
        updates_per_second=per_second(core.version, horizon_seconds),
        gradients_per_second=per_second(core.pushes, horizon_seconds),
        accepted=accepted,
        arrived=(arrived := np.array([record.accepted + record.stale for record in records])),
        begun=arrived + simulator.interrupted,
        wasted_fraction=wasted_fraction(used, wasted),
        work_per_second=per_second(work, horizon_seconds),
        rows=[core.rows_of(worker) for worker in range(speeds.num_workers)],
    )
