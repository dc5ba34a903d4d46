"""What each worker did when, from the trace alone.

An arrival says when its gradient was begun (its time less its compute seconds) and what became of it. The trace does
not name what lies between a worker's arrivals. Where sequence numbers are missing, it was work that was stopped early.
Elsewhere the worker waited: for an answer, for a round, or for the wire.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ringmaster_dist.observe.curves import numbers
from ringmaster_dist.observe.measures import ACCEPTED
from ringmaster_dist.observe.records import VERDICTS
from ringmaster_dist.observe.run_files import Recording

KINDS = (*VERDICTS, "interrupted", "waiting")
_INTERRUPTED, _WAITING = KINDS.index("interrupted"), KINDS.index("waiting")
_ROWS = 32  # workers shown: half of them have most accepted gradients, the rest are spread evenly
_BINS = 300  # of the whole run
_CLOSE_ARRIVALS = 240  # in the closer look


class _Spans(NamedTuple):
    """The spans of time in which one worker did one thing: disjoint and in order. Arrays of shape (spans,)."""

    begin: np.ndarray
    end: np.ndarray
    kind: np.ndarray


def timelines(recording: Recording) -> dict[str, Any]:
    """The whole run in equal bins, and the spans of its last moments."""
    trace, seconds = recording.trace, recording.seconds
    names = _chosen(_known(recording), np.bincount(trace["worker"][trace["verdict"] == ACCEPTED]))
    if not len(trace) or seconds <= 0:
        return {"workers": [], "seconds": seconds, "shares": [], "close": {"begin": 0.0, "end": 0.0, "spans": []}}
    edges = np.linspace(0.0, seconds, _BINS + 1)
    order = np.argsort(trace["worker"], kind="stable")
    bounds = {w: np.searchsorted(trace["worker"][order], [w, w + 1]) for w in names}
    spans = {w: _spans(recording, w, order[slice(*bounds[w])]) for w in names}
    close = _close_window(recording, names)
    return {
        "workers": names,
        "seconds": seconds,
        "shares": [[numbers(row) for row in _shares(spans[w], edges)] for w in names],
        "close": {"begin": close[0], "end": close[1], "spans": _within(spans, names, *close)},
    }


def _known(recording: Recording) -> list[int]:
    """Every worker that sent something, or that the summary lists."""
    listed = {int(name) for name in recording.summary.per_worker} if recording.summary else set()
    return sorted(listed | {int(worker) for worker in np.unique(recording.trace["worker"])})


def _chosen(workers: list[int], accepted: np.ndarray) -> list[int]:
    if len(workers) <= _ROWS:
        return workers
    busiest = set(np.argsort(-accepted, kind="stable")[: _ROWS // 2].tolist()) & set(workers)
    rest = [worker for worker in workers if worker not in busiest]
    return sorted(busiest | {rest[index] for index in np.linspace(0, len(rest) - 1, _ROWS - len(busiest)).astype(int)})


def _spans(recording: Recording, worker: int, mine: np.ndarray) -> _Spans:
    trace = recording.trace
    known = recording.summary.per_worker.get(str(worker)) if recording.summary else None
    stopped = known.interrupted if known else 0
    if not len(mine):  # nothing of it arrived
        only = _INTERRUPTED if stopped else _WAITING
        return _Spans(np.zeros(1), np.array([recording.seconds]), np.array([only]))
    arrived, sequence = trace["time"][mine], trace["sequence"][mine]
    began = np.maximum(arrived - trace["compute_seconds"][mine], 0.0)
    before = np.concatenate(([0.0], arrived[:-1]))
    began = np.maximum(began, before)
    missing = np.diff(sequence, prepend=-1) > 1
    begin = np.stack([before, began], axis=1).ravel()
    end = np.stack([began, arrived], axis=1).ravel()
    kind = np.stack([np.where(missing, _INTERRUPTED, _WAITING), trace["verdict"][mine]], axis=1).ravel()
    counted = int(np.diff(sequence, prepend=-1).sum()) - len(sequence)
    if stopped > counted:  # its last gradient was stopped too
        begin, end = np.append(begin, arrived[-1]), np.append(end, recording.seconds)
        kind = np.append(kind, _INTERRUPTED)
    return _Spans(begin, end, kind)


def _shares(spans: _Spans, edges: np.ndarray) -> list[np.ndarray]:
    """The fraction of each bin that each kind takes, as arrays of shape (bins,)."""
    width = edges[1] - edges[0]
    shares = []
    for code in range(len(KINDS)):
        own = spans.kind == code
        corners = np.stack([spans.begin[own], spans.end[own]], axis=1).ravel()
        done = np.cumsum(np.stack([np.zeros(own.sum()), spans.end[own] - spans.begin[own]], axis=1).ravel())
        covered = np.interp(edges, corners, done) if len(corners) else np.zeros(len(edges))
        shares.append(np.round(np.diff(covered) / width, 3))
    return shares


def _close_window(recording: Recording, names: list[int]) -> tuple[float, float]:
    """The end of the run, long enough for `_CLOSE_ARRIVALS` arrivals of the workers shown."""
    trace = recording.trace
    mine = trace["time"][np.isin(trace["worker"], names)] if len(names) < _ROWS else trace["time"]
    first = mine[max(0, len(mine) - _CLOSE_ARRIVALS)] if len(mine) else 0.0
    return float(first), recording.seconds


def _within(spans: dict[int, _Spans], names: list[int], begin: float, end: float) -> list[list[float]]:
    """``[row, begin, end, kind]`` of each span in a window. Spans that are too short to see are left out."""
    found: list[list[float]] = []
    least = (end - begin) / 3000
    for row, worker in enumerate(names):
        own = spans[worker]
        seen = (own.end > begin) & (own.begin < end) & (own.end - own.begin > least)
        for low, high, kind in zip(own.begin[seen], own.end[seen], own.kind[seen], strict=True):
            found.append([row, float(f"{max(low, begin):.7g}"), float(f"{min(high, end):.7g}"), int(kind)])
    return found
