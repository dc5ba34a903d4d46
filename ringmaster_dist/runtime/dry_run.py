"""``ringmaster train --dry-run`` builds everything, times one gradient and one update, and forecasts the run."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping

import torch

from ringmaster_dist import devices
from ringmaster_dist.config.build import build_core, build_method, build_problem, build_wire, rows_of
from ringmaster_dist.config.profile_file import cluster_seconds
from ringmaster_dist.config.schema import AUTO, Config
from ringmaster_dist.problems import Problem
from ringmaster_dist.runtime.placement import local_devices, local_workers, servers_device
from ringmaster_dist.server import weights
from ringmaster_dist.server.core import ServerCore
from ringmaster_dist.simulation.forecast import forecast, horizon_of
from ringmaster_dist.wire import Codec

_LONGEST_SECONDS, _MOST_REPEATS = 5.0, 5  # limits of one measurement; its first call is not counted


def dry_run(config: Config, initial: Mapping[str, torch.Tensor] | None) -> int:
    """Prints the forecast. ``initial`` are the weights that the run would begin from, or None for the problem's own."""
    local = local_devices(config)
    problem = build_problem(config, local[0], rows_of(config, 0))
    where = servers_device(config)
    core = build_core(config, problem, device=where, precision=AUTO)
    iterate = core.snapshot.iterate.cpu()  # (size,)
    if initial is not None:
        iterate = weights.flat(initial, core.update.layout, problem.dtype)
    roles = ", ".join(sorted({parameter.role for parameter in problem.parameters}))
    size = f"{core.update.layout.size:,} parameters ({roles})"
    print(f"problem: {config.problem.name}, {size}, method.eta={config.method.eta:g}")
    gradient_seconds = {}  # by type of device
    for device in devices.one_of_each_type(local):
        slot = local.index(device)
        tried = problem if slot == 0 else build_problem(config, device, rows_of(config, slot))
        tried.bind(core.update.layout)
        gradient_seconds[torch.device(device).type] = _gradient_seconds(config, tried, iterate)
    update_seconds = _update_seconds(config, problem, core, iterate)
    measured = ", ".join(f"{_duration(seconds)} on {kind}" for kind, seconds in gradient_seconds.items())
    steps = config.local.steps
    pushed = "gradient" if steps == 1 else f"push of {steps} local steps"
    print(f"one {pushed}: {measured}; one update: {_duration(update_seconds)} on {where}")
    _say_evaluation(config, problem, iterate)
    _say_rates(config, core, _worker_seconds(config, local, gradient_seconds), update_seconds)
    return 0


def _gradient_seconds(config: Config, problem: Problem, iterate: torch.Tensor) -> float:
    """Seconds of one gradient, with the threads of a worker. It ends in host memory, so the device has finished."""
    torch.set_num_threads(config.cluster.threads)
    return _seconds(lambda repeat: problem.gradient(iterate, config.run.seed, 0, repeat))


def _update_seconds(config: Config, problem: Problem, core: ServerCore, iterate: torch.Tensor) -> float:
    """Seconds of one update, with the threads of the server."""
    torch.set_num_threads(config.cluster.threads)
    gradient = problem.gradient(iterate, config.run.seed, 0, 0)[0]  # (size,)
    gradient = _codec(config, core).encode_gradient(gradient, config.run.seed, 0, 0)  # as it arrives
    torch.set_num_threads(config.server.compute_threads)
    gradient, spare = gradient.to(core.update.device), torch.empty_like(core.momentum)

    def update(repeat: int) -> None:
        core.update.apply(core.snapshot.iterate, core.momentum, gradient, eta=1e-12, alpha=0.05, out=spare)
        devices.finish(core.update.device)

    return _seconds(update)


def _codec(config: Config, core: ServerCore) -> Codec:
    return Codec(build_wire(config), core.update.layout.size, core.update.dtype)


def _say_evaluation(config: Config, problem: Problem, iterate: torch.Tensor) -> None:
    began = time.perf_counter()
    evaluation = problem.evaluate(iterate)
    seconds = time.perf_counter() - began
    shown = ", ".join(f"{name} {value:.4g}" for name, value in evaluation.items())
    often = "with every row" if problem.quick_to_evaluate else f"after every {config.eval.every} updates"
    print(f"one evaluation: {_duration(seconds)}, {often}" + (f" ({shown} at the beginning)" if shown else ""))


def _say_rates(config: Config, core: ServerCore, times: list[float], update_seconds: float) -> None:
    """Prints the forecast of updates per second, of the network, and of the end of the budget.

    ``times`` are the seconds per gradient of each worker.
    """
    cluster, budget = config.cluster, config.budget
    played = forecast(
        times, build_method(config), jitter=cluster.jitter if cluster.profile != "none" else 0.0,
        interrupt=config.method.interrupt, horizon_seconds=horizon_of(times), seed=config.run.seed,
        rows=core.rows,
    )  # fmt: skip
    rate = min(played.updates_per_second, 1.0 / update_seconds)
    limit = "the server's arithmetic" if rate < played.updates_per_second else "the workers"
    print(
        f"{cluster.workers} workers at {min(times):.3g} to {max(times):.3g} s per gradient: about {rate:.3g} updates "
        f"per second (limited by {limit}); {played.wasted_fraction:.0%} of their compute will not be used"
    )
    if core.rows is not None:
        print(f"  rows per gradient, by worker: {', '.join(map(str, played.rows))}")
    if played.starving:
        print(
            f"  nothing of {len(played.starving)} workers would be accepted: raise method.threshold or give them less"
        )
    codec = _codec(config, core)
    up, down = codec.gradient_bytes, codec.iterate_bytes
    per_second = min(played.gradients_per_second, 1.0 / update_seconds)
    print(
        f"network: {_bytes(up)} up and {_bytes(down)} down per gradient; "
        f"{_bytes(up * per_second)} and {_bytes(down * per_second)} per second at the server"
    )
    ends = [budget.updates / rate] if budget.updates and rate else []
    ends += [budget.seconds] if budget.seconds else []
    print(f"budget: used up after about {min(ends):,.0f} s" if ends else "budget: no update would be made")


def _worker_seconds(config: Config, local: list[str], gradient_seconds: Mapping[str, float]) -> list[float]:
    """Seconds per gradient of each worker. Workers on this machine share its cores if they compute on the CPU.

    Workers elsewhere are taken to have the same devices as those here.
    """
    cluster = config.cluster
    paces = cluster_seconds(config, cluster.workers) if cluster.profile != "none" else [0.0] * cluster.workers
    kinds = [torch.device(devices.in_turn(local, slot)).type for slot in range(cluster.workers)]
    own = [gradient_seconds[kind] for kind in kinds]
    here = range(local_workers(config))
    demand = cluster.threads * sum(own[i] / max(paces[i], own[i]) for i in here if kinds[i] == devices.CPU)
    crowding = max(1.0, demand / (os.cpu_count() or 1))
    return [
        max(float(pace), seconds * (crowding if kind == devices.CPU else 1.0))
        for pace, seconds, kind in zip(paces, own, kinds, strict=True)
    ]


def _seconds(work: Callable[[int], object]) -> float:
    """The median seconds of a few calls. The first call is not counted."""
    work(0)
    taken: list[float] = []
    while len(taken) < _MOST_REPEATS and sum(taken) < _LONGEST_SECONDS:
        began = time.perf_counter()
        work(1 + len(taken))
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def _duration(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 0.1 else f"{1e3 * seconds:.3g} ms"


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
