"""Faults inside a worker: SIGUSR1 makes its next gradient NaN, and SIGUSR2 breaks all its connections.

The worker records each of them in ``faults.jsonl`` of the run directory, so that only faults that happened are counted.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from ringmaster_dist.transport.loopback import own_sockets
from ringmaster_dist.worker.job import Job, make_job

NAN, DISCONNECT = signal.SIGUSR1, signal.SIGUSR2


class _Poisoned:
    """A problem whose gradient is NaN when ``spoil()`` says so."""

    def __init__(self, problem: Any, spoil: Callable[[], bool]) -> None:
        self._problem, self._spoil = problem, spoil

    def gradient(self, *arguments: Any) -> tuple[torch.Tensor, float]:
        gradient, loss = self._problem.gradient(*arguments)
        return (torch.full_like(gradient, float("nan")) if self._spoil() else gradient), loss

    def __getattr__(self, name: str) -> Any:
        return getattr(self._problem, name)


class Saboteur:
    """Installs the signal handlers. They run in the main thread of the worker."""

    def __init__(self, record: Path) -> None:
        self._record_file, self._nans = record, 0
        signal.signal(NAN, self._on_nan)
        signal.signal(DISCONNECT, self._on_disconnect)

    def make_job(self, config_text: str, slot: int, target: str, device: str) -> Job:
        job = make_job(config_text, slot, target, device)
        return replace(job, problem=_Poisoned(job.problem, self._spoil))

    def _spoil(self) -> bool:
        if not self._nans:
            return False
        self._nans -= 1
        self._record("nan")
        return True

    def _on_nan(self, number: int, frame: FrameType | None) -> None:
        self._nans += 1

    def _on_disconnect(self, number: int, frame: FrameType | None) -> None:
        broken = 0
        for _, connection in own_sockets():
            with contextlib.suppress(OSError):  # the socket listens, or has just been closed
                connection.shutdown(socket.SHUT_RDWR)
                broken += 1
        self._record("disconnect", connections=broken)

    def _record(self, kind: str, **more: int) -> None:
        with self._record_file.open("a") as file:
            file.write(json.dumps({"kind": kind, "pid": os.getpid(), **more}) + "\n")
