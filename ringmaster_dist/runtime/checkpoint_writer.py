"""Writes checkpoints in a thread of its own, one at a time, while training continues."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ringmaster_dist.runtime.journal import Journal
from ringmaster_dist.server.checkpoints import Checkpoints
from ringmaster_dist.server.core import ServerCore

log = logging.getLogger(__name__)


class CheckpointWriter:
    """Writes checkpoints in a thread of its own, one at a time, while training continues."""

    def __init__(self, checkpoints: Checkpoints, journal: Journal, every: int | None, core: ServerCore) -> None:
        self._checkpoints, self._journal, self._core = checkpoints, journal, core
        self._every = every or math.inf
        self._next: float = core.version + self._every
        self._thread: threading.Thread | None = None
        self.on_written: Callable[[Path], None] = lambda path: None  # told of each

    def due(self, version: int) -> bool:
        return version >= self._next and not (self._thread and self._thread.is_alive())

    def submit(self, state: dict[str, Any]) -> None:
        self._next = state["version"] + self._every
        self._thread = threading.Thread(target=self.write, args=(state,), name="checkpoint")
        self._thread.start()

    def write(self, state: dict[str, Any]) -> None:
        """A disk that does not take it costs this checkpoint, not the run."""
        version = state["version"]
        try:
            self._journal.sync()
            path = self._checkpoints.save(state, term=self._core.term, pushes=sum(state["counters"]), version=version)
        except OSError as error:
            log.warning("server v=%d: THE CHECKPOINT WAS NOT WRITTEN: %s; training goes on", version, error)
            return
        self.on_written(path)

    def write_last(self, state: dict[str, Any]) -> None:
        """After the one that is being written."""
        if self._thread is not None:
            self._thread.join()
        self.write(state)
