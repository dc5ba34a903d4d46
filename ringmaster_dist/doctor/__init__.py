"""Checks of what commonly breaks a cluster, on this machine and towards a server."""

from __future__ import annotations

from typing import NamedTuple


class Finding(NamedTuple):
    """The result of one check. If it is not ok, the text says what to do."""

    what: str
    ok: bool | None  # None if it depends on what is planned
    text: str
