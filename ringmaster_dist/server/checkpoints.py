"""Checkpoints: the whole state of a run in one safetensors file, which is there whole or not at all.

A file is written under a temporary name, fsynced and renamed. Its name ends with the beginning of its SHA-256, so a
torn or altered file is recognised and passed over. Tensors are entries of the file. The rest of the state is JSON in
its metadata.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ringmaster_dist.files import sha256_of, to_disk
from ringmaster_dist.server.admission import unfit
from ringmaster_dist.server.core import CoreState

log = logging.getLogger(__name__)

FORMAT = "ringmaster checkpoint 1"
_NAME = re.compile(r"term-(\d+)_push-(\d+)_version-(\d+)_([0-9a-f]{16})\.safetensors")


class Unusable(Exception):
    """There are checkpoints, and none of them can be resumed from."""


@dataclass(frozen=True)
class CheckpointState:
    """Everything that a later server needs to continue the run bit for bit."""

    core: CoreState
    seconds: float  # of the run, over all terms
    ended: bool
    members: list[list[Any]]  # of `Members.state`
    files: dict[str, int]  # the sizes of the run's files, which are truncated to them

    def to_file(self) -> tuple[dict[str, torch.Tensor], str]:
        """Returns the tensors, and the rest as JSON."""
        values = {field.name: getattr(self.core, field.name) for field in fields(CoreState)}
        tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
        rest = {name: value for name, value in values.items() if name not in tensors}
        service = {"seconds": self.seconds, "ended": self.ended, "workers": self.members}
        return tensors, json.dumps({**rest, "service": service, "files": self.files})

    @classmethod
    def from_file(cls, tensors: Mapping[str, torch.Tensor], text: str) -> CheckpointState:
        """Raises KeyError if a part is missing, and ValueError for a member that cannot be one."""
        values = {**json.loads(text), **tensors}
        service = values["service"]
        for _, _, slot, _, _, _, _, _, _, ranks, _ in service["workers"]:
            if wrong := unfit(slot, ranks):
                raise ValueError(wrong)
        kept = [field.name for field in fields(CoreState) if field.name in values or field.default is MISSING]
        core = CoreState(**{name: values[name] for name in kept})
        return cls(core, service["seconds"], service["ended"], service["workers"], values["files"])


class Checkpoints:
    """The checkpoints of one run. Not for two processes at once."""

    def __init__(self, folder: Path, keep: int = 3) -> None:
        self._folder, self._keep = folder, keep

    def save(self, state: CheckpointState, term: int) -> Path:
        """Writes one and removes the oldest. Raises OSError, and leaves nothing behind, if that fails."""
        tensors, rest = state.to_file()
        version, pushes = state.core.version, sum(state.core.counters)
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = self._folder / ".writing"
        try:
            save_file(tensors, temporary, metadata={"format": FORMAT, "state": rest})
            temporary.chmod(0o600)  # some versions of the library write files that everybody may read
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
        self, fits: Callable[[CheckpointState], str] = lambda state: "", *, rename: bool = True
    ) -> tuple[Path, CheckpointState] | None:
        """Returns the newest good checkpoint, or None if there is no checkpoint at all.

        ``fits`` says what is wrong with a state. With ``rename``, checkpoints newer than the one returned are renamed,
        so that the next start does not pick them. Raises `Unusable` if there are checkpoints and none is good, and
        OSError if one cannot be read now. A run must not begin from its start then: that would discard work that a
        person, or a later attempt, can still recover.
        """
        passed_over: dict[Path, str] = {}
        for path in reversed(self._paths()):
            try:
                state = read(path)
                problem = fits(state)
            except (ValueError, KeyError, SafetensorError) as error:
                problem = str(error)
            if not problem:
                for damaged, why in passed_over.items():
                    log.warning("checkpoint %s is passed over: %s", damaged.name, why)
                    if rename:
                        damaged.replace(damaged.with_suffix(".damaged"))
                return path, state
            passed_over[path] = problem
        if passed_over:
            path, problem = next(iter(passed_over.items()))
            raise Unusable(f"no checkpoint in {self._folder} can be used; of the newest, {path.name}: {problem}")
        return None

    def _paths(self) -> list[Path]:
        """From the oldest to the newest."""
        return sorted((path for path in self._all() if moment(path.name)), key=lambda path: moment(path.name) or ())

    def _all(self) -> Iterator[Path]:
        return self._folder.iterdir() if self._folder.is_dir() else iter(())


def moment(name: str) -> tuple[int, ...] | None:
    """The term, pushes and version of a checkpoint of this name, which order checkpoints. None for other names."""
    match = _NAME.fullmatch(name)
    return tuple(int(number) for number in match.groups()[:3]) if match else None


def is_checkpoint(path: Path) -> bool:
    """Whether it is one by its name or by its content. Raises SafetensorError if it is no safetensors file."""
    if _NAME.fullmatch(path.name):
        return True
    with safe_open(path, framework="pt") as file:
        return (file.metadata() or {}).get("format") == FORMAT


def read(path: Path) -> CheckpointState:
    """Returns the state in a file. Raises ValueError or KeyError if it is not a whole checkpoint."""
    match = _NAME.fullmatch(path.name)
    if match is not None and sha256_of(path)[:16] != match[4]:
        raise ValueError("its content is not what its name says: it is torn or was altered")
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        if metadata.get("format") != FORMAT:
            raise ValueError(f"it is not a {FORMAT!r}")
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return CheckpointState.from_file(tensors, metadata["state"])
