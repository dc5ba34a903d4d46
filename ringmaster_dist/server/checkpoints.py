"""Checkpoints: the whole state of a run in one safetensors file, there whole or not at all.

A file is written under a temporary name, flushed to the disk, and renamed; its name ends with the beginning of its
SHA-256, so a torn or altered one is recognised and passed over. Tensors are entries of the file; the rest of the state
is JSON in its metadata.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

log = logging.getLogger(__name__)

FORMAT = "ringmaster checkpoint 1"
_NAME = re.compile(r"term-(\d+)_push-(\d+)_version-(\d+)_([0-9a-f]{16})\.safetensors")
_CHUNK_BYTES = 1 << 20


class Checkpoints:
    """The checkpoints of one run. Not for two processes at once."""

    def __init__(self, folder: Path, keep: int = 3) -> None:
        self._folder, self._keep = folder, keep

    def save(self, state: Mapping[str, Any], *, term: int, pushes: int, version: int) -> Path:
        """Writes one and removes the oldest. Raises OSError, and leaves nothing behind, where that fails."""
        tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
        rest = {name: value for name, value in state.items() if name not in tensors}
        self._folder.mkdir(parents=True, exist_ok=True)
        temporary = self._folder / ".writing"
        try:
            save_file(tensors, temporary, metadata={"format": FORMAT, "state": json.dumps(rest)})
            _flush(temporary)
            name = f"term-{term:04d}_push-{pushes:09d}_version-{version:09d}_{_digest(temporary)}.safetensors"
            path = temporary.replace(self._folder / name)
            _flush(self._folder)
        except SafetensorError as error:  # how the library reports what the disk said
            raise OSError(str(error)) from error
        finally:
            temporary.unlink(missing_ok=True)
        paths = self._paths()
        same = [p for p in paths if p != path and p.name.rpartition("_")[0] == path.name.rpartition("_")[0]]
        for old in (*same, *paths[: -self._keep]):
            old.unlink(missing_ok=True)
        return path

    def newest(
        self, fits: Callable[[Mapping[str, Any]], str] = lambda state: "", *, rename: bool = True
    ) -> tuple[Path, dict[str, Any]] | None:
        """The newest good one. ``fits`` says what is wrong with a state, if anything.

        For who goes on from it, one that is passed over is renamed: what is written from now on may contradict it.
        """
        for path in reversed(self._paths()):
            try:
                state = read(path)
                problem = fits(state)
            except (OSError, ValueError, KeyError, SafetensorError) as error:
                problem = str(error)
            if not problem:
                return path, state
            log.warning("checkpoint %s is passed over: %s", path.name, problem)
            if rename:
                path.replace(path.with_suffix(".damaged"))
        return None

    def _paths(self) -> list[Path]:
        """From the oldest to the newest."""
        found = [(match, path) for path in self._all() if (match := _NAME.fullmatch(path.name))]
        return [path for match, path in sorted(found, key=lambda item: [int(n) for n in item[0].groups()[:3]])]

    def _all(self) -> Iterator[Path]:
        return self._folder.iterdir() if self._folder.is_dir() else iter(())


def read(path: Path) -> dict[str, Any]:
    """The state in a file. Raises ValueError with the reason if it is not a whole checkpoint."""
    match = _NAME.fullmatch(path.name)
    if match is not None and _digest(path) != match[4]:
        raise ValueError("its content is not what its name says: it is torn or was altered")
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        if metadata.get("format") != FORMAT:
            raise ValueError(f"it is not a {FORMAT!r}")
        return {**json.loads(metadata["state"]), **{name: file.get_tensor(name) for name in file.keys()}}  # noqa: SIM118


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()[:16]


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
