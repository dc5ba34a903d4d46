"""Reads the files of a run. Nothing else reads the .jsonl files and summary.json.

The run may have ended, may have crashed, or may still be written. A last line without its end is left for the next
look, because a server is writing it, or died while doing so. A server that restarts from a checkpoint cuts the files of
lines; it adds a line to terms.jsonl then, so a change of that file says that the others have to be read from the start.
"""

from __future__ import annotations

import io
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import yaml
from safetensors import SafetensorError

from ringmaster_dist.errors import Mistake
from ringmaster_dist.foreign import inside, plain_yaml, reaching
from ringmaster_dist.observe.records import VERDICTS, Arrival, Member, MetricsRow, Summary, Term, parse

CONFIG, TRACE, METRICS, SUMMARY = "config.yaml", "trace.jsonl", "metrics.jsonl", "summary.json"
MEMBERS, TERMS, THRESHOLDS, FINAL = "members.jsonl", "terms.jsonl", "thresholds.jsonl", "final.safetensors"
ROWS, SAMPLE, COMMANDS, BEST = "rows.jsonl", "sample.txt", "commands.txt", "best.safetensors"
FILES = (CONFIG, TRACE, METRICS, SUMMARY, MEMBERS, THRESHOLDS, ROWS, TERMS, FINAL, BEST, SAMPLE, COMMANDS)
LOCK, CHECKPOINTS = ".lock", "checkpoints"
_FRESH_SECONDS = 20.0  # a run that has written more recently is taken to be running
_BLOCK_BYTES = 1 << 24
_TAIL_BYTES = 4096  # holds the last line of a trace
_ROWS_TAIL_BYTES = 1 << 20  # holds the last rows of metrics, also those of many workers
_NO_RECORD = (ValueError, KeyError, TypeError, AttributeError)  # what a line that is no such record raises
_COLUMNS: dict[str, type[np.generic]] = {
    "time": np.float64,
    "worker": np.int32,
    "sequence": np.int64,
    "version": np.int64,
    "delay": np.int64,
    "loss": np.float64,
    "compute_seconds": np.float64,
    "rows": np.int64,
}
_OPTIONAL = ("loss", "rows")  # a line may have no such number
_MOST_WORKERS = 1 << 22  # of a trace


T = TypeVar("T")
log = logging.getLogger(__name__)


class RunDirectoryError(Mistake):
    """The directory, or a file in it, cannot be used. The message is one line that says why and what to do."""


@contextmanager
def belong_together(path: Path) -> Iterator[None]:
    """Turns the errors that records of an altered run cause into a RunDirectoryError."""
    try:
        yield
    except Mistake:
        raise
    except (*_NO_RECORD, SafetensorError, LookupError, ArithmeticError, AssertionError) as error:
        log.debug("the run cannot be read", exc_info=True)
        raise RunDirectoryError(
            f"the files in {path} do not belong together ({type(error).__name__}: {error}): one of them is damaged, or "
            "was altered"
        ) from error


