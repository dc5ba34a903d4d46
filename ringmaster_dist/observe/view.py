"""What there is to see of one or several runs, as plain values for JSON: the report and the live page draw the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ringmaster_dist.observe import curves
from ringmaster_dist.observe.recording import Recording
from ringmaster_dist.observe.timeline import KINDS, timelines
from ringmaster_dist.observe.trace import VERDICTS

_LISTED_WORKERS = 64
_LABEL_KEYS = 4
_SECTIONS = ("method", "problem", "model", "data", "geometry", "cluster", "wire", "budget", "run")  # by interest
_OF_SOME_METHODS = ("method.threshold", "method.batch")
_UNINTERESTING = ("run.dir", "run.overwrite", "run.samples", "run.trace", "run.report")


def view(recordings: Sequence[Recording]) -> dict[str, Any]:
    """Everything the figures and the page show."""
    return {
        "kinds": KINDS,
        "runs": [_run(r, label) for r, label in zip(recordings, labels(recordings), strict=True)],
    }


def labels(recordings: Sequence[Recording]) -> list[str]:
    """The configuration keys in which the runs differ; their directories' names where that does not tell them apart."""
    names = [recording.directory.resolve().name for recording in recordings]
    if len(recordings) == 1:
        return names
    flat = [_flat(recording.config) for recording in recordings]
    keys = set.intersection(*(set(one) for one in flat)) | set(_OF_SOME_METHODS)
    keys = {key for key in keys if key.partition(".")[0] in _SECTIONS} - set(_UNINTERESTING)
    differing = [key for key in keys if len({str(one.get(key)) for one in flat}) > 1]
    shown = sorted(differing, key=lambda key: (not key.endswith(".name"), _SECTIONS.index(key.partition(".")[0]), key))
    shown = shown[:_LABEL_KEYS]
    texts = [", ".join(f"{_short(key)}={one[key]}" for key in shown if key in one) for one in flat]
    if len(set(texts)) < len(texts):
        texts = [f"{name}: {text}" if text else name for name, text in zip(names, texts, strict=True)]
    return texts if len(set(texts)) == len(texts) else [str(recording.directory) for recording in recordings]


def _short(key: str) -> str:
    return key.removesuffix(".name").removeprefix("method.").removeprefix("cluster.")


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix: tree}
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found.update(_flat(value, f"{prefix}.{key}" if prefix else str(key)))
    return found


def _run(recording: Recording, label: str) -> dict[str, Any]:
    tokens = curves.tokens_so_far(recording)
    objective, evaluation = curves.evaluations(recording, tokens)
    workers = _workers(recording)
    return {
        "label": label,
        "name": recording.directory.resolve().name,
        "directory": str(recording.directory),
        "state": recording.state,
        "clock": "virtual" if "simulation" in recording.config else "real",
        "method": recording.config["method"]["name"],
        "problem": recording.config["problem"]["name"],
        "threshold": curves.thresholds(recording),
        "totals": _totals(recording, workers, tokens),
        "objective": objective,
        "validation": _validation(recording),
        "evaluation": evaluation,
        "training": curves.training_loss(recording, tokens),
        "over_time": curves.over_time(recording),
        "delays": {**curves.delay_histogram(recording), "parts": curves.delay_parts(recording)},
        "workers": workers[:_LISTED_WORKERS],
        "workers_omitted": max(0, len(workers) - _LISTED_WORKERS),
        "timeline": timelines(recording),
    }


