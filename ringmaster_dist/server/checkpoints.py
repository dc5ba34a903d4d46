"""Checkpoints: the whole state of a run in one safetensors file, there whole or not at all.

A file is written under a temporary name, flushed to the disk, and renamed; its name ends with the beginning of its
SHA-256, so a torn or altered one is recognised and passed over. Tensors are entries of the file; the rest of the state
is JSON in its metadata.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ringmaster_dist.files import sha256_of, to_disk

log = logging.getLogger(__name__)

FORMAT = "ringmaster checkpoint 1"
_NAME = re.compile(r"term-(\d+)_push-(\d+)_version-(\d+)_([0-9a-f]{16})\.safetensors")


class Unusable(Exception):
    """There are checkpoints, and none of them can be gone on from."""


class Checkpoints:
    """The checkpoints of one run. Not for two processes at once."""

    def __init__(self, folder: Path, keep: int = 3) -> None:
        self._folder, self._keep = folder, keep

    def save(self, state: Mapping[str, Any], *, term: int, pushes: int, version: int) -> Path:
        """Writes one and removes the oldest. Raises OSError, and leaves nothing behind, where that fails."""
        tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
        rest = {name: value for name, value in state.items() if name not in tensors}
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = self._folder / ".writing"
        try:
            save_file(tensors, temporary, metadata={"format": FORMAT, "state": json.dumps(rest)})
            temporary.chmod(0o600)  # some versions of the library leave that to nobody
            to_disk(temporary)
            name = f"term-{term:04d}_push-{pushes:09d}_version-{version:09d}_{sha256_of(temporary)[:16]}.safetensors"
            path = temporary.replace(self._folder / name)
            to_disk(self._folder)
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
        """The newest good one; None where there is none at all. ``fits`` says what is wrong with a state, if anything.

        For who goes on from it, newer ones that are passed over are renamed: what is written from now on may contradict
        them. Raises `Unusable` where there are some and none is good, OSError where one cannot be read now: to begin
        anew would be to throw away what they, or a better moment, may still give back.
        """
        passed_over: dict[Path, str] = {}
        for path in reversed(self._paths()):
            try:
                state = read(path)
                problem = fits(state)
            except (ValueError, KeyError, SafetensorError) as error:
                problem = str(error)
            if not problem:
                for damaged in passed_over if rename else ():
                    damaged.replace(damaged.with_suffix(".damaged"))
                return path, state
            log.warning("checkpoint %s is passed over: %s", path.name, problem)
            passed_over[path] = problem
        if passed_over:
            path, problem = next(iter(passed_over.items()))
            raise Unusable(f"no checkpoint in {self._folder} can be used; of the newest, {path.name}: {problem}")
        return None

    def _paths(self) -> list[Path]:
        """From the oldest to the newest."""
        found = [(match, path) for path in self._all() if (match := _NAME.fullmatch(path.name))]
        return [path for match, path in sorted(found, key=lambda item: [int(n) for n in item[0].groups()[:3]])]

    def _all(self) -> Iterator[Path]:
        return self._folder.iterdir() if self._folder.is_dir() else iter(())


def is_checkpoint(path: Path) -> bool:
    """Whether it is one by its name or by its content. Raises SafetensorError if it is no safetensors file."""
    if _NAME.fullmatch(path.name):
        return True
    with safe_open(path, framework="pt") as file:
        return (file.metadata() or {}).get("format") == FORMAT


def read(path: Path) -> dict[str, Any]:
    """The state in a file. Raises ValueError with the reason if it is not a whole checkpoint."""
    match = _NAME.fullmatch(path.name)
    if match is not None and sha256_of(path)[:16] != match[4]:
        raise ValueError("its content is not what its name says: it is torn or was altered")
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        if metadata.get("format") != FORMAT:
            raise ValueError(f"it is not a {FORMAT!r}")
        return {**json.loads(metadata["state"]), **{name: file.get_tensor(name) for name in file.keys()}}  # noqa: SIM118