class RunFiles:
    """The files of a run, as records. Each call reads what is there now.

    A damaged line raises RunDirectoryError, and a last line without its end is left out.
    """

    def __init__(self, path: Path, *, complete: bool = False, tolerant: bool = False) -> None:
        """In a ``complete`` run a torn last line is damage too. A ``tolerant`` reader leaves out damaged lines."""
        self.path, self._complete, self._tolerant = path, complete, tolerant

    def read(self, name: str) -> str:
        """The text of a small file; empty if there is none. Bytes that are no text are replaced."""
        path = self._path(name)
        return path.read_text(errors="replace").strip() if path.is_file() else ""

    def size(self, name: str) -> int:
        path = self.path / name
        return path.stat().st_size if path.exists() else 0

    def config(self) -> dict[str, Any]:
        """config.yaml as plain values. Raises RunDirectoryError if there is none."""
        if not self.path.is_dir():
            raise RunDirectoryError(f"{self.path} is not a directory: give the run.dir of a train or simulate")
        path = self._path(CONFIG)
        if not path.is_file():
            raise RunDirectoryError(
                f"{self.path} holds no run (no config.yaml): give the run.dir of a train or simulate"
            )
        try:
            config = plain_yaml(path.read_text())
        except (yaml.YAMLError, ValueError, RecursionError):
            config = None
        if not isinstance(config, dict) or not {"method", "problem", "cluster"} <= config.keys():
            raise RunDirectoryError(f"{path} is not the configuration of a run: is {self.path} another program's?")
        return config

    @property
    def resume_command(self) -> str:
        """What its user types to resume it. The directory alone decides neither what is imported nor who is reached."""
        config = self.config()
        target = config["problem"].get("target") or config["problem"].get("path")
        named = {"resume": self.path, **({"target": target} if target else {}), **reaching(config)}
        return " ".join(("ringmaster train", *(f"{key}={value}" for key, value in named.items())))

    def summary(self) -> Summary | None:
        """None before the run has ended, and for a file that holds no summary."""
        try:
            return Summary.from_json(json.loads(self._path(SUMMARY).read_text()))
        except (OSError, *_NO_RECORD):
            return None

    def outcome(self) -> Summary:
        """The summary of a run that has ended. Raises RunDirectoryError if there is none."""
        if (summary := self.summary()) is None:
            raise RunDirectoryError(f"{self.path} has no summary.json: the run did not end as it should")
        return summary

    def arrivals(self) -> list[Arrival]:
        return self._records(TRACE, Arrival.from_json)

    def members(self) -> list[Member]:
        return self._records(MEMBERS, partial(parse, Member))

    def terms(self) -> list[Term]:
        return self._records(TERMS, partial(parse, Term))

    def metrics(self) -> list[MetricsRow]:
        return self._records(METRICS, MetricsRow.from_json)

    def rows(self, name: str) -> list[dict[str, Any]]:
        """The lines of a file that has no type of its own."""
        return self._records(name, dict)

    def whole_bytes(self, name: str) -> int:
        """The size of a file of lines without a torn last line."""
        return sum(len(line) for line in self._lines(name) if line.endswith(b"\n"))

    def last_version(self) -> int:
        """The version in the newest whole line of the trace; 0 if there is none."""
        whole = [line for line in self._end(TRACE, _TAIL_BYTES) if line.startswith(b"{")]
        return Arrival.from_json(json.loads(whole[-1])).version if whole else 0

    def newest_row(self) -> tuple[MetricsRow | None, dict[str, float | None]]:
        """The last whole row of the metrics, and the last evaluation, from the end of the file only."""
        newest: MetricsRow | None = None
        for line in reversed(self._end(METRICS, _ROWS_TAIL_BYTES)):
            try:
                row = MetricsRow.from_json(json.loads(line))
            except _NO_RECORD:
                continue
            newest = newest or row
            if row.evaluation:
                return newest, row.evaluation
        return newest, {}

    def _end(self, name: str, num_bytes: int) -> list[bytes]:
        """The whole lines in the last bytes of a file. The first one may lack its beginning."""
        try:
            with self._path(name).open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - num_bytes))
                lines = file.read().splitlines(keepends=True)
        except OSError:
            return []
        return [line for line in lines if line.endswith(b"\n")]

    def is_running(self) -> bool:
        """Whether a server holds the lock of the run, or one of its files was written a moment ago."""
        written = [self.path / name for name in (TRACE, METRICS)]
        newest = max((path.stat().st_mtime for path in written if path.exists()), default=0.0)
        return _is_locked(self.path / LOCK) or time.time() - newest < _FRESH_SECONDS

    def _path(self, name: str) -> Path:
        """Raises RunDirectoryError for a link out of the directory: it may come from somebody else."""
        try:
            return inside(self.path, name)
        except ValueError as error:
            raise RunDirectoryError(f"{error}: copy the file, if it belongs there") from error

    def _lines(self, name: str) -> list[bytes]:
        path = self._path(name)
        return path.read_bytes().splitlines(keepends=True) if path.is_file() else []

    def _records(self, name: str, make: Callable[[Mapping[str, Any]], T]) -> list[T]:
        found = []
        for number, line in enumerate(self._lines(name), 1):
            if not line.endswith(b"\n") and not self._complete:
                continue
            try:
                found.append(make(json.loads(line)))
            except _NO_RECORD:
                if not self._tolerant:
                    raise _damaged(self.path / name, number, line) from None
        return found


class _Growing:
    """The whole lines that a growing file has got since the last look."""

    def __init__(self, path: Path) -> None:
        self.path, self.offset = path, 0

    def blocks(self) -> Iterator[bytes]:
        """The new lines in blocks. A block counts as read when the next one is asked for."""
        if not self.path.is_file():
            return
        with self.path.open("rb") as file:
            file.seek(self.offset)
            rest = b""
            while block := file.read(_BLOCK_BYTES):
                block = rest + block
                end = block.rfind(b"\n") + 1
                if end:
                    yield block[:end]
                    self.offset += end
                rest = block[end:]


