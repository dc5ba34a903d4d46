"""The records in the files of a run, with their keys in the order in which they are written.

Other programs read these files, so names and order stay. A reader ignores keys that it does not know. A key that an
older version did not write has its default here. Which version wrote a run is ``version_of_program`` in its summary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple, TypeVar

from ringmaster_dist import __version__
from ringmaster_dist.protocol import Device, Verdict

VERDICTS = {verdict.value: verdict for verdict in Verdict}
OBJECTIVES = ("gap", "loss")  # the first one that an evaluation has is the objective
_EVALUATED_BEFORE_0_3 = (*OBJECTIVES, "bits_per_byte")  # rows had these and no "evaluation"

T = TypeVar("T")


class Arrival(NamedTuple):
    """A line of trace.jsonl: a gradient that arrived, and its verdict."""

    time: float
    worker: int
    sequence: int
    gradient_version: int
    version: int
    delay: int
    verdict: Verdict
    loss: float | None
    compute_seconds: float
    term: int = 0  # real runs write it
    lost_version: int | None = None  # where the gradient was computed at a version that a restart has lost
    rows: int = 0  # of the gradient, where the server assigns rows

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Arrival:
        for name in ("worker", "sequence", "gradient_version", "version", "delay"):
            _require("int", values[name])
        return cls(
            values["time"], values["worker"], values["sequence"], values["gradient_version"], values["version"],
            values["delay"], VERDICTS[values["verdict"]], values["loss"], values["compute_seconds"],
            values.get("term", 0), values.get("lost_version"), values.get("rows", 0),
        )  # fmt: skip


class Member(NamedTuple):
    """A line of members.jsonl: a worker that joined or left."""

    worker: int
    event: str  # "join" or "leave"
    pushes: int  # that came before it
    slot: int
    device: str = ""  # such as cuda:0
    device_title: str = ""  # such as NVIDIA H100
    ranks: int = 1  # the number of processes that compute its gradients
    host: str = ""  # the name of its machine
    why: str = ""  # of a leave: "left", "lost its lease" or "was evicted"

    @property
    def computed_on(self) -> str:
        """The device in words. Empty if an older version wrote the line."""
        return str(Device(self.device, self.device_title))


class Term(NamedTuple):
    """A line of terms.jsonl: a start of the server, with the version and number of pushes that it began at."""

    term: int
    version: int
    pushes: int
    device: str = "cpu"  # that its updates were computed on
    precision: str = ""  # of their orthogonalisation; empty if the configuration says it


@dataclass
class WorkerRow:
    """One worker in a row of metrics.jsonl."""

    accepted: int = 0
    stale: int = 0
    invalid: int = 0
    interrupted: int = 0
    tau: float | None = None
    share: float = 0.0
    used_seconds: float = 0.0
    wasted_seconds: float = 0.0
    rows: int = 0  # of its next gradient; 0 where the server does not assign rows


@dataclass
class MetricsRow:
    """A row of metrics.jsonl; docs/metrics.md defines each figure. A simulation measures those of `_SIMULATED` only."""

    time: float
    version: int
    evaluation: dict[str, float | None] = field(default_factory=dict)  # empty in rows without one
    train_loss: float | None = None
    accepted_loss: float | None = None
    accepted: int = 0
    stale: int = 0
    invalid: int = 0
    interrupted: int | None = None
    workers: int | None = None
    updates_per_second: float | None = None
    gradients_per_second: float | None = None
    update_seconds: float | None = None
    lock_wait_seconds: float | None = None
    delay_mean: float | None = None
    delay_p50: int | None = None
    delay_p95: int | None = None
    delay_max: int | None = None
    delay_compute: float | None = None
    delay_queue: float | None = None
    delay_histogram: list[tuple[int, int]] | None = None
    queue_seconds: float | None = None
    threshold: float | None = None
    eta: float | None = None
    beta: float | None = None
    gradient_norm: dict[str, float] | None = None
    update_norm: dict[str, float] | None = None
    used_seconds: float | None = None
    wasted_seconds: float | None = None
    tokens: int | None = None
    bytes_received: int | None = None
    bytes_sent: int | None = None
    memory_bytes: int | None = None
    device_memory_bytes: int | None = None
    lease_losses: int | None = None
    reconnects: int | None = None
    tunnel_bytes_received: int | None = None
    tunnel_bytes_sent: int | None = None
    refused_peers: int | None = None
    per_worker: dict[str, WorkerRow] | None = None
    diverged: bool = False

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> MetricsRow:
        if not all(isinstance(values[key], int | float) for key in ("time", "version")):
            raise TypeError("time and version of a row are numbers")
        earlier = {name: values[name] for name in _EVALUATED_BEFORE_0_3 if name in values}
        row = parse(cls, {**values, "evaluation": values.get("evaluation", earlier)})
        if row.per_worker is not None:
            row.per_worker = {name: parse(WorkerRow, worker) for name, worker in values["per_worker"].items()}
        return row

    def to_json(self) -> dict[str, Any]:
        evaluation = finite(self.evaluation)
        nullable = _NULLABLE if self.workers is not None else ()
        if self.delay_mean is not None:  # gradients have arrived; perhaps none of them says how long it waited
            nullable = (*nullable, "queue_seconds")
        values = {name: getattr(self, name) for name in (_SIMULATED if self.workers is None else _MEASURED)}
        values |= {"evaluation": evaluation or None}
        if self.per_worker is not None:
            values["per_worker"] = {name: vars(worker) for name, worker in self.per_worker.items()}
        present = {name: value for name, value in values.items() if value is not None or name in nullable}
        return {**evaluation, **present}  # ours last, since an evaluation may have a figure named like one of ours


_MEASURED = tuple(item.name for item in fields(MetricsRow))
_SIMULATED = ("time", "version", "evaluation", "threshold", "accepted", "stale", "invalid", "diverged")
# In a row of a real run these are null where there is no such number. Others are left out then.
_NULLABLE = ("train_loss", "accepted_loss", "updates_per_second", "gradients_per_second", "update_seconds",
             "lock_wait_seconds", "threshold", "memory_bytes")  # fmt: skip


@dataclass
class WorkerSummary:
    """One worker in summary.json."""

    accepted: int = 0
    stale: int = 0
    invalid: int = 0
    base_seconds: float = 0.0  # its pace; 0 where it is not paced
    gradient_seconds: float = 0.0  # measured, the mean of those that arrived; 0 if none has
    interrupted: int = 0
    used_seconds: float = 0.0
    wasted_seconds: float = 0.0
    rows: int = 0  # of its last gradients; 0 where the server does not assign rows
    device: str = ""  # of a real worker
    device_title: str = ""

    @property
    def pushes(self) -> int:
        return self.accepted + self.stale + self.invalid

    def joined(self, later: WorkerSummary) -> WorkerSummary:
        """The figures of both, for a worker that was restarted."""
        both = replace(later)
        for name in ("accepted", "stale", "invalid", "interrupted", "used_seconds", "wasted_seconds"):
            setattr(both, name, getattr(self, name) + getattr(later, name))
        arrived = sum(one.gradient_seconds * one.pushes for one in (self, later))
        both.gradient_seconds = arrived / max(1, both.pushes)
        return both

    def to_json(self) -> dict[str, Any]:
        """The figures. A simulated worker has no device."""
        return {name: value for name, value in vars(self).items() if value != ""}


@dataclass
class Summary:
    """summary.json, the outcome of a run; docs/run-directory.md says what each key means."""

    method: str = ""
    problem: str = ""
    clock: str = ""
    ended: str = "ended"
    terms: int | None = None  # of a real run
    synchronous_updates: int = 0
    num_workers: int = 0
    profile: str = ""
    engine: str = ""
    updates: int = 0
    seconds: float = 0.0
    pushes: int = 0
    accepted: int = 0
    stale: int = 0
    invalid: int = 0
    interrupted: int = 0
    evaluation: dict[str, float | None] = field(default_factory=dict)  # in the file each has the prefix final_
    gradients_per_second: float = 0.0
    updates_per_second: float = 0.0
    wasted_fraction: float = 0.0
    wall_seconds: float = 0.0
    version_of_program: str = __version__
    per_worker: dict[str, WorkerSummary] = field(default_factory=dict)
    per_worker_omitted: int = 0
    diverged: bool = False
    evaluated_on: str = ""
    best_value: float | None = None  # the lowest objective of a real run that keeps the weights for it
    best_version: int | None = None

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Summary:
        summary = parse(cls, {"version_of_program": "", **values})
        summary.evaluation = {k.removeprefix("final_"): v for k, v in values.items() if k.startswith("final_")}
        workers: Mapping[str, Any] = values.get("per_worker", {})
        summary.per_worker = {name: parse(WorkerSummary, worker) for name, worker in workers.items()}
        return summary

    def to_json(self) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for name, value in vars(self).items():
            if name == "evaluation":
                values |= finite({f"final_{key}": number for key, number in value.items()})
            elif name == "per_worker":
                values[name] = {worker: figures.to_json() for worker, figures in value.items()}
            elif value is not None:
                values[name] = value
        return values


def objective_of(evaluation: Mapping[str, float | None]) -> str:
    """The name of the objective among the numbers of an evaluation; empty where none is there."""
    return next((name for name in OBJECTIVES if name in evaluation), "")


def finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values, with None for numbers that JSON does not have."""
    return {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in values.items()}


def parse(kind: type[T], values: Mapping[str, Any]) -> T:
    """The record with those of the values whose keys it knows.

    Raises TypeError if one that it needs is not there, or is of another type.
    """
    known = {name: value for name, value in values.items() if name in kind.__annotations__}
    for name, value in known.items():
        annotation = kind.__annotations__[name]
        _require(str(getattr(annotation, "__forward_arg__", annotation)), value)
    return kind(**known)


_TYPES: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "str": (str,), "bool": (bool,)}


def _require(annotation: str, value: Any) -> None:
    """Raises TypeError if the value is not of the type. Only the plain types are looked at."""
    if annotation in _TYPES and (
        not isinstance(value, _TYPES[annotation]) or (isinstance(value, bool) and annotation != "bool")
    ):
        raise TypeError(f"{value!r} is not of type {annotation}")
