"""What can go wrong between a worker and its server, by what the caller should do about it."""

from __future__ import annotations


class Unreachable(Exception):
    """The server cannot be reached at the moment; trying again may help."""


class Misunderstood(Exception):
    """The server was reached and could not understand the call, or its bytes are not torch's: a retry will not help."""


class Mistrusted(Exception):
    """The two ends do not trust each other: a wrong token, another program, a missing library. The user must act."""
