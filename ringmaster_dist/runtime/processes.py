"""The processes of one machine: how each is started, restarted, asked to stop and ended.

Each is its own failure domain. They are forked from multiprocessing's fork server, which has imported torch once, so
that a start takes a fraction of a second.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.context import ForkServerProcess
from typing import Any, NoReturn

from ringmaster_dist.signals import start_fork_server

TICK_SECONDS = 0.05  # how often a supervisor looks at its processes
MISTAKE = 2  # the exit code for a user's mistake, which a restart does not repair
_RESTART_SECONDS = 0.5
_QUICK_DEATH_SECONDS, _MOST_QUICK_DEATHS = 10.0, 3
# The fork server imports these. It ignores a name that it cannot import, so a test checks them.
PRELOADED = ["ringmaster_dist.runtime.fork_server", "ringmaster_dist.runtime.server_process",
              "ringmaster_dist.transport.client", "ringmaster_dist.transport.host",
              "ringmaster_dist.worker.process"]  # fmt: skip


def prepare_fork_server() -> None:
    """Starts the fork server, which imports torch once for all processes. Call it before the first process is started.

    It does not wait for the imports. A process that imports torch itself calls it before that, so that both happen at
    the same time.
    """
    os.environ["OMP_NUM_THREADS"] = "1"  # several processes share this machine
    os.environ.setdefault("PYTHONSAFEPATH", "1")  # a file in the current folder is not imported by accident
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    start_fork_server()


class SupervisedProcess:
    """A process that is restarted when it dies. It is given up when restarting does not help."""

    def __init__(
        self, name: str, target: Callable[..., None], *arguments: Any, most_restarts: int | None = None
    ) -> None:
        """``target(name, *arguments)`` runs in the process.

        Without ``most_restarts`` the process is given up after three quick failures in a row. With it, the process is
        given up after that many restarts, or at once after a user's mistake.
        """
        self.name = name
        self.process: ForkServerProcess | None = None  # None before a start and between a death and the restart
        self.given_up = False
        self.last_code: int | None = None
        self._restarts_left = most_restarts
        self._target, self._arguments = target, arguments
        self._start_at = self._started_at = 0.0
        self._quick_deaths = 0

    @property
    def exit_code(self) -> int | None:
        """None while the process runs or is about to start."""
        return None if self.process is None else self.process.exitcode

    @property
    def pid(self) -> int | None:
        """None while the process does not run."""
        return self.process.pid if self.process is not None and self.process.exitcode is None else None

    @property
    def has_ended(self) -> bool:
        """True after exit code 0, and when the process was given up."""
        return self.given_up or self.exit_code == 0

    def keep_running(self) -> None:
        """Starts the process when a start is due, and plans a restart when it has died. Call it often."""
        now, code = time.monotonic(), self.exit_code
        if self.process is None and now >= self._start_at and not self.given_up:
            process = multiprocessing.get_context("forkserver").Process(
                target=self._target, args=(self.name, *self._arguments)
            )
            process.start()  # the first start waits for the imports of the fork server
            self.process, self._started_at = process, time.monotonic()
        elif code is not None and code != 0:
            consequence = self._judge_death(code, now)
            what = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
            print(f"{self.name} {what}: {consequence}", file=sys.stderr)
            self.process, self._start_at, self.last_code = None, now + _RESTART_SECONDS, code

    def _judge_death(self, code: int, now: float) -> str:
        """Decides whether the process is given up. Returns what happens next, in words."""
        # A signal comes from outside and does not count. A process that fails by itself right after each start does.
        own_fault = code > 0 and now - self._started_at < _QUICK_DEATH_SECONDS
        self._quick_deaths = self._quick_deaths + 1 if own_fault else 0
        self.given_up = self._quick_deaths >= _MOST_QUICK_DEATHS
        reason = f"it failed {self._quick_deaths} times right after its start and is not restarted"
        if self._restarts_left is not None:
            self.given_up = code == MISTAKE or not self._restarts_left
            reason = "a mistake is not retried" if code == MISTAKE else "no restarts are left"
            self._restarts_left -= 1
        return reason if self.given_up else "starting it again"

    def terminate(self) -> None:
        """Sends SIGTERM if the process runs."""
        if self.process is not None and self.process.exitcode is None:
            self.process.terminate()


def finish(processes: Sequence[SupervisedProcess], seconds: float) -> None:
    """Leaves no process behind. Waits up to ``seconds`` for all of them, then kills the rest."""
    deadline = time.monotonic() + seconds
    for process in [each.process for each in processes if each.process]:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.exitcode is None:
            process.kill()
            process.join()


def become(name: str) -> None:
    """Gives the process a session of its own, so that Ctrl+C reaches only the supervisor, and a name for ps."""
    os.setsid()
    with open("/proc/self/comm", "w") as comm:
        comm.write(name)


def leave(code: int) -> NoReturn:
    """Exits without the interpreter's shutdown, in which TensorPipe's threads may hang."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
