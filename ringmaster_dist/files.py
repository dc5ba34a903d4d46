"""File operations that several packages need."""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

_CHUNK_BYTES = 1 << 20


def to_disk(path: Path) -> None:
    """fsync of a file or a folder: its content, or its names, are on disk when this returns."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_private(path: Path, mode: str, buffering: int = -1) -> IO[Any]:
    """`open` for a file that only its owner may read and write. An existing file gets these rights too.

    Raises OSError for a link, because it may lead to a file of another purpose.
    """

    def opener(name: str, flags: int) -> int:
        descriptor = os.open(name, flags | os.O_NOFOLLOW, 0o600)
        os.fchmod(descriptor, 0o600)
        return descriptor

    return open(path, mode, buffering=buffering, opener=opener)


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds an exclusive lock on the file: one process enters, and the others wait. The file is not removed."""
    with open_private(path, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
