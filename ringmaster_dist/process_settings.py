"""Settings of a process: torch's environment, allocator, garbage collection, descriptors, name. Never imports torch.

Fresh pages are most of the cost of a big message, because every page of it is a page fault. A worker therefore keeps
freed memory and uses it again. A server must not: several of its threads allocate big blocks with small ones between
them, and such a heap fragments and grows. A server gives each big block a mapping of its own, which is returned to the
system when it is freed. Huge pages, where the system has them, keep the page faults few.
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -3, -4, -8  # glibc's malloc.h
_LARGE_BYTES = 1 << 20
_MOST_DESCRIPTORS = 1 << 20
_NEW_OBJECTS = 50_000  # between two searches for reference cycles during imports
_USUAL_OBJECTS = gc.get_threshold()  # Python's default, 700 or 2,000 of the youngest


def prepare_environment() -> None:
    """Sets what torch reads from the environment. Call it before torch is imported. The user's own values stay."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # c10d writes C++ stack traces at every failed connection
    os.environ.setdefault("TORCH_SHOW_CPP_STACKTRACES", "0")
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # huge pages for big tensors
    # OpenMP's threads sleep between two operations. If they spin, processes that share the cores stop each other.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def search_garbage_seldom() -> None:
    """Makes imports quicker. Those of torch make a million objects that stay, and searches among them take long."""
    gc.set_threshold(_NEW_OBJECTS)


def _search_garbage_as_usual() -> None:
    """For a process that runs long: a reference cycle may hold big tensors. What was imported is not searched again."""
    gc.freeze()
    gc.set_threshold(*_USUAL_OBJECTS)


def keep_memory() -> None:
    """A worker's process keeps freed memory from now on."""
    _search_garbage_as_usual()
    _mallopt({_MMAP_MAX: 0, _ARENA_MAX: 1, _TRIM_THRESHOLD: 2**31 - 1})


def return_memory() -> None:
    """A server's process returns freed big blocks to the system from now on."""
    _search_garbage_as_usual()
    _mallopt({_MMAP_THRESHOLD: _LARGE_BYTES, _ARENA_MAX: 2})


def _mallopt(settings: dict[int, int]) -> None:
    """Does nothing where the C library is not glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform.startswith("linux") else None
    if mallopt is not None:
        for parameter, value in settings.items():
            mallopt(parameter, value)


def raise_descriptor_limit() -> int:
    """Allows this process as many file descriptors as it may have, and returns their number."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return limit


def name_process(name: str) -> None:
    """The name of this process in ps and top."""
    with open("/proc/self/comm", "w") as comm:
        comm.write(name)
