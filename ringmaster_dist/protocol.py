"""The messages between a worker and the server. They are values, and nothing here decides anything."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

import torch


class Verdict(str, Enum):
    """The server's decision on a pushed gradient. Every push gets exactly one."""

    ACCEPTED = "accepted"  # its delay was below the threshold: it is, or will be, part of an update
    STALE = "stale"  # its delay had reached the threshold: discarded, the worker continues from the newest
    INVALID = "invalid"  # it cannot be a gradient of this run: refused, and nothing changed


class Snapshot(NamedTuple):
    """An iterate with its version and term. It is immutable: a tensor in a snapshot is never written again."""

    version: int
    iterate: torch.Tensor  # (size,)
    term: int = 0  # the number of the server's start that it comes from


class Receipt(NamedTuple):
    """The server's answer to a push."""

    verdict: Verdict
    delay: int  # version - gradient_version at arrival (for a lost line of history: since the last version shared)
    version: int  # the server's version at arrival, before any update this push caused
    continue_at: int  # the worker continues from the first snapshot of at least this version
    reason: str = ""  # why, when the verdict is invalid


# Programs with different versions of these messages refuse each other.
PROTOCOL_VERSION = 4
_MOST = 2**62  # of anything that is counted
_SHORTEST_SECONDS, _LONGEST_SECONDS = 1e-9, 1e9  # rates and their sums stay finite


class JoinRequest(NamedTuple):
    """What a worker sends to join."""

    protocol_version: int
    token: str  # the run's secret
    slot: int  # its place in the delay profile; -1 stands for its own id

    def is_well_formed(self) -> bool:
        """Whether every field has its type. A peer may send anything."""
        words = type(self.token) is str and self.token.isascii()
        return words and type(self.protocol_version) is int and type(self.slot) is int


class Welcome(NamedTuple):
    """The answer to a join. If there is no session, the reason says why."""

    session: str  # names the worker in all later calls; empty if it is refused or the run is over
    reason: str
    ended: bool
    worker_id: int
    config: str  # the resolved run configuration, YAML
    fingerprint: str  # of the model's parameters and the data
    snapshot: Snapshot | None
    rows: int = 0  # as in `Reply`


class Interruptions(NamedTuple):
    """The work that a worker has stopped early so far."""

    num: int = 0
    seconds: float = 0.0  # spent on it

    def is_well_formed(self) -> bool:
        return _is_count(self.num) and _is_duration(self.seconds)


class Push(NamedTuple):
    """A finished gradient."""

    sequence: int
    gradient_version: int
    gradient: torch.Tensor  # (size,)
    loss: float
    compute_seconds: float
    term: int = 0  # of the snapshot it was computed at
    rows: int = 0  # that it was computed of, if the server assigns rows

    def is_well_formed(self) -> bool:
        return (
            all(_is_count(number) for number in (self.sequence, self.gradient_version, self.term, self.rows))
            and type(self.loss) is float
            and _is_duration(self.compute_seconds)
            and (self.compute_seconds == 0.0 or self.compute_seconds >= _SHORTEST_SECONDS)
            and isinstance(self.gradient, torch.Tensor)
        )


def _is_count(number: object) -> bool:
    return type(number) is int and -_MOST <= number <= _MOST


def _is_duration(number: object) -> bool:
    return type(number) is float and 0.0 <= number <= _LONGEST_SECONDS


class Reply(NamedTuple):
    """The answer to a push or a fetch. Without receipt and snapshot, the run is over or the worker is unknown."""

    receipt: Receipt | None
    snapshot: Snapshot | None
    ended: bool = False
    unknown: bool = False  # this server does not know the session: the worker joins again
    evicted: str = ""  # why the server refuses this worker from now on
    rows: int = 0  # the worker's gradients take this many rows from now on; 0: as the configuration says


class Staleness(str, Enum):
    """The answer to a long poll about work in progress."""

    STALE = "stale"  # it cannot be accepted any more
    AGAIN = "again"  # it may still be accepted: ask again
    ENDED = "ended"  # the run is over
    UNKNOWN = "unknown"  # this server does not know the session
