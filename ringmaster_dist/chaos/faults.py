"""A schedule of faults, and an injector that carries it out against the processes of a run."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from ringmaster_dist.chaos.saboteur import DISCONNECT, NAN

WORKER_KINDS = ("kill", "stop", "disconnect", "nan")
KINDS = (*WORKER_KINDS, "restart")
_STOP_SECONDS = (0.5, 6.0)  # some stops are shorter than a lease, some longer
_QUIET_SHARE = 0.05  # of the time, at the beginning and at the end, so that every fault has its effect in time


class Fault(NamedTuple):
    at_seconds: float
    kind: str
    slot: int  # of the worker; -1 is the server
    lasting_seconds: float = 0.0


class Restart(NamedTuple):
    """The state of the run when the server was killed."""

    version: int  # of the newest line of the trace
    checkpoint: int  # version of the newest checkpoint


def schedule(seed: int, seconds: float, num_workers: int, num_faults: int, num_restarts: int) -> list[Fault]:
    """Faults in order of time. A seed always gives the same ones.

    The kinds of worker faults come equally often, to within one. Restarts are spread evenly.
    """
    dice = random.Random(seed)
    first, last = _QUIET_SHARE * seconds, (1 - _QUIET_SHARE) * seconds
    kinds = [WORKER_KINDS[index % len(WORKER_KINDS)] for index in range(num_faults)]
    dice.shuffle(kinds)
    faults = [
        Fault(
            dice.uniform(first, last),
            kind,
            dice.randrange(num_workers),
            min(dice.uniform(*_STOP_SECONDS), seconds / 10) if kind == "stop" else 0.0,
        )
        for kind in kinds
    ]
    faults += [
        Fault(first + (last - first) * (index + dice.random()) / num_restarts, "restart", -1)
        for index in range(num_restarts)
    ]
    return sorted(faults)


class Injector:
    """Carries out faults, and calls ``end`` when the time is over. The supervisor calls `tick` many times a second.

    The time begins with the first update. A fault waits until its process runs.
    """

    def __init__(self, directory: Path, faults: Sequence[Fault], seconds: float, end: Callable[[], None]) -> None:
        self._directory, self._faults, self._seconds, self._end = directory, list(faults), seconds, end
        self.injected: Counter[str] = Counter()
        self.restarts: list[Restart] = []
        self.seconds = 0.0  # from the first update to the end
        self._began: float | None = None
        self._stopped: list[tuple[float, int]] = []  # until when which process is stopped
        self.is_over = False

    def tick(self, server: int | None, workers: Sequence[int | None]) -> None:
        """Takes the process ids, with None for a process that does not run."""
        now = time.monotonic()
        if self._began is None:
            if last_version(self._directory) < 1:
                return
            self._began = now
        for until, pid in [entry for entry in self._stopped if entry[0] <= now]:
            self._stopped.remove((until, pid))
            _signal(pid, signal.SIGCONT)
        elapsed = now - self._began
        if elapsed >= self._seconds and not self.is_over:
            self.is_over, self.seconds = True, elapsed
            self.release()
            self._end()
        due = [fault for fault in self._faults if fault.at_seconds <= elapsed] if not self.is_over else []
        for fault in due:
            victim = server if fault.slot < 0 else workers[fault.slot]
            stopped = {pid for _, pid in self._stopped}
            if victim is not None and victim not in stopped and self._strike(fault, victim, now):
                self._faults.remove(fault)
                self.injected[fault.kind] += 1

    def release(self) -> None:
        """Continues every process that is stopped."""
        for _, pid in self._stopped:
            _signal(pid, signal.SIGCONT)
        self._stopped = []

    def _strike(self, fault: Fault, victim: int, now: float) -> bool:
        """False if the fault did not happen, so that it is tried again."""
        if fault.kind == "restart":
            checkpoint, terms = newest_checkpoint(self._directory), num_terms(self._directory)
            if checkpoint < 0 or terms <= len(self.restarts):  # no checkpoint yet, or the last restart is not over
                return False
            restart = Restart(last_version(self._directory), checkpoint)
            struck = _signal(victim, signal.SIGKILL)
            self.restarts += [restart] if struck else []
            return struck
        if fault.kind == "stop":
            self._stopped.append((now + fault.lasting_seconds, victim))
        number = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "nan": NAN, "disconnect": DISCONNECT}[fault.kind]
        return _signal(victim, number)


def last_version(directory: Path) -> int:
    """The server's version after the newest complete line of the trace. Only the end of the file is read."""
    try:
        with (directory / "trace.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
            lines = file.read().splitlines(keepends=True)
    except OSError:
        return 0
    whole = [line for line in lines if line.endswith(b"\n") and line.startswith(b"{")]
    return int(json.loads(whole[-1])["version"]) if whole else 0


def num_terms(directory: Path) -> int:
    """How often a server has started to serve."""
    path = directory / "terms.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def newest_checkpoint(directory: Path) -> int:
    """The version of the newest finished checkpoint, or -1."""
    names = [path.name for path in directory.glob("checkpoints/term-*_version-*.safetensors")]
    return max((int(name.split("_version-")[1].split("_")[0]) for name in names), default=-1)


def _signal(pid: int, number: signal.Signals) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True
