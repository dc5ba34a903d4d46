"""Says which devices of this machine compute gradients, and which one computes updates."""

from __future__ import annotations

import os

from ringmaster_dist import devices
from ringmaster_dist.config.errors import UserError
from ringmaster_dist.config.schema import Config
from ringmaster_dist.errors import Mistake


def local_workers(config: Config) -> int:
    """The number of workers that are started on this machine."""
    cluster = config.cluster
    return cluster.workers if cluster.local_workers is None else cluster.local_workers


def local_devices(config: Config) -> list[str]:
    """The devices of the workers on this machine, by slot. The first is there even if no worker is started here."""
    named = config.cluster.devices
    names = named or devices.accelerators() or [devices.CPU]
    first = 1 if "LOCAL_RANK" in os.environ and not named else 0  # under torchrun the server is the first rank
    return [devices.in_turn(names, first + slot) for slot in range(max(1, local_workers(config)))]


def servers_device(config: Config) -> str:
    """The device of the updates."""
    if config.server.device != "auto":
        return config.server.device
    used = local_devices(config) if local_workers(config) else []
    return next((name for name in devices.accelerators() if name not in used), devices.CPU)


def refuse_missing_devices(config: Config) -> None:
    """Raises `UserError` that names the key of a device which this machine does not have."""
    named = config.cluster.devices or []
    wanted = {name: f"cluster.devices=[{','.join(named)}]" for name in named}
    if config.server.device != "auto":
        wanted[config.server.device] = f"server.device={config.server.device}"
    for name, given in wanted.items():
        try:
            devices.require(name)
        except Mistake as error:
            raise UserError(f"{given}: {error}") from error
