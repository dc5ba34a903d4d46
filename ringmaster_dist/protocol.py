"""The words a worker and the server exchange. Values only; nothing here decides anything."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

import torch


class Verdict(str, Enum):
    """What became of a pushed gradient. Every push gets exactly one."""

    ACCEPTED = "accepted"  # its delay was below the threshold: it is, or will be, part of an update
    STALE = "stale"  # its delay had reached the threshold: discarded, the worker continues from the newest
    INVALID = "invalid"  # it could not have been a gradient of this run: refused, nothing changed


class Snapshot(NamedTuple):
    """An iterate, named by version and term. Immutable: the tensor is never written again once it is in a snapshot."""

    version: int
    iterate: torch.Tensor
    term: int = 0  # which start of the server it comes from


class Receipt(NamedTuple):
    """The server's answer to a push."""

    verdict: Verdict
    delay: int  # version - gradient_version at arrival (for a lost line of history: since the last version shared)
    version: int  # the server's version at arrival, before any update this push caused
    continue_at: int  # the worker goes on from the first snapshot of at least this version
    reason: str = ""  # why, when the verdict is invalid


# Programs that speak different versions of these words refuse each other.
PROTOCOL_VERSION = 2
_MOST = 2**62  # of anything that is counted
_SHORTEST_SECONDS, _LONGEST_SECONDS = 1e-9, 1e9  # rates and their sums stay finite


class JoinRequest(NamedTuple):
    """What a worker says of itself."""

    protocol_version: int
    token: str  # the run's secret
    slot: int  # which place of the delay profile it paces itself by; -1: its own id

    def is_well_formed(self) -> bool:
        """Whether its parts are what they should be; a peer may send anything."""
        words = type(self.token) is str and self.token.isascii()
        return words and type(self.protocol_version) is int and type(self.slot) is int


class Welcome(NamedTuple):
    """The answer to a join. Without a session the reason says why there is none."""

    session: str  # names the worker in all later calls; empty: refused, or the run is over
    reason: str
    ended: bool
    worker_id: int
    config: str  # the resolved run configuration, YAML
    fingerprint: str  # of the model's parameters and the data
    snapshot: Snapshot | None


class Interruptions(NamedTuple):
    """What a worker has stopped early so far."""

    num: int = 0
    seconds: float = 0.0  # spent on it

    def is_well_formed(self) -> bool:
        return _is_count(self.num) and _is_duration(self.seconds)


class Push(NamedTuple):
    """A finished gradient."""

    sequence: int
    gradient_version: int
    gradient: torch.Tensor
    loss: float
    compute_seconds: float
    term: int = 0  # of the snapshot it was computed at

    def is_well_formed(self) -> bool:
        return (
            all(_is_count(number) for number in (self.sequence, self.gradient_version, self.term))
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
    """The answer to a push or a fetch. Without a receipt and a snapshot the run is over, or the worker unknown."""

    receipt: Receipt | None
    snapshot: Snapshot | None
    ended: bool = False
    unknown: bool = False  # the session is not (or no longer) one of this server: join again
    evicted: str = ""  # why this worker is not wanted any more


class Staleness(str, Enum):
    """The answer to a long poll about work in progress."""

    STALE = "stale"  # it cannot be accepted any more
    AGAIN = "again"  # not yet: ask again
    ENDED = "ended"  # the run is over
    UNKNOWN = "unknown"  # the session is not one of this server
