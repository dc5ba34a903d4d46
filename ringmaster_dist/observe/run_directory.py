"""Writes the files of a run: ``config.yaml``, ``trace.jsonl``, ``metrics.jsonl``, ``summary.json`` and the others.

Files of lines grow at their end. A run that resumes from a checkpoint cuts each to the size it had then.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shlex
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from ringmaster_dist.files import open_private
from ringmaster_dist.observe.records import Summary
from ringmaster_dist.observe.run_files import COMMANDS, CONFIG, FILES, LOCK, SUMMARY, TRACE, RunDirectoryError, RunFiles
from ringmaster_dist.protocol import Receipt, Verdict
from ringmaster_dist.server.weights import INITIAL

# If one of these is there, the directory holds a run.
_PRESENT = (*FILES, INITIAL, "address", "token", "sessions", "wandb.id", "checkpoints", "report", "wandb")
_MADE_LATER = ("dashboard.json", "weights.safetensors", "weights.yaml", "weights.tokenizer.json")  # by other commands
_BYTES_PER_WRITE = 1 << 16
_LOOKED_AT_SECONDS = 1.0  # a process that only looks whether the directory is in use holds its lock for less
log = logging.getLogger(__name__)

_JSON_VERDICT = {verdict: json.dumps(verdict.value) for verdict in Verdict}


class RunDirectory(RunFiles):
    """A run that this process writes. The constructor claims the directory for the run."""

    def __init__(self, path: str | None, *, name: str, overwrite: bool = False) -> None:
        stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
        super().__init__(Path(path) if path else Path("runs") / f"{stamp}-{name}")
        present = refuse_if_used(self.path, overwrite=overwrite)
        if present:
            self.refuse_if_in_use()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.path.chmod(0o700)
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
        RunFiles.__init__(directory, path)
        directory.path.chmod(0o700)  # an old version may have made it with another mode
        return directory

    def write_config(self, yaml_text: str) -> None:
        self.write_secret(CONFIG, yaml_text)

    def add_command(self, program: str, overrides: Sequence[str]) -> None:
        """Notes a command that begins or resumes the run, as a line that a shell would take."""
        with open_private(self.path / COMMANDS, "a") as file:
            file.write(shlex.join([*program.split(), *overrides]).replace("\n", " ") + "\n")

    def write_summary(self, summary: Summary) -> None:
        self.write_secret(SUMMARY, json.dumps(summary.to_json(), indent=2) + "\n")

    def write_secret(self, name: str, text: str) -> None:
        """Writes a file that only its owner can read. It appears whole or not at all."""
        temporary = self.path / f".{name}"
        with open_private(temporary, "w") as file:
            file.write(text)
        temporary.replace(self.path / name)

    def lock(self) -> None:
        """Makes this process the only one that writes the run, until it ends."""
        self._lock = open_private(self.path / LOCK, "w")
        deadline = time.monotonic() + _LOOKED_AT_SECONDS
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError as error:
                if time.monotonic() > deadline:
                    raise RunDirectoryError(f"another server is at work in {self.path}: let it end first") from error
                time.sleep(0.05)

    def refuse_if_in_use(self) -> None:
        """Raises RunDirectoryError while a server is at work in the directory."""
        if (self.path / LOCK).exists():
            self.lock()
            self._lock.close()

    def own_files(self) -> tuple[list[Path], int]:
        """The files and folders that belong to the run, and their bytes. The directory may hold others too."""
        found = [self.path / name for name in (*_PRESENT, *_MADE_LATER)]
        found = [path for path in found if path.is_symlink() or path.exists()]
        inside = [each for path in found if not path.is_symlink() and path.is_dir() for each in path.rglob("*")]
        return found, sum(path.lstat().st_size for path in (*found, *inside) if path.is_symlink() or path.is_file())

    def remove(self) -> list[str]:
        """Removes the run's own files, and the directory if nothing else is in it. Returns the names that remain.

        Raises RunDirectoryError while a server or a simulation is at work, and OSError.
        """
        self.lock()
        try:
            for path in self.own_files()[0]:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            (self.path / LOCK).unlink()
        finally:
            self._lock.close()
        if remaining := sorted(path.name for path in self.path.iterdir()):
            return remaining
        self.path.unlink() if self.path.is_symlink() else self.path.rmdir()
        return []

    def open_trace(self, size: int = 0) -> TraceWriter:
        return TraceWriter(self.path / TRACE, size)

    def open_rows(self, name: str, size: int = 0) -> RowWriter:
        return RowWriter(self.path / name, size)

    def has_sizes(self, sizes: Mapping[str, int]) -> bool:
        """Whether each file is at least as long as it was."""
        return all((self.path / name).is_file() and self.size(name) >= size for name, size in sizes.items())


def refuse_if_used(path: Path, *, overwrite: bool) -> list[str]:
    """The names of a run's files that are in the directory. Raises RunDirectoryError unless they may be replaced."""
    present = [item for item in _PRESENT if (path / item).exists()]
    if present and not overwrite:
        raise RunDirectoryError(
            f"run.dir={path} already holds a run ({present[0]}): choose another run.dir, "
            "or replace it with run.overwrite=true"
        )
    return present