class Tail(Generic[T]):
    """The records that a growing file has got since the last look."""

    def __init__(self, path: Path, make: Callable[[Mapping[str, Any]], T]) -> None:
        self._file, self._make = _Growing(path), make
        self._number = 0

    def new(self) -> Iterator[T]:
        """Raises RunDirectoryError for a line that is JSON and no such record."""
        for block in self._file.blocks():
            for line in block.splitlines():
                self._number += 1
                try:
                    record = self._make(json.loads(line))
                except json.JSONDecodeError:  # the file was cut and has grown again: the offset is within a line
                    continue
                except _NO_RECORD:
                    raise _damaged(self._file.path, self._number, line) from None
                yield record


class Trace:
    """trace.jsonl as numpy columns. It may have millions of lines, so whole blocks are parsed at once."""

    def __init__(self, path: Path) -> None:
        self._file = _Growing(path)
        self._forget()

    def _forget(self) -> None:
        self._file.offset = 0
        self._pieces: dict[str, list[np.ndarray]] = {name: [] for name in (*_COLUMNS, "verdict")}

    def __len__(self) -> int:
        return sum(len(piece) for piece in self._pieces["time"])

    def __getitem__(self, name: str) -> np.ndarray:
        """A column of shape (arrivals,). A verdict in its column is its place in `VERDICTS`."""
        pieces = self._pieces[name]
        if len(pieces) > 1:
            pieces[:] = [np.concatenate(pieces)]
        return pieces[0] if pieces else np.empty(0, dtype=np.int8 if name == "verdict" else _COLUMNS[name])

    def read_new(self, *, from_start: bool = False) -> None:
        """Reads the lines since the last call; all lines if the file has become shorter.

        Raises RunDirectoryError for a line that does not belong in a trace.
        """
        path = self._file.path
        if from_start or (path.exists() and path.stat().st_size < self._file.offset):
            self._forget()
        for block in self._file.blocks():
            self._take(block)

    def _take(self, block: bytes) -> None:
        import pyarrow as pa
        from pyarrow import json as pa_json

        schema = pa.schema([(name, pa.from_numpy_dtype(kind)) for name, kind in _COLUMNS.items()])
        schema = schema.append(pa.field("verdict", pa.string()))
        parsing = pa_json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
        reading = pa_json.ReadOptions(block_size=len(block) + 1)
        try:
            table = pa_json.read_json(io.BytesIO(block), parse_options=parsing, read_options=reading)
        except pa.ArrowInvalid:
            raise self._damaged(block) from None
        codes = table["verdict"].combine_chunks().dictionary_encode()
        texts = codes.dictionary.to_pylist()
        holes = sum(table[name].null_count for name in (*_COLUMNS, "verdict") if name not in _OPTIONAL)
        if holes or not VERDICTS.keys() >= set(texts):
            raise self._damaged(block)
        versions, workers = table["version"].to_numpy(), table["worker"].to_numpy()
        are_more = (versions < 0) | (versions > len(self) + np.arange(len(versions)))  # than one for each line
        if are_more.any() or (workers < 0).any() or (workers > _MOST_WORKERS).any():  # they would take any memory
            raise self._damaged(block, int(np.argmax(are_more | (workers < 0) | (workers > _MOST_WORKERS))))
        places = np.array([list(VERDICTS).index(text) for text in texts], dtype=np.int8)
        self._pieces["verdict"].append(places[codes.indices.to_numpy()] if len(places) else places)
        for name, kind in _COLUMNS.items():
            column = table[name].fill_null(0) if name == "rows" else table[name]
            self._pieces[name].append(column.to_numpy().astype(kind, copy=False))

    def _damaged(self, block: bytes, known: int = 0) -> RunDirectoryError:
        """``known`` is a line that cannot be true, if all lines can be read."""
        lines = block.splitlines()
        for index, line in enumerate(lines):
            try:
                record = json.loads(line)
                needed = [key for key in _COLUMNS if key not in _OPTIONAL]
                if record["verdict"] in VERDICTS and all(record[key] is not None for key in needed):
                    continue
            except _NO_RECORD:
                pass
            return _damaged(self._file.path, len(self) + index + 1, line)
        return _damaged(self._file.path, len(self) + known + 1, lines[known])


