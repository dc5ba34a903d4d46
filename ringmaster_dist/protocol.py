"""The messages between a worker and the server. They are values, and nothing here decides anything.

Readers of run files need the verdict and no tensor. So importing this module does not import torch, which takes
seconds.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
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

    def is_well_formed(self) -> bool:
        numbers = (self.delay, self.version, self.continue_at)
        return isinstance(self.verdict, Verdict) and all(map(_is_count, numbers)) and type(self.reason) is str


# Programs with different versions of these messages refuse each other.
PROTOCOL_VERSION = 5
_MOST = 2**62  # of anything that is counted
_MOST_DEVICES, _LONGEST_WORD = 128, 100  # of one worker's machine, and of their names and titles
_SHORTEST_SECONDS, _LONGEST_SECONDS = 1e-9, 1e9  # rates and their sums stay finite


def as_word(text: str) -> str:
    """A name that a message may have. Characters that are not allowed become question marks."""
    return "".join(c if c.isascii() and c.isprintable() else "?" for c in text)[:_LONGEST_WORD]


def _is_word(word: object) -> bool:
    return type(word) is str and len(word) <= _LONGEST_WORD and word.isascii() and word.isprintable()


class Device(NamedTuple):
    """What a worker computes on. Both are empty if that is not known."""

    name: str = ""  # as torch names it, such as cuda:0
    title: str = ""  # the product, such as NVIDIA H100

    @classmethod
    def described(cls, name: str, title: str) -> Device:
        """The device in words that `is_well_formed` accepts."""
        return cls(name, as_word(title))

    def is_well_formed(self) -> bool:
        return all(map(_is_word, self))

    def __str__(self) -> str:
        return f"{self.name} ({self.title})" if self.title.lower() != self.name else self.name


class Seat(NamedTuple):
    """What the server knows of a worker from its join."""

    slot: int  # its place in the delay profile
    device: Device = Device()
    ranks: int = 1  # the number of processes that compute one gradient
    host: str = ""  # the name of its machine


class JoinRequest(NamedTuple):
    """What a worker sends to join."""

    protocol_version: int
    token: str  # the run's secret
    slot: int  # its place in the delay profile; -1 stands for its own id
    devices: tuple[Device, ...] = ()  # it computes on one of these, see `seat`
    ranks: int = 1  # the number of processes that compute one gradient of this worker
    host: str = ""  # the name of its machine

    def is_well_formed(self) -> bool:
        """Whether every field has its type. A peer may send anything."""
        words = type(self.token) is str and self.token.isascii()
        numbers = type(self.protocol_version) is type(self.slot) is type(self.ranks) is int
        return words and numbers and _is_word(self.host) and _are_devices(self.devices)

    def seat(self, worker: int) -> Seat:
        """Workers take the devices of a machine in turn, by their slots."""
        slot = self.slot if self.slot >= 0 else worker
        device = self.devices[slot % len(self.devices)] if self.devices else Device()
        return Seat(slot, device, self.ranks, self.host)


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

    def is_well_formed(self) -> bool:
        """Whether every field has its type. A worker trusts the server's words no more than the server trusts its."""
        words = (self.session, self.reason, self.config, self.fingerprint)
        return (
            all(type(word) is str for word in words)
            and all(map(_is_count, (self.worker_id, self.rows)))
            and type(self.ended) is bool
            and (self.snapshot is None or _is_snapshot(self.snapshot))
        )


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
    interruptions: Interruptions = Interruptions()  # of this worker so far

    def is_well_formed(self) -> bool:
        import torch

        return (
            all(_is_count(number) for number in (self.sequence, self.gradient_version, self.term, self.rows))
            and type(self.loss) is float
            and _is_duration(self.compute_seconds)
            and (self.compute_seconds == 0.0 or self.compute_seconds >= _SHORTEST_SECONDS)
            and isinstance(self.gradient, torch.Tensor)
            and isinstance(self.interruptions, Interruptions)
            and self.interruptions.is_well_formed()
        )


def _are_devices(given: object) -> bool:
    if type(given) is not tuple or len(given) > _MOST_DEVICES:
        return False
    return all(isinstance(device, Device) and device.is_well_formed() for device in given)


def _is_snapshot(given: object) -> bool:
    import torch

    good = isinstance(given, Snapshot) and isinstance(given.iterate, torch.Tensor) and given.iterate.dim() == 1
    return good and _is_count(given.version) and _is_count(given.term)  # type: ignore[attr-defined]


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

    def is_well_formed(self) -> bool:
        receipt = self.receipt
        return (
            (self.snapshot is None or _is_snapshot(self.snapshot))
            and (receipt is None or (isinstance(receipt, Receipt) and receipt.is_well_formed()))
            and type(self.ended) is type(self.unknown) is bool
            and type(self.evicted) is str
            and _is_count(self.rows)
        )

    @property
    def ends_membership(self) -> bool:
        return self.ended or self.unknown or bool(self.evicted)


class Staleness(str, Enum):
    """The answer to a long poll about work in progress."""

    STALE = "stale"  # it cannot be accepted any more
    AGAIN = "again"  # it may still be accepted: ask again
    ENDED = "ended"  # the run is over
    UNKNOWN = "unknown"  # this server does not know the session


class Handlers(Protocol):
    """What the server implements. RPC threads call it, several at once. It must not raise."""

    def join(self, request: JoinRequest) -> torch.futures.Future[Welcome]: ...

    def fetch(self, session: str, term: int, known_version: int, interruptions: Interruptions) -> Reply: ...

    def push(self, session: str, push: Push) -> torch.futures.Future[Reply]: ...

    def await_stale(self, session: str, term: int, version: int) -> torch.futures.Future[Staleness]: ...

    def leave(self, session: str) -> None: ...
