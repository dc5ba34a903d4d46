"""The run directory: ``config.yaml``, ``trace.jsonl``, ``metrics.jsonl``, ``summary.json``.

Other programs read these files; their names and keys do not change lightly.
"""

from __future__ import annotations

import json
import os
import shutil
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from ringmaster_dist.protocol import Receipt, Verdict

_FILES = ("config.yaml", "trace.jsonl", "metrics.jsonl", "summary.json")
_REAL_FILES = ("members.jsonl", "final.safetensors", "address", "token")  # of a run in real time
_FOLDERS = ("checkpoints",)
_LINES_PER_WRITE = 512
_JSON_VERDICT = {verdict: json.dumps(verdict.value) for verdict in Verdict}


class RunDirectoryError(Exception):
    """The directory cannot be used; the message says why and what to do."""


class RunDirectory:
    """Writes a run. The directory is claimed when this is made, and belongs to this run from then on."""

    def __init__(self, path: str | None, *, name: str, overwrite: bool = False) -> None:
        stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
        self.path = Path(path) if path else Path("runs") / f"{stamp}-{name}"
        present = [item for item in (*_FILES, *_REAL_FILES, *_FOLDERS) if (self.path / item).exists()]
        if present and not overwrite:
            raise RunDirectoryError(
                f"run.dir={self.path} already holds a run ({present[0]}): choose another run.dir, "
                "or replace it with run.overwrite=true"
            )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            for item in present:
                target = self.path / item
                shutil.rmtree(target) if target.is_dir() else target.unlink()
            probe = self.path / f".writable-{os.getpid()}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise RunDirectoryError(
                f"run.dir={self.path} cannot be written ({error.strerror}): choose a writable run.dir"
            ) from error

    @classmethod
    def opened(cls, path: Path) -> RunDirectory:
        """A directory that another process has claimed for this run."""
        directory = cls.__new__(cls)
        directory.path = path
        return directory

    def write_config(self, yaml_text: str) -> None:
        (self.path / "config.yaml").write_text(yaml_text)

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Whole or not at all: a reader never sees half a summary."""
        temporary = self.path / ".summary.json"
        temporary.write_text(json.dumps(summary, indent=2) + "\n")
        temporary.replace(self.path / "summary.json")

    def open_trace(self) -> TraceWriter:
        return TraceWriter((self.path / "trace.jsonl").open("w"))

    def write_secret(self, name: str, text: str) -> None:
        """A file only its owner can read, there whole or not at all."""
        temporary = self.path / f".{name}"
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        temporary.replace(self.path / name)

    def open_members(self) -> MetricsWriter:
        return MetricsWriter((self.path / "members.jsonl").open("w"))

    def open_metrics(self) -> MetricsWriter:
        return MetricsWriter((self.path / "metrics.jsonl").open("w"))


class TraceWriter:
    """One line per arriving gradient."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._lines: list[str] = []

    def arrival(
        self, time: float, worker: int, sequence: int, gradient_version: int, receipt: Receipt,
        loss: float | None, compute_seconds: float,
    ) -> None:  # fmt: skip
        # Formatted by hand: this is called for every gradient, and json.dumps would cost four times as much.
        loss_text = "null" if loss is None or loss - loss != 0.0 else repr(loss)
        self._lines.append(
            f'{{"time": {time!r}, "worker": {worker}, "sequence": {sequence}, '
            f'"gradient_version": {gradient_version}, "version": {receipt.version}, "delay": {receipt.delay}, '
            f'"verdict": {_JSON_VERDICT[receipt.verdict]}, "loss": {loss_text}, '
            f'"compute_seconds": {compute_seconds!r}}}\n'
        )
        if len(self._lines) >= _LINES_PER_WRITE:
            self.flush()

    def flush(self) -> None:
        self._file.write("".join(self._lines))
        self._file.flush()
        self._lines.clear()

    def close(self) -> None:
        self.flush()
        self._file.close()


class MetricsWriter:
    """One line per measurement, written at once."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()
