"""The figures of metrics.jsonl in wandb: their names by section, and the workspace that draws them.

The sections are progress, staleness, workers and system.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

AXES = ("version", "time", "tokens")  # against any of which the rest can be drawn
_PLOTTED_WORKERS = 16
_SECTIONS: dict[str, tuple[str, ...]] = {
    "progress": (
        "loss", "bits_per_byte", "gap", "train_loss", "accepted_loss", "updates_per_second", "gradients_per_second",
        "eta", "beta", "gradient_norm", "update_norm",
    ),
    "staleness": (
        "delay_mean", "delay_p50", "delay_p95", "delay_max", "delay_compute", "delay_queue", "queue_seconds",
        "threshold", "accepted", "stale", "invalid", "interrupted",
    ),
    "workers": ("workers", "used_seconds", "wasted_seconds", "lease_losses", "reconnects"),
    "system": (
        "update_seconds", "lock_wait_seconds", "memory_bytes", "bytes_received", "bytes_sent", "tunnel_bytes_received",
        "tunnel_bytes_sent", "refused_peers",
    ),
}  # fmt: skip
_SECTION_OF = {key: section for section, keys in _SECTIONS.items() for key in keys}
_AXIS = "version"
# What is drawn together; the rest of a section has a panel each.
_PANELS: dict[str, list[tuple[str, list[str]]]] = {
    "progress": [
        ("loss", ["loss", "train_loss"]),
        ("bits per byte", ["bits_per_byte"]),
        ("objective gap", ["gap"]),
        ("rates", ["updates_per_second", "gradients_per_second"]),
        ("step size", ["eta"]),
    ],
    "staleness": [
        ("delay", ["delay_mean", "delay_p50", "delay_p95", "delay_max", "threshold"]),
        ("delay by part", ["delay_compute", "delay_queue"]),
        ("verdicts", ["accepted", "stale", "invalid", "interrupted"]),
        ("seconds in queue and wire", ["queue_seconds"]),
    ],
    "workers": [
        ("live workers", ["workers"]),
        ("compute seconds", ["used_seconds", "wasted_seconds"]),
        ("lost leases and reconnections", ["lease_losses", "reconnects"]),
    ],
    "system": [
        ("server seconds", ["update_seconds", "lock_wait_seconds"]),
        ("memory", ["memory_bytes"]),
        ("bytes on the wire", ["bytes_received", "bytes_sent"]),
    ],
}
_PER_WORKER = {"seconds per gradient": "workers/tau/.*", "share of accepted work": "workers/share/.*"}


def flattened(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a row under their names. What is missing or null is left out."""
    values: dict[str, float] = {axis: row[axis] for axis in AXES if row.get(axis) is not None}
    for key, section in _SECTION_OF.items():
        value = row.get(key)
        if isinstance(value, Mapping):
            values.update({f"{section}/{key}/{name}": number for name, number in value.items()})
        elif value is not None:
            values[f"{section}/{key}"] = value
    for name, value in row.get("evaluation", {}).items():
        if name not in _SECTION_OF and value is not None:
            values[f"progress/{name}"] = value
    for worker, facts in list(row.get("per_worker", {}).items())[:_PLOTTED_WORKERS]:
        for key in ("tau", "share"):
            if facts.get(key) is not None:
                values[f"workers/{key}/{worker}"] = facts[key]
    return values


def histogram(pairs: Iterable[tuple[int, int]]) -> tuple[list[int], list[float]]:
    """Counts and edges of a histogram with one bar per delay."""
    counts = dict(pairs)
    delays = range(max(counts) + 1)
    return [counts.get(delay, 0) for delay in delays], [delay - 0.5 for delay in (*delays, len(delays))]


def worker_rows(per_worker: Mapping[str, Mapping[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """The columns and rows of a table with one row per worker."""
    columns = list(next(iter(per_worker.values()), {}))
    return ["worker", *columns], [[name, *(worker.get(c) for c in columns)] for name, worker in per_worker.items()]


def workspace(entity: str, project: str) -> Any:
    """Makes the workspace without saving it. Raises ImportError without the extra ``dashboard``."""
    import wandb_workspaces.reports.v2 as wr
    import wandb_workspaces.workspaces as ws

    sections = []
    for name, panels in _PANELS.items():
        drawn: list[Any] = [
            wr.LinePlot(title=title, x=_AXIS, y=[f"{name}/{key}" for key in keys]) for title, keys in panels
        ]
        if name == "progress":
            drawn.append(wr.LinePlot(title="loss against time", x="time", y=["progress/loss", "progress/train_loss"]))
            drawn.append(
                wr.LinePlot(title="loss against tokens", x="tokens", y=["progress/loss", "progress/train_loss"])
            )
        if name == "workers":
            drawn += [wr.LinePlot(title=title, x=_AXIS, metric_regex=regex) for title, regex in _PER_WORKER.items()]
        sections.append(ws.Section(name=name, panels=drawn, is_open=True))
    return ws.Workspace(entity=entity, project=project, name="ringmaster", sections=sections)


def specification(made: Any) -> str:
    """The workspace as the JSON that wandb would get."""
    return str(made._to_model().model_dump_json(by_alias=True, exclude_none=True, indent=2))
