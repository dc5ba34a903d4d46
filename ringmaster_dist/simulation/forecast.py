"""What a method would do on a cluster, played in virtual time with a problem that costs nothing.

`gradient_times` says how quick the workers of the cluster are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringmaster_dist.algorithm.layout import GEOMETRY_MAPS, Layout
from ringmaster_dist.algorithm.methods import Method
from ringmaster_dist.algorithm.update import Update
from ringmaster_dist.config.errors import UserError
from ringmaster_dist.config.profile_file import cluster_seconds, read_times
from ringmaster_dist.config.schema import Config
from ringmaster_dist.observe.measures import mean_compute_seconds, per_second, wasted_fraction
from ringmaster_dist.observe.run_files import TRACE, RunFiles, Trace
from ringmaster_dist.problems.quadratic import Quadratic
from ringmaster_dist.profiles import GPU_GRADIENT_SECONDS
from ringmaster_dist.server.core import ServerCore
from ringmaster_dist.simulation.simulator import Simulator
from ringmaster_dist.simulation.speeds import Speeds

_SLOWEST_GRADIENTS, _LEAST_GRADIENTS = 60, 4  # a horizon, in gradients of the slowest worker
_ENOUGH_GRADIENTS = 20_000  # of all of them: more than this tells nothing new


def gradient_times(given: Mapping[str, str], gpus: bool, config: Config) -> tuple[list[float], str]:
    """Seconds per gradient of each worker, sorted, and a description of their source.

    ``given`` may have one of the words ``times``, ``file`` and ``run`` of the command line. Raises UserError.
    """
    sources = [name for name in ("times", "file", "run") if name in given] + (["gpus"] if gpus else [])
    if len(sources) > 1:
        raise UserError(f"{' and '.join(sources)}: give one source of times")
    if "times" in given:
        try:
            times, what = [float(word) for word in given["times"].split(",")], "the given times"
        except ValueError:
            raise UserError(f"times={given['times']}: must be numbers of seconds, such as 1,2,4") from None
    elif "file" in given:
        times, what = read_times(Path(given["file"])), given["file"]
    elif "run" in given:
        times, what = _times_of_run(Path(given["run"])), f"the workers of {given['run']}"
    elif gpus:
        times, what = list(GPU_GRADIENT_SECONDS.values()), "the paper's GPUs"
    else:
        times = cluster_seconds(config.cluster, config.cluster.workers).tolist()
        what = f"{config.cluster.workers} workers, {config.cluster.profile}"
    if min(times) <= 0 or not all(map(math.isfinite, times)):
        raise UserError(f"gradient times must be above 0 seconds: {min(times):g}")
    return sorted(times), what


def _times_of_run(directory: Path) -> list[float]:
    """The mean compute time of each worker. For a worker that delivered nothing it is the pace it was given, if any."""
    if not (directory / TRACE).is_file():
        raise UserError(f"run={directory}: there is no trace.jsonl in it")
    trace = Trace(directory / TRACE)
    trace.read_new()
    if not len(trace):
        raise UserError(f"{directory / TRACE} is empty: the run delivered no gradient")
    delivered, summary = mean_compute_seconds(trace), RunFiles(directory).summary()
    silent = {} if summary is None else {int(w): worker.base_seconds for w, worker in summary.per_worker.items()}
    paced = [seconds for worker, seconds in silent.items() if worker not in delivered and seconds > 0]
    return [*delivered.values(), *paced]


def horizon_of(times: Sequence[float]) -> float:
    """How many virtual seconds say enough of workers with these seconds per gradient."""
    slowest, enough = max(times), _ENOUGH_GRADIENTS / sum(1.0 / seconds for seconds in times)
    return max(_LEAST_GRADIENTS * slowest, min(_SLOWEST_GRADIENTS * slowest, enough))


class Forecast(NamedTuple):
    updates_per_second: float
    gradients_per_second: float  # that arrive
    accepted: NDArray[np.int64]  # by worker
    arrived: NDArray[np.int64]
    begun: NDArray[np.int64]  # with what was interrupted
    wasted_fraction: float

    @property
    def starving(self) -> list[int]:
        """Workers of which nothing is ever accepted."""
        return np.flatnonzero(self.accepted == 0).tolist()


def forecast(
    seconds: Sequence[float], method: Method, *, jitter: float, interrupt: bool, horizon_seconds: float, seed: int = 0
) -> Forecast:
    """Plays ``horizon_seconds`` of a cluster with these seconds per gradient."""
    problem = Quadratic(2)
    layout = Layout(problem.parameters, GEOMETRY_MAPS["euclidean"])
    core = ServerCore(problem.initial(seed), method, Update(layout, dtype=problem.dtype))
    speeds = Speeds(seconds, jitter=jitter, seed=seed)
    simulator = Simulator(core, problem, speeds, seed=seed, interrupt=interrupt)
    simulator.run(seconds=horizon_seconds)
    records = [core.workers[worker] for worker in range(speeds.num_workers)]
    used, wasted = float(simulator.used_seconds.sum()), float(simulator.wasted_seconds.sum())
    return Forecast(
        updates_per_second=per_second(core.version, horizon_seconds),
        gradients_per_second=per_second(core.pushes, horizon_seconds),
        accepted=np.array([record.accepted for record in records]),
        arrived=(arrived := np.array([record.accepted + record.stale for record in records])),
        begun=arrived + simulator.interrupted,
        wasted_fraction=wasted_fraction(used, wasted),
    )
