"""Processes that play many runs in virtual time at once."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing.context import ForkServerContext

from ringmaster_dist.signals import start_fork_server


@contextmanager
def processes(number: int, context: ForkServerContext | None = None) -> Iterator[Executor]:
    """Processes with one thread each, which start with the first job.

    After an error, Ctrl+C or SIGTERM they end at once, in the middle of a job.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    start_fork_server()
    with ProcessPoolExecutor(number, mp_context=context or multiprocessing.get_context("forkserver")) as pool:
        try:
            yield pool
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.terminate()
            raise
