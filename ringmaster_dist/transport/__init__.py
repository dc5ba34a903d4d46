"""The connection between workers and their server: torch RPC behind one public TLS port.

`Client` (client.py) is a worker's end and `Host` (host.py) is the server's end. The exceptions below are what a caller
of either end has to handle. Each one says what the caller should do.
"""

from __future__ import annotations


class Unreachable(Exception):
    """The server cannot be reached at the moment. A retry may help."""


class Incompatible(Exception):
    """The server was reached, but one end does not understand the other's bytes. A retry does not help."""


class AuthenticationFailed(Exception):
    """One end does not trust the other: a wrong token, another program, or a missing library. The user must act."""
