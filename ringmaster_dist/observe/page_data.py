"""What the page and the figures show of one or several runs, as plain values for JSON.

The report and the page of `watch` draw the same values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ringmaster_dist.observe import curves, measures, style
from ringmaster_dist.observe.measures import ACCEPTED
from ringmaster_dist.observe.records import VERDICTS, WorkerRow, WorkerSummary
from ringmaster_dist.observe.run_files import Recording
from ringmaster_dist.observe.timeline import KINDS, timelines

_MOST_WORKERS = 1_000_000  # of a run, over all its time
_LISTED_WORKERS = 64
_LABEL_KEYS = 4
_SECTIONS = ("method", "problem", "model", "data", "geometry", "cluster", "wire", "budget", "run")  # by interest
_OF_SOME_METHODS = ("method.threshold", "method.batch")
_UNINTERESTING = ("run.dir", "run.overwrite", "run.samples", "run.trace", "run.report")
_SAMPLE_CHARACTERS = 4000  # more of a sample is not shown


def page_data(recordings: Sequence[Recording]) -> dict[str, Any]:
    """Everything that the figures and the page show."""
    return {
        "kinds": KINDS,
        "kind_names": [style.kind_name(kind) for kind in KINDS],
        "runs": [_run(r, label) for r, label in zip(recordings, labels(recordings), strict=True)],
        "differing": _differing([flat(recording.config) for recording in recordings]),
    }


def labels(recordings: Sequence[Recording]) -> list[str]:
    """Names each run by the keys in which the configurations differ, or by its directory if none do."""
    names = [recording.directory.resolve().name for recording in recordings]
    if len(recordings) == 1:
        return names
    configs = [flat(recording.config) for recording in recordings]
    shown = _differing(configs)[:_LABEL_KEYS]
    texts = [", ".join(f"{_short(key)}={one[key]}" for key in shown if key in one) for one in configs]
    if len(set(texts)) < len(texts):
        texts = [f"{name}: {text}" if text else name for name, text in zip(names, texts, strict=True)]
    return texts if len(set(texts)) == len(texts) else [str(recording.directory) for recording in recordings]


def _differing(flat: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys in which the configurations differ, by interest."""
    keys = set.intersection(*(set(one) for one in flat)) | set(_OF_SOME_METHODS)
    keys = {key for key in keys if key.partition(".")[0] in _SECTIONS} - set(_UNINTERESTING)
    differing = [key for key in keys if len({str(one.get(key)) for one in flat}) > 1]
    return sorted(differing, key=lambda key: (not key.endswith(".name"), _SECTIONS.index(key.partition(".")[0]), key))


def _short(key: str) -> str:
    return key.removesuffix(".name").removeprefix("method.").removeprefix("cluster.")


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """The values of a nested mapping by their full keys, such as method.eta."""
    if not isinstance(tree, dict) or (prefix and not tree):
        return {prefix: tree}
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found.update(flat(value, f"{prefix}.{key}" if prefix else str(key)))
    return found


def _run(recording: Recording, label: str) -> dict[str, Any]:
    tokens = curves.tokens_so_far(recording)
    objective, evaluation = curves.evaluations(recording, tokens)
    workers = workers_of(recording)
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
        "delays": {**curves.delay_histogram(recording), "parts": measures.delay_parts(recording.trace)},
        "workers": workers[:_LISTED_WORKERS],
        "workers_omitted": max(0, len(workers) - _LISTED_WORKERS),
        "timeline": timelines(recording),
        "progress": _progress(recording),
        "measured": curves.measured(recording),
        "norms": curves.norms(recording),
        "rows": curves.rows_of_workers(recording),
        "sample": recording.sample[:_SAMPLE_CHARACTERS],
        "commands": recording.commands,
        "config": [[key, _shown(value)] for key, value in flat(recording.config).items()],
    }


def _progress(recording: Recording) -> dict[str, float | None] | None:
    """The part of the budget that is used up, and the seconds that are left; None if the run has ended."""
    if recording.state != "running":
        return None
    budget = recording.config.get("budget", {})
    limits = budget.get("updates"), budget.get("seconds")
    progress = measures.Progress.of(updates_of(recording), recording.seconds, *limits)
    if "simulation" in recording.config:  # virtual seconds do not say when it ends
        progress = progress._replace(seconds_left=None)
    return progress._asdict()


