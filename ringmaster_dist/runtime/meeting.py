"""How the ranks of one torchrun on one machine find the server that rank 0 has started: through a file of the user's.

Not through torchrun's own store, which anybody who reaches its port can read and write. The file is named after the
torchrun process, the parent of all ranks, so it outlives ranks that torchrun starts again, and tells rank 0 then which
run it had begun. Nobody but its owner can read it: the token is in it.
"""

from __future__ import annotations

import json
import os
import stat
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ringmaster_dist.config.errors import UserError

_LOOK_SECONDS = 0.05


class Meeting:
    """`publish` by rank 0, `find` by the others."""

    def __init__(self, folder: Path | None = None) -> None:
        folder = folder or Path(tempfile.gettempdir()) / f"ringmaster-{os.getuid()}"
        _make_private(folder)
        parent = os.getppid()
        started = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]  # process ids are used again
        self._path = folder / f"torchrun-{parent}-{started}.json"
        for other in folder.glob("torchrun-*.json"):  # of a torchrun that has ended
            if not Path(f"/proc/{other.name.split('-')[1]}").exists():
                other.unlink(missing_ok=True)

    def publish(self, facts: Mapping[str, Any]) -> None:
        """Adds to what is known."""
        temporary = self._path.with_suffix(".new")
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump({**self.known(), **facts}, file)
        temporary.replace(self._path)

    def known(self) -> dict[str, Any]:
        """What has been published so far."""
        try:
            facts: dict[str, Any] = json.loads(self._path.read_text())
        except FileNotFoundError:
            return {}
        return facts

    def find(self, key: str) -> Any:
        """Waits until it is published, for as long as torchrun lives: it ends its ranks when one has failed."""
        while key not in (facts := self.known()):
            time.sleep(_LOOK_SECONDS)
        return facts[key]


def _make_private(folder: Path) -> None:
    """Raises UserError if another user has put something in its place."""
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise UserError(f"{folder} is not a folder of yours alone: remove it, or set TMPDIR to another place")
