"""What commonly breaks a cluster, looked at one by one."""

from __future__ import annotations

from typing import NamedTuple


class Finding(NamedTuple):
    """One thing that was looked at. What is not ok says what to do."""

    what: str
    ok: bool | None  # None: it depends on what is planned
    text: str
