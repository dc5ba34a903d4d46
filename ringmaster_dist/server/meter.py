"""What serving costs, counted as it happens: seconds, bytes, leases. Since this start of the server.

Every method is a few additions. Those of the pushes are called under the service's lock, `applied` by the one thread
that computes.
"""

from __future__ import annotations

from ringmaster_dist.protocol import Snapshot


class Meter:
    def __init__(self) -> None:
        self.num_updates = 0
        self.update_seconds = 0.0  # computing them
        self.num_pushes = 0
        self.lock_wait_seconds = 0.0  # of pushes
        self.bytes_received = 0  # of gradients
        self.bytes_sent = 0  # of iterates
        self.lease_losses = 0
        self.num_joined = 0
        self.wanted = True  # whether the next update is to be kept
        self.kept: tuple[Snapshot, Snapshot] | None = None  # before and after it

    def pushed(self, waited_seconds: float, num_bytes: int) -> None:
        self.num_pushes += 1
        self.lock_wait_seconds += waited_seconds
        self.bytes_received += num_bytes

    def sent(self, snapshot: Snapshot) -> None:
        self.bytes_sent += snapshot.iterate.nbytes

    def applied(self, before: Snapshot, after: Snapshot, seconds: float) -> None:
        """An update, or a gradient taken in for one, was computed."""
        self.update_seconds += seconds
        if after.version > before.version:
            self.num_updates += 1
            if self.wanted:
                self.wanted, self.kept = False, (before, after)
