"""Measured gradient times: the file that ``ringmaster profile`` writes, and the times of a cluster."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringmaster_dist.config.errors import UserError, warn
from ringmaster_dist.config.schema import CHECKOUT, TEXT_PROBLEMS, ClusterConfig, Config
from ringmaster_dist.profiles import base_seconds

# The time of a gradient depends on these keys of a problem. Those of the model count for nanochat too.
_TIMED = {
    "quadratic": ("dim",),
    "nanochat": ("batch", "micro_batch", "precision", "attention", "compile"),
    CHECKOUT: ("batch", "micro_batch", "precision", "compile"),
    "python": ("target", "args"),
}
_SHOWN_DIFFERENCES = 3
_MOST_LETTERS = 1 << 24  # of a file


class Profile(NamedTuple):
    """A file of ``ringmaster profile``. Older versions wrote fewer keys."""

    path: Path
    content: dict[str, Any]  # as it stands in the file

    @property
    def devices(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.content["devices"]
        return found

    @property
    def seconds(self) -> list[float]:
        """Seconds per gradient of each device."""
        return [float(device["seconds_mean"]) for device in self.devices]

    @property
    def settings(self) -> dict[str, Any]:
        """What was measured, as `timed_settings` has it. Version 0.3 wrote the two names only."""
        content = self.content
        names = {"problem.name": content.get("problem"), "model.name": content.get("model")}
        found: dict[str, Any] = content.get("settings", names if content.get("problem") == "nanochat" else {})
        return found


def read_profile(path: Path, option: str = "cluster.profile_file") -> Profile:
    """Raises `UserError`, with the name of the option, if ``ringmaster profile`` has not written the file."""
    try:
        with path.open() as file:
            profile = Profile(path, json.loads(file.read(_MOST_LETTERS)))
        times, is_whole = profile.seconds, isinstance(profile.settings, dict)
    except OSError as error:
        raise UserError(f"{option}={path} cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{option}={path} is not a file of ringmaster profile ({error!r})") from error
    if not is_whole:
        raise UserError(f"{option}={path} is not a file of ringmaster profile (its settings are no mapping)")
    if not times or not all(math.isfinite(seconds) and seconds > 0 for seconds in times):
        raise UserError(f"{option}={path}: times must be above 0")
    return profile


def merged(profiles: Sequence[Profile]) -> dict[str, Any]:
    """The content of one file with the devices of all. Raises `UserError` if they were measured with other settings."""
    first = profiles[0]
    content: dict[str, Any] = {}
    for other in profiles:
        if found := _differences(first.settings, other.settings):
            raise UserError(
                f"{first.path} and {other.path} were measured with different settings ({found}): measure all machines "
                "with the same"
            )
        content |= other.content
    return {**content, "devices": [device for profile in profiles for device in profile.devices]}


def timed_settings(config: Config) -> dict[str, Any]:
    """The keys, with their values, that the time of a gradient depends on."""
    problem = config.problem
    settings = {"problem.name": problem.name}
    settings |= {f"problem.{key}": getattr(problem, key) for key in _TIMED[problem.name]}
    if problem.name in TEXT_PROBLEMS:
        settings |= {f"model.{key}": value for key, value in asdict(config.model).items()}
    return settings


def warn_about_times(config: Config) -> None:
    """Warns if the times in cluster.profile_file were measured with another problem or model than this one.

    A quadratic stands for any model, so it may have the times of any.
    """
    cluster, settings = config.cluster, timed_settings(config)
    if cluster.profile != "file" or cluster.times or config.problem.name == "quadratic":
        return
    if cluster.batch is not None:  # each worker has its own rows
        settings.pop("problem.batch", None)
    path = Path(cluster.profile_file or "")
    if found := _differences(read_profile(path).settings, settings):
        warn(f"cluster.profile_file={path} was measured with other settings than this run has ({found})")


def _differences(measured: dict[str, Any], wanted: dict[str, Any]) -> str:
    keys = [key for key in measured if key in wanted and measured[key] != wanted[key]]
    shown = [f"{key}={measured[key]} versus {wanted[key]}" for key in keys[:_SHOWN_DIFFERENCES]]
    return ", ".join([*shown, "..."] if len(keys) > _SHOWN_DIFFERENCES else shown)


def cluster_seconds(config: Config, num_workers: int) -> NDArray[np.float64]:
    """Seconds per push of the first workers of a cluster, by its profile or as measured; shape (num_workers,).

    A push takes ``local.steps`` gradients.
    """
    cluster = config.cluster
    if cluster.profile != "file":
        return config.local.steps * base_seconds(cluster.profile, num_workers, cluster.unit_seconds)
    return config.local.steps * np.resize(np.array(measured_times(cluster)), num_workers)  # dealt in turn


def measured_times(cluster: ClusterConfig) -> list[float]:
    """The times in cluster.times, else those in cluster.profile_file."""
    if cluster.times:
        return cluster.times
    if not cluster.profile_file:
        raise UserError("cluster.profile=file needs cluster.profile_file, which ringmaster profile writes")
    return read_profile(Path(cluster.profile_file)).seconds
