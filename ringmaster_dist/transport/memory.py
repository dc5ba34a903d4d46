"""How the C library keeps memory. Most of the cost of a big message is fresh pages: every page of it is a fault.

A worker keeps what it has had: freed memory is not given back to the system but used again. A server must not: its big
blocks are asked for by several threads with small ones between them, and a heap of such blocks grows by the holes that
the next block just does not fit. There each big block is a mapping of its own, given back when it is freed, and made of
huge pages where the system has them (see quiet.py), so that there are few faults to pay.
"""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -3, -4, -8  # glibc's malloc.h
_LARGE_BYTES = 1 << 20


def keep_memory() -> None:
    """For a worker's process, from now on."""
    _mallopt({_MMAP_MAX: 0, _ARENA_MAX: 1, _TRIM_THRESHOLD: 2**31 - 1})


def return_memory() -> None:
    """For a server's process, from now on."""
    _mallopt({_MMAP_THRESHOLD: _LARGE_BYTES, _ARENA_MAX: 2})


def _mallopt(settings: dict[int, int]) -> None:
    """Does nothing where the C library is not glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform.startswith("linux") else None
    for parameter, value in settings.items() if mallopt is not None else ():
        mallopt(parameter, value)
