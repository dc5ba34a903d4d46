"""What the service writes to: a journal of the run, and checkpoints. `runtime` implements both."""

from __future__ import annotations

from typing import Protocol

from ringmaster_dist.algorithm.methods import Change
from ringmaster_dist.algorithm.rows import RowsChange
from ringmaster_dist.protocol import Push, Receipt, Seat
from ringmaster_dist.server.checkpoints import CheckpointState


class Journal(Protocol):
    """Records everything that a replay needs, in order, under the lock. Only `mark` may raise."""

    def arrival(self, time: float, worker: int, push: Push, receipt: Receipt) -> None: ...

    def membership(self, worker: int, event: str, pushes: int, seat: Seat, why: str = "") -> None: ...

    def change(self, time: float, change: Change) -> None: ...

    def rows(self, time: float, change: RowsChange) -> None: ...

    def flush(self) -> None: ...

    def mark(self) -> dict[str, int]:
        """Returns the sizes of its files with every record so far in them. Raises OSError if it cannot write."""
        ...


class NoJournal:
    """Records nothing, for measurements of a service by itself."""

    def arrival(self, time: float, worker: int, push: Push, receipt: Receipt) -> None: ...

    def membership(self, worker: int, event: str, pushes: int, seat: Seat, why: str = "") -> None: ...

    def change(self, time: float, change: Change) -> None: ...

    def rows(self, time: float, change: RowsChange) -> None: ...

    def flush(self) -> None: ...

    def mark(self) -> dict[str, int]:
        return {}


class Checkpointing(Protocol):
    """Says when a checkpoint is due, and writes it. Nothing here is called under the lock, except `due`."""

    def due(self, version: int) -> bool: ...

    def submit(self, state: CheckpointState) -> None:
        """Returns at once."""
        ...

    def write_last(self, state: CheckpointState) -> None:
        """Returns when the state is on the disk, or when it is clear that it cannot be written."""
        ...


class NoCheckpoints:
    def due(self, version: int) -> bool:
        return False

    def submit(self, state: CheckpointState) -> None: ...

    def write_last(self, state: CheckpointState) -> None: ...
