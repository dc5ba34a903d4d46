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
    """An iterate and its version. Immutable: the tensor is never written again once it is in a snapshot."""

    version: int
    iterate: torch.Tensor


class Receipt(NamedTuple):
    """The server's answer to a push."""

    verdict: Verdict
    delay: int  # version - gradient_version at arrival
    version: int  # the server's version at arrival, before any update this push caused
    continue_at: int  # the worker goes on from the first snapshot of at least this version
    reason: str = ""  # why, when the verdict is invalid