class Recording:
    """Everything that a run has written so far. `refresh` reads what is new."""

    def __init__(self, directory: Path) -> None:
        self.directory, self._files = directory, RunFiles(directory, tolerant=True)
        self.config = self._files.config()
        self.trace = Trace(directory / TRACE)
        self.metrics: list[MetricsRow] = []
        self.members: list[Member] = []
        self.summary: Summary | None = None
        self.sample = ""  # that the trained language model has written
        self.commands: list[str] = []  # that began and resumed the run
        self._terms = -1
        self.refresh()

    def refresh(self) -> None:
        """Raises RunDirectoryError if there is nothing to show yet."""
        terms = self._files.size(TERMS)
        self.trace.read_new(from_start=terms != self._terms)
        self._terms = terms
        self.metrics = self._files.metrics()
        self.members = self._files.members()
        self.summary = self._files.summary()
        self.sample, self.commands = self._files.read(SAMPLE), self._files.read(COMMANDS).splitlines()
        if not self.metrics and not len(self.trace):
            raise RunDirectoryError(
                f"{self.directory} has nothing to show yet: neither trace.jsonl nor metrics.jsonl has a whole line"
            )

    @property
    def stamp(self) -> tuple[int, ...]:
        """Changes when there is something new to read."""
        return tuple(self._files.size(name) for name in (TRACE, METRICS, MEMBERS, SUMMARY, TERMS, SAMPLE, COMMANDS))

    @property
    def is_running(self) -> bool:
        return self._files.is_running()

    def changed(self, name: str) -> float:
        """When a file was last written, as `time.time` tells it; 0 if there is none."""
        path = self.directory / name
        return path.stat().st_mtime if path.exists() else 0.0

    def checkpoint_age(self, now: float) -> float | None:
        """The seconds since the newest checkpoint was written; None if there is none in the directory."""
        written = [path.stat().st_mtime for path in (self.directory / CHECKPOINTS).glob("*.safetensors")]
        return max(0.0, now - max(written)) if written else None

    @property
    def state(self) -> str:
        """How the run stands, in words."""
        if self.summary is None:
            return "running" if self.is_running else "ended without a summary"
        if self.summary.diverged:
            return "ended: diverged"
        return "finished" if self.summary.ended == "budget" else self.summary.ended

    @property
    def seconds(self) -> float:
        """How long the run has lasted, on its own clock."""
        times = self.trace["time"]
        last = float(times[-1]) if len(times) else 0.0
        return max(last, float(self.metrics[-1].time) if self.metrics else 0.0)

    def tokens_of_arrivals(self) -> np.ndarray:
        """The tokens of each gradient that arrived, of shape (arrivals,); zeros where the problem has no tokens."""
        if "batch" not in self.config["problem"]:  # it is not about text
            return np.zeros(len(self.trace), dtype=np.int64)
        length, dealt = self.config["model"]["sequence_len"], self.config["cluster"].get("batch")
        workers = range(int(self.trace["worker"].max()) + 1) if len(self.trace) else range(0)
        ranks = {member.worker: member.ranks for member in self.members}
        factors = np.array([length * ranks.get(worker, 1) for worker in workers], np.int64)
        if dealt != "auto":
            slots = {member.worker: member.slot for member in self.members}
            rows = dealt or [self.config["problem"]["batch"]]
            factors *= np.array([rows[slots.get(worker, worker) % len(rows)] for worker in workers], np.int64)
        tokens = np.take(factors, self.trace["worker"])
        return tokens * self.trace["rows"] if dealt == "auto" else tokens


def _damaged(path: Path, number: int, line: bytes) -> RunDirectoryError:
    shown = line[:60].decode(errors="replace")
    try:
        json.loads(line)
        fault = "is not a record of a run"
    except ValueError:
        fault = "is not JSON"
    return RunDirectoryError(
        f"{path} line {number} {fault}: {shown!r}; the file is damaged, still being written, or another program's"
    )


def _is_locked(path: Path) -> bool:
    """Whether a server holds the lock. It only looks, since a try could keep a server from getting the lock."""
    try:
        inode = path.stat().st_ino
        return any(line.split()[5].rpartition(":")[2] == str(inode) for line in Path("/proc/locks").open())
    except (OSError, IndexError):
        return False
