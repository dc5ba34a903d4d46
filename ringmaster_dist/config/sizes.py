"""Refuses a cluster that this machine has no memory for, before anything is started or allocated."""

from __future__ import annotations

import os
from pathlib import Path

from ringmaster_dist.config.errors import UserError, warn
from ringmaster_dist.config.schema import Config

# Measured on Linux: a process of a run apart from its model, and a simulated worker.
_BYTES_PER_PROCESS, _BYTES_PER_SIMULATED_WORKER = 60e6, 1e3
_MANY_PROCESSES_PER_CORE = 32
_CGROUP = Path("/sys/fs/cgroup")


def refuse_too_many_simulated(config: Config) -> None:
    """Raises `UserError` if the simulated workers need more memory than there is."""
    workers = config.cluster.workers
    needed, free = workers * _BYTES_PER_SIMULATED_WORKER, _available_bytes()
    if free is not None and needed > free:
        raise UserError(
            f"cluster.workers={workers}: that many simulated workers take about {_shown(needed)} of memory, and "
            f"{_shown(free)} are available: use at most {int(free / _BYTES_PER_SIMULATED_WORKER)}"
        )


def refuse_too_many_processes(config: Config) -> None:
    """Raises `UserError` if the workers that this machine would start need more memory than there is."""
    refuse_workers(_local_workers(config), "cluster.workers", "start workers on other machines (cluster.local_workers)")


def refuse_workers(workers: int, key: str, remedy: str) -> None:
    """The same for a number of workers that ``key`` has given. ``remedy`` is what else can be done."""
    needed, free = workers * _BYTES_PER_PROCESS, _available_bytes()
    if free is not None and needed > free and workers > 1:
        raise UserError(
            f"{key}={workers}: so many processes on this machine take about {_shown(needed)} of memory, and "
            f"{_shown(free)} are available: use at most {max(1, int(free / _BYTES_PER_PROCESS))}, or {remedy}"
        )


def warn_about_many_processes(config: Config) -> None:
    workers, cores = _local_workers(config), os.cpu_count() or 1
    if workers > _MANY_PROCESSES_PER_CORE * cores:
        memory = _shown(workers * _BYTES_PER_PROCESS)
        warn(
            f"cluster.workers={workers}: these are {workers} processes on {cores} cores, with about {memory} of memory"
        )


def _local_workers(config: Config) -> int:
    if "LOCAL_RANK" in os.environ:
        return 0  # torchrun has started them, perhaps on several machines
    return config.cluster.workers if config.cluster.local_workers is None else config.cluster.local_workers


def _available_bytes() -> float | None:
    """The memory that new processes can get; None where the system does not say. A container may have a limit."""
    try:
        free = 1024 * _figure(Path("/proc/meminfo"), "MemAvailable:")
    except (OSError, StopIteration):
        return None
    try:
        limit, used = (float((_CGROUP / f"memory.{name}").read_text()) for name in ("max", "current"))
        # The page cache counts as used. The kernel evicts its inactive part when a process needs memory.
        return min(free, limit - used + _figure(_CGROUP / "memory.stat", "inactive_file"))
    except (OSError, StopIteration, ValueError):  # there is no limit
        return free


def _figure(path: Path, name: str) -> float:
    """The number after this name in a file of the kernel."""
    lines = (line.split() for line in path.read_text().splitlines())
    return next(float(words[1]) for words in lines if words[:1] == [name])


def _shown(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes < 1e13 else f"{num_bytes / 1e12:,.0f} TB"
