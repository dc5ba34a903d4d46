"""Small things about files that several rooms need."""

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
    """A file, or the names in a folder: what comes after this call does not overtake it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_private(path: Path, mode: str, buffering: int = -1) -> IO[Any]:
    """`open` for a file that is its owner's alone, also if it was there before."""

    def opener(name: str, flags: int) -> int:
        descriptor = os.open(name, flags, 0o600)
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
    """One process at a time; the others wait. The file stays."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
