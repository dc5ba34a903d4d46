"""The server process: ``ringmaster serve RUN_DIR`` on a directory that `train` has prepared."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ringmaster_dist.config.build import build_core, build_problem
from ringmaster_dist.config.compose import from_yaml
from ringmaster_dist.config.errors import UserError
from ringmaster_dist.config.schema import Config
from ringmaster_dist.observe.run_directory import MetricsWriter, RunDirectory, TraceWriter
from ringmaster_dist.observe.summary import summarize
from ringmaster_dist.profiles import base_seconds
from ringmaster_dist.protocol import Push, Receipt
from ringmaster_dist.server.service import Service

_POLL_SECONDS = 0.05


class Journal:
    """Writes what the service tells: the trace and the members. Called under the service's lock."""

    def __init__(self, trace: TraceWriter, members: MetricsWriter) -> None:
        self._trace, self._members = trace, members

    def arrival(self, time: float, worker: int, push: Push, receipt: Receipt) -> None:
        self._trace.arrival(
            time, worker, push.sequence, push.gradient_version, receipt, push.loss, push.compute_seconds
        )

    def membership(self, worker: int, event: str, pushes: int) -> None:
        self._members.write({"worker": worker, "event": event, "pushes": pushes})


def serve(
    config: Config,
    config_text: str,
    directory: RunDirectory,
    token: str,
    *,
    announce: Callable[[str], None] = lambda address: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Serves until the budget is used up or a stop is asked for; returns the summary, which is written too."""
    from ringmaster_dist.transport.star import Host

    began = time.monotonic()
    problem = build_problem(config)
    core = build_core(config, problem)
    trace, members, metrics = directory.open_trace(), directory.open_members(), directory.open_metrics()
    settings = config.server
    service = Service(
        core,
        config_text=config_text,
        token=token,
        lease_seconds=settings.lease_seconds,
        journal=Journal(trace, members),
        max_updates=config.budget.updates or math.inf,
        max_seconds=config.budget.seconds or math.inf,
        expected_workers=config.cluster.workers,
        start_seconds=settings.start_seconds,
    )
    try:
        host = Host(service, settings.host, settings.port, threads=settings.threads, timeout=settings.call_seconds)
    except OSError as error:
        where = f"server.host={settings.host} server.port={settings.port}"
        raise UserError(
            f"{where} cannot be listened on ({error.strerror}): choose another, or server.port=0"
        ) from error
    service.start()
    directory.write_secret("address", host.address)
    announce(host.address)

    interval = (config.budget.seconds or 60.0) / config.run.samples
    next_sample = 0.0
    while not service.ended.wait(_POLL_SECONDS):
        if should_stop():
            service.end()
        if service.seconds >= next_sample:
            next_sample = service.seconds + interval
            metrics.write(_measurement(service, problem))
    stopped = should_stop()
    service.wait_until_all_left(settings.farewell_seconds)
    service.close()
    metrics.write(_measurement(service, problem))
    for file in (trace, members, metrics):
        file.close()
    views = {name: view.clone() for name, view in core.update.layout.views(core.snapshot.iterate).items()}
    temporary = directory.path / ".final.safetensors"
    save_file({**views, "version": torch.tensor(core.version)}, temporary)
    temporary.replace(directory.path / "final.safetensors")
    summary = _summary(
        config, problem, service, "stopped by the user" if stopped else "budget", time.monotonic() - began
    )
    directory.write_summary(summary)
    host.close()
    return summary


def _measurement(service: Service, problem: Any) -> dict[str, Any]:
    core = service.core
    snapshot = core.snapshot
    evaluation = problem.evaluate(snapshot.iterate)
    counts = {"accepted": core.accepted, "stale": core.stale, "invalid": core.invalid}
    return {"time": service.seconds, "version": snapshot.version, **evaluation, **counts, "workers": len(core.live)}


def _summary(config: Config, problem: Any, service: Service, ended: str, wall_seconds: float) -> dict[str, Any]:
    cluster = config.cluster
    paced = cluster.profile != "none"
    workers = {}
    for worker, status in service.workers.items():
        base = float(base_seconds(cluster.profile, status.slot + 1, cluster.unit_seconds)[-1]) if paced else 0.0
        workers[worker] = {
            "base_seconds": base,
            "interrupted": status.interruptions.num,
            "used_seconds": status.used_seconds,
            "wasted_seconds": status.wasted_seconds + status.interruptions.seconds,
        }
    slowest = max((worker["base_seconds"] for worker in workers.values()), default=0.0)
    return summarize(
        service.core,
        problem.evaluate(service.core.snapshot.iterate),
        seconds=service.seconds,
        wall_seconds=wall_seconds,
        workers=workers,
        method=config.method.name,
        problem=config.problem.name,
        clock="real",
        ended=ended,
        synchronous_updates=math.floor(service.seconds / slowest) if slowest else 0,
        num_workers=len(workers),
        profile=cluster.profile,
        engine="rpc",
    )


def main(argv: list[str]) -> int:
    """Called by the supervisor, not by hand: the directory has a configuration, the environment the token."""
    from ringmaster_dist.cli.signals import stop_signals

    if len(argv) != 1 or not (Path(argv[0]) / "config.yaml").exists():
        raise UserError("ringmaster serve is started by ringmaster train; see ringmaster train --help")
    config_text = (Path(argv[0]) / "config.yaml").read_text()
    directory = RunDirectory.opened(Path(argv[0]))
    parent = os.getppid()
    with stop_signals() as asked:
        serve(
            from_yaml(config_text),
            config_text,
            directory,
            os.environ["RINGMASTER_TOKEN"],
            should_stop=lambda: asked() or os.getppid() != parent,  # an orphan ends itself
        )
    return 0
