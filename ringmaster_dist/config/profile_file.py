"""Measured gradient times, as ``ringmaster profile`` writes them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ringmaster_dist.config.errors import UserError
from ringmaster_dist.config.schema import ClusterConfig
from ringmaster_dist.profiles import base_seconds


def cluster_seconds(cluster: ClusterConfig, num_workers: int) -> NDArray[np.float64]:
    """Seconds per gradient of the first workers of a cluster, by its profile or as measured; shape (num_workers,)."""
    if cluster.profile != "file":
        return base_seconds(cluster.profile, num_workers, cluster.unit_seconds)
    return np.resize(np.array(measured_times(cluster)), num_workers)  # dealt in turn


def measured_times(cluster: ClusterConfig) -> list[float]:
    """The times in cluster.times, else those in cluster.profile_file."""
    if cluster.times:
        return cluster.times
    if not cluster.profile_file:
        raise UserError("cluster.profile=file needs cluster.profile_file, which ringmaster profile writes")
    return read_times(Path(cluster.profile_file))


def read_times(path: Path) -> list[float]:
    """The times in a file. Raises `UserError` if ``ringmaster profile`` has not written it."""
    try:
        devices = json.loads(path.read_text())["devices"]
        times = [float(device["seconds_mean"]) for device in devices]
    except OSError as error:
        raise UserError(f"cluster.profile_file={path} cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"cluster.profile_file={path} is not a file of ringmaster profile ({error!r})") from error
    if not times or min(times) <= 0:
        raise UserError(f"cluster.profile_file={path}: times must be above 0")
    return times
