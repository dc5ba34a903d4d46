"""Writes checkpoints while training continues."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from pathlib import Path

from ringmaster_dist.runtime.journal import Journal
from ringmaster_dist.server.checkpoints import Checkpoints, CheckpointState
from ringmaster_dist.server.core import ServerCore

log = logging.getLogger(__name__)


class CheckpointWriter:
    """Writes checkpoints in a thread of its own, one at a time, while training continues."""

    def __init__(self, checkpoints: Checkpoints, journal: Journal, every: int | None, core: ServerCore) -> None:
        self._checkpoints, self._journal, self._core = checkpoints, journal, core
        self._every = every or math.inf
        self._next: float = core.version + self._every
        self._thread: threading.Thread | None = None
        # Called after each, in the thread that has written it.
        self.on_written: Callable[[Path, CheckpointState], None] = lambda path, state: None

    def due(self, version: int) -> bool:
        return version >= self._next and not (self._thread and self._thread.is_alive())

    def submit(self, state: CheckpointState) -> None:
        self._next = state.core.version + self._every
        self._thread = threading.Thread(target=self.write, args=(state,), name="checkpoint")
        self._thread.start()

    def write(self, state: CheckpointState) -> None:
        """If the disk refuses it, this checkpoint is lost and the run continues."""
        version = state.core.version
        try:
            self._journal.sync()
            path = self._checkpoints.save(state, self._core.term)
        except OSError as error:
            log.warning("server v=%d: THE CHECKPOINT WAS NOT WRITTEN: %s; training continues", version, error)
            return
        self.on_written(path, state)

    def write_last(self, state: CheckpointState) -> None:
        """Waits for the checkpoint that is being written, then writes this one."""
        if self._thread is not None:
            self._thread.join()
        self.write(state)
