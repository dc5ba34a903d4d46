"""Carries out a schedule against the processes of a run, and ends the run when its time is over.

`tick` is called by whoever supervises, many times a second. A fault waits until its victim is there to suffer it.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from ringmaster_dist.chaos.saboteur import DISCONNECT, NAN
from ringmaster_dist.chaos.schedule import Fault
from ringmaster_dist.observe.run_files import RunFiles


class Restart(NamedTuple):
    """What there was when the server was killed."""

    version: int  # of the newest line of the trace
    checkpoint: int  # version of the newest checkpoint


class Injector:
    def __init__(self, directory: Path, faults: Sequence[Fault], seconds: float, end: Callable[[], None]) -> None:
        self._directory, self._faults, self._seconds, self._end = directory, list(faults), seconds, end
        self._files = RunFiles(directory)
        self.injected: Counter[str] = Counter()
        self.restarts: list[Restart] = []
        self.seconds = 0.0  # from the first update to the end
        self._began: float | None = None
        self._stopped: list[tuple[float, int]] = []  # who sleeps, and until when
        self.is_over = False

    def tick(self, server: int | None, workers: Sequence[int | None]) -> None:
        """With the process ids of who is alive; None for who is not."""
        now = time.monotonic()
        if self._began is None:
            if self._files.last_version() < 1:
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
            asleep = {pid for _, pid in self._stopped}
            if victim is not None and victim not in asleep and self._strike(fault, victim, now):
                self._faults.remove(fault)
                self.injected[fault.kind] += 1

    def release(self) -> None:
        """Nobody is left asleep."""
        for _, pid in self._stopped:
            _signal(pid, signal.SIGCONT)
        self._stopped = []

    def _strike(self, fault: Fault, victim: int, now: float) -> bool:
        if fault.kind == "restart":
            checkpoint, terms = newest_checkpoint(self._directory), len(self._files.terms())
            if checkpoint < 0 or terms <= len(self.restarts):  # nothing to come back from, or not back yet
                return False
            restart = Restart(self._files.last_version(), checkpoint)
            struck = _signal(victim, signal.SIGKILL)
            self.restarts += [restart] if struck else []
            return struck
        if fault.kind == "stop":
            self._stopped.append((now + fault.lasting_seconds, victim))
        number = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "nan": NAN, "disconnect": DISCONNECT}[fault.kind]
        return _signal(victim, number)


def newest_checkpoint(directory: Path) -> int:
    """The version of the newest finished checkpoint; -1 if there is none."""
    names = [path.name for path in directory.glob("checkpoints/term-*_version-*.safetensors")]
    return max((int(name.split("_version-")[1].split("_")[0]) for name in names), default=-1)


def _signal(pid: int, number: signal.Signals) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True
