"""Measures how long a gradient takes on the devices of this machine, one device after the other."""

from __future__ import annotations

import gc
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ringmaster_dist import devices
from ringmaster_dist.algorithm.layout import Layout
from ringmaster_dist.config.build import build_layout, build_problem
from ringmaster_dist.config.errors import UserError
from ringmaster_dist.config.profile_file import timed_settings
from ringmaster_dist.config.schema import TEXT_PROBLEMS, Config

_WARM_UPS = 3


def profile(
    config: Config, names: Sequence[str], steps: int, progress: Callable[[str, int, int], None]
) -> dict[str, Any]:
    """The content of a profile file. ``progress`` gets the device, the step and the number of steps.

    Raises UserError if a device cannot compute the gradient, such as one with too little memory.
    """
    torch.set_num_threads(config.cluster.threads)
    measured, layout = [], None
    for name in names:
        try:
            seconds, layout = _measure(config, name, steps, progress)
        except RuntimeError as error:
            (reason, *_) = str(error).splitlines() or [""]
            raise UserError(
                f"a gradient could not be computed on {name} ({type(error).__name__}: {reason}): "
                "give device= without it"
            ) from error
        finally:  # the next device begins with the memory that this one had
            gc.collect()
            devices.empty_cache(name)
        measured.append(_entry(config, name, seconds))
    assert layout is not None, "there is always the CPU"
    return {
        "problem": config.problem.name,
        "model": config.model.name if config.problem.name in TEXT_PROBLEMS else config.problem.target or "",
        "settings": timed_settings(config),
        "parameters": layout.size,
        "matrices": _orthogonalized(layout),
        "devices": measured,
    }


def _measure(
    config: Config, device: str, steps: int, progress: Callable[[str, int, int], None]
) -> tuple[list[float], Layout]:
    """The seconds of each gradient. A worker's copies between host and device are part of them, as are local steps."""
    problem = build_problem(config, device)
    layout = build_layout(config, problem)
    iterate = problem.initial(config.run.seed)  # (size,)
    seconds = []
    for step in range(_WARM_UPS + steps):
        began = time.perf_counter()
        problem.gradient(iterate, config.run.seed, 0, step)
        devices.finish(device)
        seconds.append((time.perf_counter() - began) / config.local.steps)
        progress(device, step, _WARM_UPS + steps)
    return seconds[_WARM_UPS:], layout


def _entry(config: Config, device: str, seconds: Sequence[float]) -> dict[str, Any]:
    has_rows, mean = config.problem.name in TEXT_PROBLEMS, statistics.mean(seconds)
    rows = config.problem.batch if has_rows else None
    threads = f", {config.cluster.threads} thread(s)" if devices.is_cpu(device) else ""
    return {
        "device": device,
        "name": devices.title(device) + threads,
        "host": platform.node(),
        "torch": torch.__version__,
        "rows": rows,
        "seconds_mean": mean,
        "seconds_std": statistics.stdev(seconds),
        "seconds_min": min(seconds),
        "seconds_max": max(seconds),
        "tokens_per_second": (rows or 0) * config.model.sequence_len / mean,
        "steps": len(seconds),
    }


def _orthogonalized(layout: Layout) -> list[list[int]]:
    """Rows, columns and number of the matrices that an update orthogonalises, which is most of its arithmetic."""
    return [[b.rows, b.cols, b.num_matrices] for b in layout.blocks if b.geometry == "spectral"]
