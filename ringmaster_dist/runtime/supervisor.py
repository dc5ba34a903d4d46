"""Starts the server and the workers of one machine, and restarts each of them when it dies."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from ringmaster_dist.config.build import cache_folder
from ringmaster_dist.config.errors import exit_code_of
from ringmaster_dist.config.schema import Config
from ringmaster_dist.devices import in_turn
from ringmaster_dist.logs import set_up_logging
from ringmaster_dist.observe.run_directory import RunDirectory
from ringmaster_dist.runtime.placement import local_workers
from ringmaster_dist.runtime.processes import (
    MISTAKE,
    TICK_SECONDS,
    SupervisedProcess,
    become,
    finish,
    leave,
    prepare_fork_server,
)
from ringmaster_dist.signals import StopRequest, raise_when_stopped, stop_signals

_SLOW_START_SECONDS = 30.0
_LAST_SECONDS = 2.0  # for workers, after their server has ended


def work_at(name: str, address: str, token: str, slot: int, arguments: dict[str, Any]) -> None:
    """The body of a worker's process."""
    from ringmaster_dist.worker.process import work

    become(name)
    set_up_logging()
    leave(work(address, token, slot=slot, **arguments))


def _serve(name: str, directory: str) -> None:
    """The body of the server's process."""
    from ringmaster_dist.runtime.server_process import serve_directory

    become(name)
    leave(exit_code_of(lambda: serve_directory(directory)))


def supervise(
    config: Config,
    directory: RunDirectory,
    look: Callable[[], None] = lambda: None,
    *,
    work: Callable[..., None] = work_at,
    watch: Callable[[SupervisedProcess, list[SupervisedProcess]], None] = lambda server, workers: None,
) -> int:
    """Runs the server and the workers. Returns the exit code of the run, 130 or 143 if a signal has stopped it.

    It ends when the server has ended, a stop signal arrives, or every worker was given up.

    ``look`` is called many times a second, to show the progress. ``watch`` is called as often, with the server and the
    workers.
    """
    os.environ["RINGMASTER_CACHE"] = str(cache_folder(config))  # for the workers, which do not take it from a server
    prepare_fork_server()
    server = SupervisedProcess("server", _serve, str(directory.path))
    workers: list[SupervisedProcess] = []
    failure = ""
    try:
        server.keep_running()  # it waits for the imports of the fork server, and a signal raises meanwhile
        with stop_signals() as asked:
            if not _has_an_address(server, directory, asked):
                return asked.exit_code or server.exit_code or 1
            where = f"@{directory.path.resolve() / 'address'}"  # a restarted server may listen elsewhere
            token = directory.read("token")
            workers = [
                SupervisedProcess(f"worker-slot-{slot}", work, where, token, slot, worker_arguments(config, slot))
                for slot in range(local_workers(config))
            ]
            while not (asked() or failure or server.exit_code in (0, MISTAKE)):
                for process in (server, *workers):
                    if not asked():
                        process.keep_running()
                if server.given_up:
                    failure = "the server failed each time it was started"
                elif workers and all(worker.given_up for worker in workers):
                    failure = "every worker failed as soon as it had started"
                look()
                watch(server, workers)
                time.sleep(TICK_SECONDS)
    finally:
        server.terminate()  # it ends the run: it dismisses the workers and writes the results
        # The server waits for the workers that have joined. The other workers are not needed any more.
        copying = config.checkpoint.mirror_seconds if config.checkpoint.mirror else 0.0
        finish([server], 2 * config.server.farewell_seconds + config.logger.finish_seconds + copying)
        finish(workers, _LAST_SECONDS)
    if failure:
        print(f"ringmaster: {failure}: the run was ended; the errors are printed above", file=sys.stderr)
        return 1
    # None: the server had died and was not restarted yet. It had not begun to serve if the signal has ended it.
    if asked() and server.exit_code in (None, 0, -signal.SIGTERM):
        return asked.exit_code
    return 1 if server.exit_code is None else server.exit_code


def _has_an_address(server: SupervisedProcess, directory: RunDirectory, asked: StopRequest) -> bool:
    """Waits until the run directory has the server's address. False if the server ends first, or a stop signal arrives.

    A resumed run has the address of its last server, so there is nothing to wait for.
    """
    warn_at = time.monotonic() + _SLOW_START_SECONDS
    while not directory.read("address"):
        if server.exit_code is not None or asked():
            return False
        if time.monotonic() > warn_at:
            warn_at = math.inf
            print(
                f"the server is not ready after {_SLOW_START_SECONDS:.0f} s: still waiting, Ctrl+C ends it",
                file=sys.stderr,
            )
        time.sleep(TICK_SECONDS)
    return True


def worker_arguments(config: Config, slot: int) -> dict[str, Any]:
    """How a worker connects, how long it waits, where it computes, and which user code it may import."""
    names = ("tls", "insecure", "connect_seconds", "call_seconds", "patience_seconds")
    code = config.problem.target or config.problem.path or ""
    own = {"target": code, "device": in_turn(config.cluster.devices or (), slot)}
    return {**own, **{name: getattr(config.server, name) for name in names}}


def supervise_workers(
    server: str, token: str, keywords: dict[str, Any], workers: int, restarts: int, devices: Sequence[str]
) -> int:
    """Runs workers of a server elsewhere until all have ended. They take the devices in turn, or any if none is given.

    Returns the worst exit code, or 130 or 143 if a signal has stopped them.
    """
    prepare_fork_server()
    processes = [
        SupervisedProcess(
            f"worker-{index}", _work_elsewhere, index, server, token, keywords, devices, most_restarts=restarts
        )
        for index in range(workers)
    ]
    try:
        processes[0].keep_running()  # it waits for the imports of the fork server, and a signal raises meanwhile
        with stop_signals() as asked:
            while not asked() and not all(process.has_ended for process in processes):
                for process in processes:
                    if not (process.has_ended or asked()):
                        process.keep_running()
                time.sleep(TICK_SECONDS)
    finally:
        for process in processes:
            process.terminate()
        finish(processes, _LAST_SECONDS)
    return asked.exit_code or max(process.last_code or 0 for process in processes)


def _work_elsewhere(
    name: str, index: int, server: str, token: str, keywords: dict[str, Any], devices: Sequence[str]
) -> None:
    """The body of a worker's process whose server is on another machine."""
    from ringmaster_dist.worker.process import work
    from ringmaster_dist.worker.talk import Talk

    become(name)
    raise_when_stopped()  # it leaves the run before it ends
    set_up_logging()
    os.environ["LOCAL_RANK"] = str(index)  # chooses the accelerator of this worker, if device= was not given
    leave(work(server, token, device=in_turn(devices, index), talk=Talk(silent=False), **keywords))
