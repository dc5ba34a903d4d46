"""Counts what serving costs. Metrics are made from these counts.

The counts begin with this start of the server. Everything here happens under the lock of the service.
"""

from __future__ import annotations

from dataclasses import dataclass

from ringmaster_dist.protocol import Interruptions, Snapshot


@dataclass
class Meter:
    num_updates: int = 0
    update_seconds: float = 0.0  # spent on computing them
    num_pushes: int = 0
    lock_wait_seconds: float = 0.0  # of pushes
    bytes_received: int = 0  # of gradients
    bytes_sent: int = 0  # of iterates
    lease_losses: int = 0
    num_joined: int = 0
    keeps_next: bool = True  # whether the next update is kept
    kept: tuple[Snapshot, Snapshot] | None = None  # the iterates before and after it

    def pushed(self, waited_seconds: float, num_bytes: int) -> None:
        self.num_pushes += 1
        self.lock_wait_seconds += waited_seconds
        self.bytes_received += num_bytes

    def sent(self, snapshot: Snapshot) -> None:
        self.bytes_sent += snapshot.iterate.nbytes

    def applied(self, before: Snapshot, after: Snapshot, seconds: float) -> None:
        """An update was computed, or a gradient was added to the sum for one."""
        self.update_seconds += seconds
        if after.version > before.version:
            self.num_updates += 1
            if self.keeps_next:
                self.keeps_next, self.kept = False, (before, after)


@dataclass(frozen=True)
class WorkerMeasurements:
    worker: int
    slot: int
    accepted: int
    stale: int
    invalid: int
    interruptions: Interruptions
    used_seconds: float
    wasted_seconds: float  # of gradients that were rejected, and of work that was interrupted
    ranks: int = 1
    rows: int = 0  # of its next gradient, if the server assigns rows
    accepted_rows: int = 0  # of its gradients that were accepted, likewise


@dataclass(frozen=True)
class Measurements:
    """The figures of a service at one moment, all read under its lock."""

    seconds: float
    version: int  # decided
    computed_version: int
    accepted: int
    stale: int
    invalid: int
    num_live: int
    threshold: float
    eta: float
    alpha: float
    device_memory_bytes: int | None  # of tensors on the device of the updates; None if it is the CPU
    meter: Meter  # a copy
    workers: list[WorkerMeasurements]

    @property
    def pushes(self) -> int:
        return self.accepted + self.stale + self.invalid
