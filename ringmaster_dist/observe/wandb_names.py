"""The figures of metrics.jsonl in wandb: their names by section, and the workspace that draws them.

The sections are progress, staleness, workers and system.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

AXES = ("version", "time", "tokens")  # against any of which the rest can be drawn
_PLOTTED_WORKERS = 16
# Each section has its panels, and figures that no panel draws.
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
        ("memory", ["memory_bytes", "device_memory_bytes"]),
        ("bytes on the wire", ["bytes_received", "bytes_sent"]),
    ],
}
_NOT_DRAWN = {
    "progress": ["accepted_loss", "beta", "gradient_norm", "update_norm"],
    "system": ["tunnel_bytes_received", "tunnel_bytes_sent", "refused_peers"],
}
_SECTION_OF = {
    key: section
    for section, panels in _PANELS.items()
    for keys in (*(keys for _, keys in panels), _NOT_DRAWN.get(section, []))
    for key in keys
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


def histogram(pairs: Iterable[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """Counts of shape (delays,) and edges of shape (delays + 1,) of a histogram with one bar per delay."""
    delays, counts = np.array(list(pairs)).T
    return np.bincount(delays, weights=counts).astype(np.int64), np.arange(delays.max() + 2) - 0.5


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
            wr.LinePlot(title=title, x=AXES[0], y=[f"{name}/{key}" for key in keys]) for title, keys in panels
        ]
        if name == "progress":
            drawn.append(wr.LinePlot(title="loss against time", x="time", y=["progress/loss", "progress/train_loss"]))
            drawn.append(
                wr.LinePlot(title="loss against tokens", x="tokens", y=["progress/loss", "progress/train_loss"])
            )
        if name == "workers":
            drawn += [wr.LinePlot(title=title, x=AXES[0], metric_regex=regex) for title, regex in _PER_WORKER.items()]
        sections.append(ws.Section(name=name, panels=drawn, is_open=True))
    return ws.Workspace(entity=entity, project=project, name="ringmaster", sections=sections)


def specification(made: Any) -> str:
    """The workspace as the JSON that wandb would get."""
    return str(made._to_model().model_dump_json(by_alias=True, exclude_none=True, indent=2))
