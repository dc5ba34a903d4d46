"""A run's arrivals and measurements as short series: a few hundred points each, however long the run is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ringmaster_dist.observe.measures import ACCEPTED, INVALID, STALE, quantile
from ringmaster_dist.observe.records import OBJECTIVES, VERDICTS, MetricsRow
from ringmaster_dist.observe.run_files import Recording

_POINTS = 400  # of a curve
_BINS = 120  # of time, for rates and delays
_FAR_ABOVE = 3  # times the largest delay: a threshold beyond that is not drawn
_BARS = 48  # of a histogram
_WORKER_LINES = 7  # of a figure with a line for each worker

Series = dict[str, list[float | None]]


def tokens_so_far(recording: Recording) -> np.ndarray | None:
    """Tokens of accepted gradients up to and with each arrival; None where the problem has none."""
    trace, tokens = recording.trace, recording.tokens_of_arrivals()
    if not tokens.any():
        return None
    return np.cumsum(np.where(trace["verdict"] == ACCEPTED, tokens, 0))


def training_loss(recording: Recording, tokens: np.ndarray | None) -> Series:
    """The loss of accepted gradients, as means over runs of equally many gradients."""
    trace = recording.trace
    kept = np.flatnonzero((trace["verdict"] == ACCEPTED) & np.isfinite(trace["loss"]))
    if not len(kept):
        measured = [(row, row.train_loss) for row in recording.metrics if is_number(row.train_loss)]
        return _of_rows(measured, recording, tokens)
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
    """The objective as evaluations have measured it, and its name: the gap, or the validation loss."""
    for name in OBJECTIVES:
        measured = [(row, row.evaluation.get(name)) for row in recording.metrics]
        measured = [(row, value) for row, value in measured if is_number(value)]
        if measured:
            return name, _of_rows(measured, recording, tokens)
    return "", {"time": [], "updates": [], "value": []}


def _of_rows(
    measured: list[tuple[MetricsRow, float | None]], recording: Recording, tokens: np.ndarray | None
) -> Series:
    """A series of one figure of the rows, given with each row."""
    if len(measured) > _POINTS:
        measured = measured[:: math.ceil(len(measured) / _POINTS)] + measured[-1:]
    times = [row.time for row, _ in measured]
    series: Series = {"time": numbers(times), "updates": numbers([row.version for row, _ in measured])}
    if tokens is not None:
        series["tokens"] = numbers(np.interp(times, recording.trace["time"], tokens, left=0.0))
    return {**series, "value": numbers([value or 0.0 for _, value in measured])}


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
        here = np.sort(trace["delay"][order[bounds[index] : bounds[index + 1]]])
        delays["mean"][index], delays["p95"][index], delays["max"][index] = here.mean(), quantile(here, 0.95), here[-1]
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
    """The same from the counts in the measurements, for a run without a trace."""
    rows = recording.metrics
    rows = rows[:: math.ceil(len(rows) / _BINS)] if len(rows) > _BINS else rows
    table = np.array([[getattr(row, key) for key in ("time", "version", *VERDICTS)] for row in rows], dtype=float)
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
    """The threshold R_k over time, as it was measured or else configured; empty where there is none.

    A measured one that is far above all delays is left out, since it would hide them in a figure.
    """
    measured = [(row, row.threshold) for row in recording.metrics if is_number(row.threshold)]
    if measured:
        most = _FAR_ABOVE * max(1, int(recording.trace["delay"].max())) if len(recording.trace) else math.inf
        return _of_rows([(row, value) for row, value in measured if (value or 0.0) <= most], recording, None)
    given = recording.config["method"].get("threshold")
    times = [0.0, recording.seconds] if is_number(given) else []
    return {"time": numbers(times), "value": [given for _ in times]}


def measured(recording: Recording) -> Series:
    """The step size and the server's memory over time, as the rows have them. A figure that no row has is left out."""
    rows = _spread(recording.metrics)
    found: Series = {"time": numbers([row.time for row in rows])}
    for name in ("eta", "memory_bytes", "device_memory_bytes"):
        values = [getattr(row, name) for row in rows]
        if any(is_number(value) for value in values):
            found[name] = numbers([value if is_number(value) else math.nan for value in values])
    return found


def norms(recording: Recording) -> dict[str, Any]:
    """The Euclidean norms of gradients and updates over time: of each role, and of all parameters together."""
    rows = _spread([row for row in recording.metrics if row.gradient_norm and row.update_norm])
    found: dict[str, Any] = {"time": numbers([row.time for row in rows])}
    for name in ("gradient", "update"):
        by_role = [getattr(row, f"{name}_norm") for row in rows]
        roles = {role: numbers([norm.get(role, math.nan) for norm in by_role]) for role in (by_role or [{}])[0]}
        found[name] = {"all": numbers([math.hypot(*norm.values()) for norm in by_role]), **roles}
    return found


def rows_of_workers(recording: Recording) -> dict[str, Any]:
    """The rows of each worker's gradients over time, if the server assigns rows. Of many workers it is their range."""
    rows = _spread([row for row in recording.metrics if row.per_worker])
    table = [{worker: figures.rows for worker, figures in (row.per_worker or {}).items()} for row in rows]
    if not any(any(given.values()) for given in table):
        return {"time": [], "lines": []}
    workers, lines = list(table[-1]), dict[str, list[float]]()
    if len(workers) <= _WORKER_LINES:
        for worker in workers:
            lines[f"worker {worker}"] = [given.get(worker) or math.nan for given in table]
    else:
        counts = [sorted(float(count) for count in given.values() if count) or [math.nan] for given in table]
        lines["most"] = [some[-1] for some in counts]
        lines["median"] = [float(np.median(some)) for some in counts]
        lines["least"] = [some[0] for some in counts]
    return {
        "time": numbers([row.time for row in rows]),
        "lines": [{"label": label, "value": numbers(values)} for label, values in lines.items()],
    }


def _spread(rows: list[MetricsRow]) -> list[MetricsRow]:
    """At most as many rows as a curve has points, with the last."""
    return rows[:: math.ceil(len(rows) / _POINTS)] + rows[-1:] if len(rows) > _POINTS else rows


def delay_histogram(recording: Recording) -> dict[str, Any]:
    """Arrivals by delay and verdict. A bar is one delay, or several if there would be too many bars."""
    trace = recording.trace
    if not len(trace):
        return {"low": [], "width": 1, **{name: [] for name in VERDICTS}}
    delays, most = trace["delay"], int(max(0, np.quantile(trace["delay"], 0.999, method="higher")))
    width = math.ceil((most + 1) / _BARS)
    bars = math.ceil((most + 1) / width)
    place = np.clip(delays // width, 0, bars - 1)  # the last bar also holds larger delays
    counts = {
        name: np.bincount(place[trace["verdict"] == code], minlength=bars).tolist()
        for code, name in enumerate(VERDICTS)
    }
    return {"low": [index * width for index in range(bars)], "width": width, "beyond": int(delays.max()), **counts}


def numbers(values: Sequence[float] | np.ndarray) -> list[float | None]:
    """The values for JSON: six digits, and None for what is not finite."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in np.asarray(values, float).tolist()]


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
