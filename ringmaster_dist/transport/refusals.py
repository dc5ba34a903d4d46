"""Tells of refused peers without letting them fill the log: the first at once, then a count every so often."""

from __future__ import annotations

import logging
import time
from collections import Counter

_QUIET_SECONDS = 10.0


class Refusals:
    """Used by one thread."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self.total = 0
        self._untold: Counter[tuple[str, str]] = Counter()  # by address and reason
        self._quiet_until = 0.0

    def add(self, address: str, reason: str) -> None:
        self.total += 1
        if len(self._untold) < 1000:
            self._untold[address, reason] += 1
        self.report()

    def report(self) -> None:
        """Writes a line if there is something to tell and the last line is long enough ago."""
        now = time.monotonic()
        if not self._untold or now < self._quiet_until:
            return
        self._quiet_until = now + _QUIET_SECONDS
        count = sum(self._untold.values())
        (address, reason), most = self._untold.most_common(1)[0]
        others = f" and {count - 1:,} more, {most:,} of them like it" if count > 1 else ""
        self._log.warning("server: refused a peer at %s%s: %s (%d in all)", address, others, reason, self.total)
        self._untold.clear()
