"""A run's arrivals and measurements as short series, whatever the length of the run: a few hundred points each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ringmaster_dist.observe.recording import Recording
from ringmaster_dist.observe.trace import VERDICTS

_POINTS = 400  # of a curve
_BINS = 120  # of time, for rates and delays
_BARS = 48  # of a histogram
OBJECTIVES = ("gap", "loss")  # what an evaluation says, the first that is there
ACCEPTED, STALE, INVALID = (VERDICTS.index(name) for name in ("accepted", "stale", "invalid"))

Series = dict[str, list[float | None]]


def tokens_so_far(recording: Recording) -> np.ndarray | None:
    """Tokens of accepted gradients up to and with each arrival; None where the problem has none."""
    trace, slots = recording.trace, recording.slots()
    workers = trace["worker"]
    if not len(workers):
        return None
    per_worker = np.array([recording.tokens_per_gradient(w, slots) for w in range(int(workers.max()) + 1)])
    if not per_worker.any():
        return None
    return np.cumsum(np.where(trace["verdict"] == ACCEPTED, per_worker[workers], 0))


def training_loss(recording: Recording, tokens: np.ndarray | None) -> Series:
    """The loss of accepted gradients: means of equally many in a row."""
    trace = recording.trace
    kept = np.flatnonzero((trace["verdict"] == ACCEPTED) & np.isfinite(trace["loss"]))
    if not len(kept):
        rows = [row for row in recording.metrics if row.get("train_loss") is not None]
        return _of_rows(rows, "train_loss", recording, tokens)
    starts = np.unique(
        np.linspace(0, len(kept), min(_POINTS, max(40, len(kept) // 4), len(kept)), endpoint=False).astype(np.int64)
    )
    ends = np.append(starts[1:], len(kept)) - 1
    means = np.add.reduceat(trace["loss"][kept], starts) / (ends - starts + 1)
    last = kept[ends]
    return {
        "time": numbers(trace["time"][last]),
        "updates": numbers(trace["version"][last] + 1),
        **({"tokens": numbers(tokens[last])} if tokens is not None else {}),
        "value": numbers(means),
    }


def evaluations(recording: Recording, tokens: np.ndarray | None) -> tuple[str, Series]:
    """What was measured at the iterate itself, and its name: the gap, or the validation loss."""
    for name in OBJECTIVES:
        rows = [row for row in recording.metrics if is_number(row.get(name))]
        if rows:
            return name, _of_rows(rows, name, recording, tokens)
    return "", {"time": [], "updates": [], "value": []}


def _of_rows(rows: list[dict[str, Any]], key: str, recording: Recording, tokens: np.ndarray | None) -> Series:
    rows = rows[:: math.ceil(len(rows) / _POINTS)] + rows[-1:] if len(rows) > _POINTS else rows
    times = [row["time"] for row in rows]
    series: Series = {"time": numbers(times), "updates": numbers([row["version"] for row in rows])}
    if tokens is not None:
        series["tokens"] = numbers(np.interp(times, recording.trace["time"], tokens, left=0.0))
    return {**series, "value": numbers([row[key] for row in rows])}


def over_time(recording: Recording) -> Series:
    """Rates and delays in equal parts of the run's time."""
    trace, seconds = recording.trace, recording.seconds
    if not len(trace):
        return _rates_of_rows(recording)
    bins = min(_BINS, max(1, len(trace) // 4))
    edges = np.linspace(0.0, max(seconds, 1e-9), bins + 1)
    place = np.clip(np.searchsorted(edges, trace["time"], side="right") - 1, 0, bins - 1)
    width = edges[1] - edges[0]
    counts = {code: np.bincount(place[trace["verdict"] == code], minlength=bins) for code in range(len(VERDICTS))}
    arrived = sum(counts.values())
    some = np.where(arrived > 0, arrived, np.nan)
    versions = np.interp(edges, trace["time"], trace["version"] + (trace["verdict"] == ACCEPTED), left=0.0)
    delays = {name: np.full(bins, np.nan) for name in ("mean", "p95", "max")}
    order = np.argsort(place, kind="stable")
    bounds = np.searchsorted(place[order], np.arange(bins + 1))
    for index in np.flatnonzero(arrived):
        here = trace["delay"][order[bounds[index] : bounds[index + 1]]]
        delays["mean"][index], delays["p95"][index], delays["max"][index] = (
            here.mean(), np.quantile(here, 0.95), here.max())  # fmt: skip
    return {
        "time": numbers((edges[:-1] + edges[1:]) / 2),
        "accepted": numbers(counts[ACCEPTED] / some),
        "stale": numbers(counts[STALE] / some),
        "invalid": numbers(counts[INVALID] / some),
        "updates_per_second": numbers(np.diff(versions) / width),
        "gradients_per_second": numbers(arrived / width),
        **{f"delay_{name}": numbers(values) for name, values in delays.items()},
    }


def _rates_of_rows(recording: Recording) -> Series:
    """Where there is no trace: from the counts in the measurements."""
    rows = [row for row in recording.metrics if "accepted" in row]
    rows = rows[:: math.ceil(len(rows) / _BINS)] if len(rows) > _BINS else rows
    table = np.array([[row[key] for key in ("time", "version", *VERDICTS)] for row in rows], dtype=float)
    if len(table) < 2:
        return {"time": []}
    change, arrived = np.diff(table, axis=0), np.diff(table[:, 2:].sum(axis=1))
    some, width = np.where(arrived > 0, arrived, np.nan), np.maximum(change[:, 0], 1e-9)
    return {
        "time": numbers((table[1:, 0] + table[:-1, 0]) / 2),
        **{name: numbers(change[:, 2 + code] / some) for code, name in enumerate(VERDICTS)},
        "updates_per_second": numbers(change[:, 1] / width),
        "gradients_per_second": numbers(arrived / width),
    }


def thresholds(recording: Recording) -> Series:
    """R_k over time: as it was measured, else as it was configured; empty where there is none."""
    rows = [row for row in recording.metrics if is_number(row.get("threshold"))]
    if rows:
        return _of_rows(rows, "threshold", recording, None)
    given = recording.config["method"].get("threshold")
    times = [0.0, recording.seconds] if is_number(given) else []
    return {"time": numbers(times), "value": [given for _ in times]}


def delay_histogram(recording: Recording) -> dict[str, Any]:
    """Arrivals by delay and verdict. Bars are single delays as long as they are few, then equally wide."""
    trace = recording.trace
    if not len(trace):
        return {"low": [], "width": 1, **{name: [] for name in VERDICTS}}
    delays, most = trace["delay"], int(max(0, np.quantile(trace["delay"], 0.999, method="higher")))
    width = math.ceil((most + 1) / _BARS)
    bars = math.ceil((most + 1) / width)
    place = np.clip(delays // width, 0, bars - 1)  # the very last bar holds what lies beyond
    counts = {
        name: np.bincount(place[trace["verdict"] == code], minlength=bars).tolist()
        for code, name in enumerate(VERDICTS)
    }
    return {"low": [index * width for index in range(bars)], "width": width, "beyond": int(delays.max()), **counts}


def delay_parts(recording: Recording) -> dict[str, float]:
    """The mean delay of arrivals, split: updates made while the gradient was computed, and before or after that."""
    trace = recording.trace
    if not len(trace):
        return {}
    accepted = trace["verdict"] == ACCEPTED
    made = trace["time"][accepted]
    began = trace["time"] - trace["compute_seconds"]
    computing = np.searchsorted(made, trace["time"], side="left") - np.searchsorted(made, began, side="right")
    if recording.config["method"]["name"] in ("rennala", "synchronous"):  # several accepted ones make an update
        computing = np.minimum(computing, trace["delay"])
    computing = np.clip(computing, 0, trace["delay"])
    return {"compute": float(computing.mean()), "queue": float((trace["delay"] - computing).mean())}


def numbers(values: Sequence[float] | np.ndarray) -> list[float | None]:
    """For JSON: six digits, None for what is no number."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in np.asarray(values, float).tolist()]


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