def _shown(value: Any) -> str:
    """A value of the configuration as it is written in YAML and in an override."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return ", ".join(map(str, value)).join("[]") if isinstance(value, list) else str(value)


def _totals(recording: Recording, workers: list[dict[str, Any]], tokens: np.ndarray | None) -> dict[str, Any]:
    trace, summary = recording.trace, recording.summary
    last = recording.metrics[-1] if recording.metrics else None
    counts = {name: int((trace["verdict"] == code).sum()) for code, name in enumerate(VERDICTS)}
    if not len(trace):
        counts = {name: getattr(last, name) for name in VERDICTS}
    updates = updates_of(recording)
    used, wasted = (sum(worker[key] for worker in workers) for key in ("used_seconds", "wasted_seconds"))
    return {
        "updates": summary.updates if summary else updates,
        "seconds": recording.seconds,
        **counts,
        "interrupted": summary.interrupted if summary else sum(worker["interrupted"] for worker in workers),
        "wasted_fraction": measures.wasted_fraction(used, wasted),
        "updates_per_second": measures.per_second(updates, recording.seconds),
        "tokens": int(tokens[-1]) if tokens is not None else None,
        "workers": summary.num_workers if summary else len(workers),
        "evaluation": evaluation_of(recording),
        "evaluated_on": summary.evaluated_on if summary else _validation(recording),
        "diverged": summary.diverged if summary else last is not None and last.diverged,
    }


def updates_of(recording: Recording) -> int:
    """The updates so far, of a run without a summary."""
    trace, measured = recording.trace, recording.metrics[-1].version if recording.metrics else 0
    if not len(trace):
        return measured
    averages = recording.config["method"]["name"] in ("rennala", "synchronous")
    made = not averages and trace["verdict"][-1] == ACCEPTED  # the last arrival has made an update of its own
    return max(measured, int(trace["version"][-1]) + int(made))


def evaluation_of(recording: Recording) -> dict[str, float]:
    """Every number of the last evaluation. That is the closing one, if the run has ended."""
    found: dict[str, float | None] = {}
    for row in recording.metrics:
        found.update(row.evaluation)
    if recording.summary:
        found.update(recording.summary.evaluation)
    return {name: value for name, value in found.items() if value is not None and curves.is_number(value)}


def _validation(recording: Recording) -> str:
    """What the evaluations during the run look at, in words; empty where that is not known."""
    problem = recording.config["problem"]
    return f"{problem['validation_rows']} validation rows" if "validation_rows" in problem else ""


def workers_of(recording: Recording) -> list[dict[str, Any]]:
    """Counts and seconds of each worker. What never arrived is known from the summary or the metrics alone."""
    trace, last = recording.trace, recording.metrics[-1] if recording.metrics else None
    listed: Mapping[str, WorkerSummary | WorkerRow] = (last.per_worker if last else None) or {}
    if recording.summary and recording.summary.per_worker:
        listed = recording.summary.per_worker
    own, accepted = trace["worker"], trace["verdict"] == ACCEPTED
    size = max([int(own.max()) if len(trace) else -1, *(int(name) for name in listed)], default=-1) + 1
    if size > _MOST_WORKERS:
        raise ValueError(f"a worker with the number {size - 1}")
    counts = [np.bincount(own[trace["verdict"] == code], minlength=size) for code in range(len(VERDICTS))]
    used, wasted = (np.bincount(own, weights=trace["compute_seconds"] * part, minlength=size)
                    for part in (accepted, ~accepted))  # fmt: skip
    last_sequence = np.full(size, -1, dtype=np.int64)
    np.maximum.at(last_sequence, own, trace["sequence"])
    rows = np.zeros(size, dtype=np.int64)
    rows[own] = trace["rows"]  # of the last arrival
    tau, total = measures.mean_compute_seconds(trace), int(counts[ACCEPTED].sum())
    devices = {member.worker: member.computed_on for member in recording.members}
    found = []
    for worker in range(size):
        arrived = int(sum(count[worker] for count in counts))
        known = listed.get(str(worker))
        if not arrived and not known:
            continue
        found.append(
            {
                "worker": worker,
                "device": devices.get(worker, ""),
                **{name: int(counts[code][worker]) for code, name in enumerate(VERDICTS)},
                "interrupted": known.interrupted if known else max(0, int(last_sequence[worker]) + 1 - arrived),
                "share": measures.share_of(int(counts[ACCEPTED][worker]), total),
                "tau": tau.get(worker),
                "rows": int(rows[worker]),
                "used_seconds": known.used_seconds if known else float(used[worker]),
                "wasted_seconds": known.wasted_seconds if known else float(wasted[worker]),
            }
        )
    return found
