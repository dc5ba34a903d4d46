"""What a run's configuration means for one worker."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ringmaster_dist import devices
from ringmaster_dist.config.build import build_fingerprint, build_layout, build_problem, build_wire, rows_of
from ringmaster_dist.config.compose import from_yaml
from ringmaster_dist.config.errors import UserError
from ringmaster_dist.config.own_code import A_WORKER, allow
from ringmaster_dist.config.profile_file import cluster_seconds
from ringmaster_dist.errors import Mistake
from ringmaster_dist.problems import Problem
from ringmaster_dist.profiles import SpeedPhase, rate_at
from ringmaster_dist.wire import Codec


@dataclass(frozen=True)
class Job:
    """What one worker computes, and how it sends the result."""

    problem: Problem
    device: str
    fingerprint: str
    seed: int
    base_seconds: float | None  # per push of the usual number of rows, when pacing
    usual_rows: int
    jitter: float
    interrupt: bool
    overlap: bool  # whether the next gradient is computed while a push is under way
    wire: Codec
    slot: int = 0
    phases: Sequence[SpeedPhase] = ()  # in which a paced worker is slower or quicker

    def pace(self, rows: int, seconds: float) -> float | None:
        """The seconds of a gradient when pacing, before jitter. 0 rows stand for the usual number.

        ``seconds`` is how long the worker has computed, which decides its phase.
        """
        if self.base_seconds is None:
            return None
        usual = self.base_seconds / rate_at(self.phases, self.slot, seconds)
        return usual * (rows / self.usual_rows) if rows else usual


def make_job(config_text: str, slot: int, target: str = "", device: str = "") -> Job:
    """``target`` is the only problem.target, or checkout, that this worker may import. ``device`` is where it computes.

    Raises UserError for another target, and for a device that this machine does not have.
    """
    config = from_yaml(config_text)
    allow(config, target, A_WORKER)
    torch.set_num_threads(config.cluster.threads)  # several workers share a machine; bits depend on this number
    device = device_of(slot, device)
    problem = build_problem(config, device, rows_of(config, slot))
    cluster = config.cluster
    pace = None
    if cluster.profile != "none":
        pace = float(cluster_seconds(config, slot + 1)[slot])
    layout = build_layout(config, problem)
    return Job(
        problem=problem,
        device=device,
        fingerprint=build_fingerprint(layout, problem),
        seed=config.run.seed,
        base_seconds=pace,
        usual_rows=getattr(problem, "batch", None) or 1,
        jitter=cluster.jitter,
        interrupt=config.method.interrupt,
        overlap=config.worker.overlap,
        wire=Codec(build_wire(config), layout.size, problem.dtype, device, copies=config.worker.overlap),
        slot=slot,
        phases=cluster.phases,
    )


def device_of(slot: int, wanted: str = "") -> str:
    """The device of a worker, by its slot. Raises UserError if this machine does not have the wanted one."""
    return devices.in_turn(choice_of_devices(wanted), slot)


def choice_of_devices(wanted: str = "") -> list[str]:
    """The devices that a worker takes in turn by its slot, which it may learn only when it joins.

    Without a wish these are the accelerators, or the CPU if there is none. Under torchrun the local rank has chosen one
    of them. Raises UserError if this machine does not have the wanted one.
    """
    if wanted:
        try:
            devices.require(wanted)
        except Mistake as error:
            raise UserError(f"device={wanted}: {error}") from error
        return [wanted]
    found, rank = devices.accelerators() or [devices.CPU], os.environ.get("LOCAL_RANK")
    return found if rank is None else [devices.in_turn(found, int(rank))]
