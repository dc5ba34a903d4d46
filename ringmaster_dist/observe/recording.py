"""A run as it lies in its directory, whoever wrote it: going on, ended, crashed, simulated."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import yaml

from ringmaster_dist.observe.run_directory import RunDirectoryError
from ringmaster_dist.observe.trace import Trace

_FRESH_SECONDS = 20.0  # a file that was written to more recently belongs to a run that goes on


class Recording:
    """Everything a run has written so far. `look` reads on."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        if not directory.is_dir():
            raise RunDirectoryError(f"{directory} is not a directory: give the run.dir of a train or simulate")
        if not (directory / "config.yaml").is_file():
            raise RunDirectoryError(
                f"{directory} holds no run (no config.yaml): give the run.dir of a train or simulate"
            )
        self.config = _config(directory / "config.yaml")
        self.trace = Trace(directory / "trace.jsonl")
        self.metrics: list[dict[str, Any]] = []
        self.members: list[dict[str, Any]] = []
        self.summary: dict[str, Any] = {}
        self._terms = -1
        self.look()

    def look(self) -> None:
        """Reads what is new; the trace from its start if the server has begun anew and cut it."""
        terms = _size(self.directory / "terms.jsonl")
        self.trace.look(anew=terms != self._terms)
        self._terms = terms
        self.metrics = [row for row in _rows(self.directory / "metrics.jsonl") if _is_measurement(row)]
        self.members = _rows(self.directory / "members.jsonl")
        self.summary = _summary(self.directory / "summary.json")
        if not self.metrics and not len(self.trace):
            raise RunDirectoryError(
                f"{self.directory} has nothing to show yet: neither trace.jsonl nor metrics.jsonl has a whole line"
            )

    @property
    def stamp(self) -> tuple[int, ...]:
        """Changes when there is something new to read."""
        names = ("trace.jsonl", "metrics.jsonl", "summary.json", "terms.jsonl")
        return tuple(_size(self.directory / name) for name in names)

    @property
    def state(self) -> str:
        """How the run stands, in words."""
        if self.summary.get("diverged"):
            return "ended: diverged"
        if self.summary:
            return "finished" if self.summary.get("ended") == "budget" else str(self.summary.get("ended", "ended"))
        written = [self.directory / name for name in ("trace.jsonl", "metrics.jsonl")]
        newest = max((path.stat().st_mtime for path in written if path.exists()), default=0.0)
        going = _is_locked(self.directory / ".lock") or time.time() - newest < _FRESH_SECONDS
        return "going on" if going else "ended without a summary"

    @property
    def seconds(self) -> float:
        """How long it has lasted, on its own clock."""
        times = self.trace["time"]
        last = float(times[-1]) if len(times) else 0.0
        return max(last, float(self.metrics[-1]["time"]) if self.metrics else 0.0)

    def slots(self) -> dict[int, int]:
        """Each worker's place in the delay profile; workers that are not listed have their own number."""
        return {row["worker"]: row["slot"] for row in self.members if "worker" in row and "slot" in row}

    def tokens_per_gradient(self, worker: int, slots: dict[int, int]) -> int:
        """0 where the problem has no tokens."""
        if self.config.get("problem", {}).get("name") != "nanochat":
            return 0
        rows = self.config.get("cluster", {}).get("batch") or [self.config["problem"]["batch"]]
        return int(rows[slots.get(worker, worker) % len(rows)] * self.config["model"]["sequence_len"])


def _config(path: Path) -> dict[str, Any]:
    try:
        config = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError):
        config = None
    if not isinstance(config, dict) or not {"method", "problem", "cluster"} <= config.keys():
        raise RunDirectoryError(f"{path} is not the configuration of a run: is {path.parent} another program's?")
    return config


def _summary(path: Path) -> dict[str, Any]:
    try:
        summary = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return summary if isinstance(summary, dict) else {}


def _rows(path: Path) -> list[dict[str, Any]]:
    """The whole lines; one that is torn or foreign is passed over."""
    found = []
    for line in path.read_bytes().splitlines(keepends=True) if path.is_file() else ():
        try:
            row = json.loads(line) if line.endswith(b"\n") else None
        except ValueError:
            continue
        if isinstance(row, dict):
            found.append(row)
    return found


def _is_measurement(row: dict[str, Any]) -> bool:
    return all(isinstance(row.get(key), int | float) for key in ("time", "version"))


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _is_locked(path: Path) -> bool:
    """Whether a server holds it. Only looks: to try the lock could keep a server from getting it."""
    try:
        inode = path.stat().st_ino
        return any(line.split()[5].rpartition(":")[2] == str(inode) for line in Path("/proc/locks").open())
    except (OSError, IndexError):
        return False