class Lines:
    """A file that grows by lines. While the disk is full, lines wait in memory, and none is lost."""

    def __init__(self, path: Path, size: int = 0) -> None:
        """Keeps the first ``size`` bytes of the file and cuts the rest."""
        self._path = path
        self._file = open_private(path, "r+b" if path.exists() else "wb", buffering=0)
        self._file.truncate(size)
        self._file.seek(size)
        self.size = size  # in the file
        self._waiting = bytearray()
        self._complained = False
        self._lock = threading.Lock()  # one thread writes rows, another asks for the size

    def append(self, text: str) -> None:
        with self._lock:
            self._waiting += text.encode()
            if len(self._waiting) >= _BYTES_PER_WRITE:
                self._flush()

    def flush(self) -> bool:
        """Whether everything is in the file now."""
        with self._lock:
            return self._flush()

    def _flush(self) -> bool:
        try:
            while self._waiting:
                written = self._file.write(self._waiting) or 0
                del self._waiting[:written]
                self.size += written
        except OSError as error:
            if not self._complained:
                log.warning("%s cannot be written (%s): its lines wait in memory", self._path, error.strerror)
            self._complained = True
            return False
        self._complained = False
        return True

    def sync(self) -> None:
        """fsync: the file's content is on disk when this returns."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Raises OSError if a line could not be written."""
        whole = self.flush()
        self._file.close()
        if not whole:
            raise OSError(f"{self._path} is not complete: the disk did not take it")


class TraceWriter(Lines):
    """Writes one line per arriving gradient: the keys of `records.Arrival`, in their order."""

    def arrival(
        self, time: float, worker: int, sequence: int, gradient_version: int, receipt: Receipt,
        loss: float | None, compute_seconds: float, term: int | None = None, lost_version: int | None = None,
        rows: int = 0,
    ) -> None:  # fmt: skip
        # Formatted by hand: this is called for every gradient, and json.dumps would cost four times as much.
        loss_text = "null" if loss is None or loss - loss != 0.0 else repr(loss)
        extra = "" if term is None else f', "term": {term}'
        if rows:
            extra += f', "rows": {rows}'
        if lost_version is not None:
            extra += f', "lost_version": {lost_version}'
        self.append(
            f'{{"time": {time!r}, "worker": {worker}, "sequence": {sequence}, '
            f'"gradient_version": {gradient_version}, "version": {receipt.version}, "delay": {receipt.delay}, '
            f'"verdict": {_JSON_VERDICT[receipt.verdict]}, "loss": {loss_text}, '
            f'"compute_seconds": {compute_seconds!r}{extra}}}\n'
        )


class RowWriter(Lines):
    """Writes one line per row, at once."""

    def write(self, row: Mapping[str, Any]) -> None:
        self.append(json.dumps(row) + "\n")
        self.flush()
