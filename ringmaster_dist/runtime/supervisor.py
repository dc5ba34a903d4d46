"""Starts the server and the workers of one machine, and brings back whichever dies.

Each is a process of its own: what happens to one does not touch the others. They are forked from a helper process
(multiprocessing's fork server) that has imported torch once, so one is there in a fraction of a second, not in seconds.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from typing import Any

from ringmaster_dist.config.errors import exit_code_of
from ringmaster_dist.config.schema import Config
from ringmaster_dist.logs import log_as_told
from ringmaster_dist.observe.run_directory import RunDirectory
from ringmaster_dist.runtime.signals import stop_signals
from ringmaster_dist.transport.process_settings import name_process

_START_SECONDS = 30.0
_TICK_SECONDS = 0.05
_RESTART_SECONDS = 0.5
_LAST_SECONDS = 2.0
_QUICK_DEATH_SECONDS, _MOST_QUICK_DEATHS = 10.0, 3
_MISTAKE = 2  # the exit code of a process that was told something impossible


class Place:
    """A process's place: who is in it, and how its predecessors fared."""

    def __init__(
        self, name: str, target: Callable[..., None], *arguments: Any, most_restarts: int | None = None
    ) -> None:
        """With ``most_restarts``, it is given up after so many, and at once when it has ended with a mistake."""
        self.name = name
        self.last_code: int | None = None
        self._restarts_left = most_restarts
        self.process: ForkServerProcess | None = None
        self.given_up = False  # its processes die by their own fault each time they start
        self._target, self._arguments = target, arguments
        self._start_at = self._started_at = 0.0
        self._quick_deaths = 0

    @property
    def exit_code(self) -> int | None:
        """None while it runs, or is about to."""
        return None if self.process is None else self.process.exitcode

    @property
    def has_ended(self) -> bool:
        """Well, or because it was given up."""
        return self.given_up or self.exit_code == 0

    def tend(self) -> None:
        """Starts the process when it is due; notices when it has died, and brings it back."""
        now, code = time.monotonic(), self.exit_code
        if self.process is None and now >= self._start_at and not self.given_up:
            context = multiprocessing.get_context("forkserver")
            self.process = context.Process(target=self._target, args=(self.name, *self._arguments))
            self.process.start()
            self._started_at = now
        elif code is not None and code != 0:
            # Killed from outside is bad luck; failing by itself, time after time as soon as it starts, is not.
            own_fault = code > 0 and now - self._started_at < _QUICK_DEATH_SECONDS
            self._quick_deaths = self._quick_deaths + 1 if own_fault else 0
            self.given_up, self.last_code = self._quick_deaths >= _MOST_QUICK_DEATHS, code
            what = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
            after = f"it has failed {self._quick_deaths} times at once, its place stays empty"
            if self._restarts_left is not None:
                self.given_up = code == _MISTAKE or not self._restarts_left
                self._restarts_left -= 1
                after = "a mistake is not retried" if code == _MISTAKE else "it was started again often enough"
            print(f"{self.name} {what}: {after if self.given_up else 'starting it again'}", file=sys.stderr)
            self.process, self._start_at = None, now + _RESTART_SECONDS


def work_at(name: str, address: str, token: str, slot: int, arguments: dict[str, Any]) -> None:
    """What a worker's process does."""
    from ringmaster_dist.worker.__main__ import work

    become(name)
    log_as_told()
    leave(work(address, token, slot=slot, **arguments))


def supervise(
    config: Config,
    directory: RunDirectory,
    look: Callable[[], None] = lambda: None,
    *,
    work: Callable[..., None] = work_at,
    watch: Callable[[Place, list[Place]], None] = lambda server, workers: None,
) -> int:
    """Runs the processes until the server has ended by itself. One that dies is started again, alone.

    ``look`` is called every now and then, for whoever shows how it goes; ``watch`` too, with everybody's place.
    """
    prepare_fork_server()
    server = Place("server", _serve, str(directory.path))
    workers: list[Place] = []
    failure = ""
    try:
        with stop_signals() as asked:
            server.tend()
            if not _has_an_address(server, directory, asked):
                if server.process and server.exit_code is None:
                    server.process.terminate()
                return server.exit_code or 1
            where = f"@{directory.path.resolve() / 'address'}"  # a server that is started again may be elsewhere
            workers = [
                Place(f"worker-slot-{slot}", work, where, directory.read("token"), slot, worker_arguments(config))
                for slot in range(local_workers(config))
            ]
            while not (asked() or failure or server.exit_code in (0, _MISTAKE)):
                for place in (server, *workers):
                    place.tend()
                if server.given_up:
                    failure = "the server failed each time it was started"
                elif workers and all(place.given_up for place in workers):
                    failure = "every worker failed as soon as it had started"
                look()
                watch(server, workers)
                time.sleep(_TICK_SECONDS)
            if server.process and server.exit_code is None:
                server.process.terminate()  # it tells the workers, writes what there is, and ends
    finally:
        # The server waits for whoever has joined; who has not, or does not end soon after it, is not needed any more.
        finish([server], 2 * config.server.farewell_seconds + config.logger.finish_seconds)
        finish(workers, _LAST_SECONDS)
    if failure:
        print(f"ringmaster: {failure}: the run was ended; the last words are above", file=sys.stderr)
        return 1
    return 1 if server.exit_code is None else server.exit_code


def prepare_fork_server() -> None:
    """What the processes are forked from imports torch once, for all of them."""
    os.environ["OMP_NUM_THREADS"] = "1"  # several processes share this machine
    os.environ.setdefault("PYTHONSAFEPATH", "1")  # what lies in the current folder is not imported by accident
    multiprocessing.get_context("forkserver").set_forkserver_preload(["ringmaster_dist.runtime.preload"])


def local_workers(config: Config) -> int:
    cluster = config.cluster
    return cluster.workers if cluster.local_workers is None else cluster.local_workers


def worker_arguments(config: Config) -> dict[str, Any]:
    """How a worker connects, how long it waits for what, and which code of the user's it may import."""
    names = ("tls", "connect_seconds", "call_seconds", "patience_seconds")
    return {"target": config.problem.target or "", **{name: getattr(config.server, name) for name in names}}


def _has_an_address(server: Place, directory: RunDirectory, asked: Callable[[], bool]) -> bool:
    """Waits until the server has said where it listens; False if it ends before. A resumed run has said so before."""
    say_at = time.monotonic() + _START_SECONDS
    while not directory.read("address"):
        if server.exit_code is not None or asked():
            return False
        if time.monotonic() > say_at:
            say_at = math.inf
            print(
                f"the server is not ready after {_START_SECONDS:.0f} s: still waiting, Ctrl+C ends it", file=sys.stderr
            )
        time.sleep(_TICK_SECONDS)
    return True


def finish(places: list[Place], seconds: float) -> None:
    """Leaves no process behind: waits a while for each, then ends it."""
    deadline = time.monotonic() + seconds
    for process in [place.process for place in places if place.process]:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.exitcode is None:
            process.kill()
            process.join()


# --- in the children -------------------------------------------------------------------------------------------


def _serve(name: str, directory: str) -> None:
    from ringmaster_dist.runtime.server_process import serve_directory

    become(name)
    leave(exit_code_of(lambda: serve_directory(directory)))


def become(name: str) -> None:
    """A session of its own, so that Ctrl+C in the terminal reaches the supervisor alone; a name for ps and top."""
    os.setsid()
    name_process(name)


def leave(code: int) -> None:
    # Without the interpreter's farewell: TensorPipe's threads may hang in it, and nothing is left to write.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