def _totals(recording: Recording, workers: list[dict[str, Any]], tokens: np.ndarray | None) -> dict[str, Any]:
    trace, summary = recording.trace, recording.summary
    last = recording.metrics[-1] if recording.metrics else {}
    verdicts = trace["verdict"]
    counts = {name: int((verdicts == code).sum()) for code, name in enumerate(VERDICTS)}
    if not len(trace):
        counts = {name: int(last.get(name, 0)) for name in VERDICTS}
    seconds = recording.seconds
    updates = max([int(last.get("version", 0)), *(trace["version"] + (verdicts == curves.ACCEPTED))[-1:].tolist()])
    if recording.config["method"]["name"] in ("rennala", "synchronous"):
        updates = max(int(last.get("version", 0)), *trace["version"][-1:].tolist(), 0)
    used, wasted = (sum(worker[key] for worker in workers) for key in ("used_seconds", "wasted_seconds"))
    return {
        "updates": int(summary.get("updates", updates)),
        "seconds": seconds,
        **counts,
        "interrupted": int(summary.get("interrupted", sum(worker["interrupted"] for worker in workers))),
        "wasted_fraction": wasted / (used + wasted) if used + wasted else 0.0,
        "updates_per_second": updates / seconds if seconds else 0.0,
        "tokens": int(tokens[-1]) if tokens is not None else None,
        "workers": int(summary.get("num_workers", len(workers))),
        "evaluation": _evaluation(recording),
        "evaluated_on": _evaluated_on(recording),
        "diverged": bool(summary.get("diverged", last.get("diverged", False))),
    }


def _evaluation(recording: Recording) -> dict[str, float]:
    """Every number of the last evaluation: the closing one, where the run has ended."""
    found: dict[str, float] = {}
    for row in recording.metrics:
        earlier = {key: row[key] for key in (*curves.OBJECTIVES, "bits_per_byte") if key in row}  # versions before 0.3
        found.update(row.get("evaluation", earlier))
    found.update({k.removeprefix("final_"): v for k, v in recording.summary.items() if k.startswith("final_")})
    return {name: value for name, value in found.items() if curves.is_number(value)}


def _evaluated_on(recording: Recording) -> str:
    """What the last evaluation has looked at, in words."""
    return str(recording.summary.get("evaluated_on", "")) if recording.summary else _validation(recording)


def _validation(recording: Recording) -> str:
    """What the evaluations during the run look at, in words; empty where that is not known."""
    problem = recording.config["problem"]
    return f"{problem.get('validation_rows', 0)} validation rows" if problem["name"] == "nanochat" else ""


def _workers(recording: Recording) -> list[dict[str, Any]]:
    """Counts and seconds of each worker: from the trace, and of what never arrived from the summary or metrics."""
    trace = recording.trace
    rows = recording.metrics[-1] if recording.metrics else {}
    listed = recording.summary.get("per_worker") or rows.get("per_worker") or {}
    size = max([int(trace["worker"].max()) if len(trace) else -1, *(int(name) for name in listed)], default=-1) + 1
    own = trace["worker"]
    counts = [np.bincount(own[trace["verdict"] == code], minlength=size) for code in range(len(VERDICTS))]
    seconds = [np.bincount(own, weights=trace["compute_seconds"] * taken, minlength=size)
               for taken in (trace["verdict"] == curves.ACCEPTED, trace["verdict"] != curves.ACCEPTED)]  # fmt: skip
    last = np.full(size, -1, dtype=np.int64)
    np.maximum.at(last, own, trace["sequence"])
    total = max(1, int(counts[curves.ACCEPTED].sum()))
    found = []
    for worker in range(size):
        arrived = int(sum(count[worker] for count in counts))
        known = listed.get(str(worker), {})
        if not arrived and not known:
            continue
        spent = float(seconds[0][worker] + seconds[1][worker])
        found.append(
            {
                "worker": worker,
                **{name: int(counts[code][worker]) for code, name in enumerate(VERDICTS)},
                "interrupted": int(known.get("interrupted", max(0, last[worker] + 1 - arrived))),
                "share": float(counts[curves.ACCEPTED][worker]) / total,
                "tau": spent / arrived if arrived else None,
                "used_seconds": float(known.get("used_seconds", seconds[0][worker])),
                "wasted_seconds": float(known.get("wasted_seconds", seconds[1][worker])),
            }
        )
    return found
