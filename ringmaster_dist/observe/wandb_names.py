"""What the rows of metrics.jsonl are called in wandb: by the section of the dashboard they belong to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

AXES = ("version", "time", "tokens")  # against any of which the rest can be drawn
_PLOTTED_WORKERS = 16
SECTIONS: dict[str, tuple[str, ...]] = {
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
_SECTION_OF = {key: section for section, keys in SECTIONS.items() for key in keys}


def flattened(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a row under their names; what is missing or null is left out."""
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
    """Counts and edges, a bar per delay."""
    counts = dict(pairs)
    delays = range(max(counts) + 1)
    return [counts.get(delay, 0) for delay in delays], [delay - 0.5 for delay in (*delays, len(delays))]


def worker_rows(per_worker: Mapping[str, Mapping[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """A table: a row per worker."""
    columns = list(next(iter(per_worker.values()), {}))
    return ["worker", *columns], [[name, *(worker.get(c) for c in columns)] for name, worker in per_worker.items()]
