"""The SHA-256 of source files, so that a start does not read a large corpus only to see that it has not changed.

The cache has a ledger, which is a JSON file with the size, the time of change and the SHA-256 of each file. A file
whose size and time are those of the ledger is not read again. `Digests.verify` reads it all the same. Several processes
may use a ledger at once.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ringmaster_dist.files import locked, sha256_of

_YOUNG_SECONDS = 2.0  # a file this young may change again without a new time of change, so it is not entered


class _Entry(NamedTuple):
    size: int
    changed_ns: int
    sha256: str


class Digests:
    """The ledger of one cache folder."""

    def __init__(self, cache: Path) -> None:
        self._file = cache / "sources.json"

    def of(self, path: Path) -> str:
        return self.of_all([path])[0]

    def of_all(self, paths: Sequence[Path]) -> list[str]:
        known, new, found = self._read(), {}, []
        for path in paths:
            name, status = str(path.resolve()), path.stat()
            entry = known.get(name)
            if entry is None or entry[:2] != (status.st_size, status.st_mtime_ns):
                entry = _Entry(status.st_size, status.st_mtime_ns, sha256_of(path))
                if time.time() - status.st_mtime > _YOUNG_SECONDS:
                    new[name] = entry
            found.append(entry.sha256)
        if new:
            self._enter(new)
        return found

    def verify(self, paths: Iterable[Path]) -> list[Path]:
        """Reads every file. Returns those that have changed without a new size or time, and corrects the ledger."""
        known, changed, new = self._read(), [], {}
        for path in paths:
            name, status = str(path.resolve()), path.stat()
            entry = _Entry(status.st_size, status.st_mtime_ns, sha256_of(path))
            before = known.get(name)
            if before is not None and before[:2] == entry[:2] and before.sha256 != entry.sha256:
                changed.append(path)
                new[name] = entry
        if new:
            self._enter(new)
        return changed

    def _read(self) -> dict[str, _Entry]:
        try:
            return {name: _Entry(*entry) for name, entry in json.loads(self._file.read_text()).items()}
        except (OSError, ValueError, TypeError, AttributeError):
            return {}  # there is none, or it is damaged: the files are read again

    def _enter(self, new: dict[str, _Entry]) -> None:
        with suppress(OSError):  # a cache that cannot be written is used all the same
            self._file.parent.mkdir(0o755, parents=True, exist_ok=True)
            with locked(self._file.with_name(".sources.lock")):
                temporary = self._file.with_name(f".sources-{os.getpid()}.json")
                temporary.write_text(json.dumps(self._read() | new))
                temporary.replace(self._file)
