"""What a monitoring system asks the watcher: ``/metrics`` in Prometheus' text format, and ``/healthz``.

Both are computed from the run's files, so they cost the server nothing. docs/metrics.md defines each name, and the
conditions of `health`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ringmaster_dist.observe import measures
from ringmaster_dist.observe.measures import ACCEPTED
from ringmaster_dist.observe.page_data import evaluation_of, updates_of, workers_of
from ringmaster_dist.observe.records import VERDICTS, MetricsRow
from ringmaster_dist.observe.run_files import MEMBERS, METRICS, TERMS, TRACE, Recording

CONTENT_TYPE = "text/plain; version=0.0.4"
_RECENT_SECONDS = 60.0  # of the run: delays and the training loss are those of this time
_PATIENCE_SECONDS = 300.0  # without progress
_PATIENCE_FACTOR = 3.0  # of the slowest gradient so far, and of the time between two rows of metrics
_MINUTE = 60.0  # in which a run without budget.seconds writes run.samples rows
_DELAYS = {"mean": None, "p50": 0.5, "p95": 0.95, "max": 1.0}

_Labels = Mapping[str, str]
_Samples = Sequence[tuple[_Labels, float | None]]


class Health(NamedTuple):
    """Whether the run is as it should be, and why."""

    good: bool
    reason: str


def health(recording: Recording, now: float) -> Health:
    """``now`` is the time of `time.time`."""
    summary = recording.summary
    if summary is not None:
        return Health(not summary.diverged, f"the run is over: {recording.state}")
    if not recording.is_running:
        return Health(False, "no server is at work")
    if not recording.seconds:  # the clock begins with the first gradient that a worker may compute
        return Health(True, "the server waits for its first workers")
    waits = live_workers(recording) == 0
    quiet = seconds_of_silence(recording, now) if waits else seconds_without_progress(recording, now)
    if quiet > patience(recording):
        return Health(False, f"no {'sign of life' if waits else 'accepted gradient'} for {quiet:.0f} s")
    return Health(True, "the server waits for workers" if waits else "the run makes progress")


def live_workers(recording: Recording) -> int | None:
    """The workers that have joined and not left; None for a simulation, which has no members."""
    if "simulation" in recording.config:
        return None
    if recording.summary is not None:
        return 0
    last = {member.worker: member.event for member in recording.members}
    return sum(event == "join" for event in last.values())


def seconds_without_progress(recording: Recording, now: float) -> float:
    """The seconds since a gradient was accepted, a worker joined or left, or the server was started."""
    trace = recording.trace
    accepted = np.flatnonzero(trace["verdict"] == ACCEPTED)
    later = float(trace["time"][-1] - trace["time"][accepted[-1]]) if len(accepted) else math.inf
    events = [now - recording.changed(TRACE) + later, now - recording.changed(MEMBERS), now - recording.changed(TERMS)]
    return max(0.0, min(events))


def seconds_of_silence(recording: Recording, now: float) -> float:
    """The seconds since the server wrote anything. It writes rows of metrics while the clock of the run runs."""
    return max(0.0, now - max(recording.changed(name) for name in (TRACE, METRICS, MEMBERS, TERMS)))


def patience(recording: Recording) -> float:
    """How long a run may make no progress: for the slow ones among the gradients, and among the rows of metrics."""
    config = recording.config
    seconds = config.get("budget", {}).get("seconds") or _MINUTE
    interval = float(seconds / config.get("run", {}).get("samples", 1))
    slowest = float(recording.trace["compute_seconds"].max()) if len(recording.trace) else 0.0
    return max(_PATIENCE_SECONDS, _PATIENCE_FACTOR * max(interval, slowest))


def exposition(recording: Recording, now: float) -> str:
    """The text of ``/metrics``. A figure that the run does not have is left out. ``now`` is as in `health`."""
    last = recording.metrics[-1] if recording.metrics else None
    lines = [*_of_the_run(recording, last, now), *_of_the_workers(recording)]
    if last is not None:
        lines += _of_the_server(last)
    return "".join(metric.text() for metric in lines)


def _of_the_run(recording: Recording, last: MetricsRow | None, now: float) -> list[_Metric]:
    config, recent = recording.config, recording.trace["time"] >= recording.seconds - _RECENT_SECONDS
    about = {"run": recording.directory.resolve().name, "method": config["method"]["name"],
             "problem": config["problem"]["name"]}  # fmt: skip
    evaluation = [({"name": name}, value) for name, value in evaluation_of(recording).items()]
    return [
        _Metric("info", "The run that is shown. The value is always 1.", [(about, 1)]),
        _one("healthy", "1 if /healthz answers 200, else 0.", health(recording, now).good),
        _one("seconds", "Seconds of the run so far, on its own clock.", recording.seconds),
        _one("version", "The version of the iterate.", last.version if last else None),
        _one("updates", "Updates so far. They fall if a server resumes from a checkpoint.", updates_of(recording)),
        _Metric("evaluation", "The last evaluation, by the name of the number.", evaluation),
        _one("train_loss", "The mean loss of gradients accepted in the last minute.", _recent_loss(recording, recent)),
        _Metric("delay_updates", "The delay of gradients that came in the last minute.", _delays(recording, recent)),
        _one("workers", "Workers that have joined and not left.", live_workers(recording)),
        _one("checkpoint_age_seconds", "The age of the newest checkpoint.", recording.checkpoint_age(now)),
        _one("progress_age_seconds", "Seconds without progress.", seconds_without_progress(recording, now)),
    ]


def _of_the_workers(recording: Recording) -> list[_Metric]:
    workers = [({"worker": str(worker["worker"])}, worker) for worker in workers_of(recording)]
    counts = [
        ({**name, "outcome": outcome}, worker["interrupted" if outcome == "stopped" else outcome])
        for name, worker in workers
        for outcome in (*VERDICTS, "stopped")
    ]
    return [
        _Metric("gradients", "Gradients so far by outcome. They fall as updates do.", counts),
        _Metric("gradient_seconds", "Mean seconds of a gradient.", [(name, worker["tau"]) for name, worker in workers]),
        _Metric("rows", "Rows of a gradient, if the server assigns rows.",
                [(name, worker["rows"] or None) for name, worker in workers]),
    ]  # fmt: skip


def _of_the_server(last: MetricsRow) -> list[_Metric]:
    """What the newest row of metrics.jsonl says."""
    return [
        _one("threshold_updates", "A gradient is accepted if its delay is below this.", last.threshold),
        _one("eta", "The step size of a gradient without delay.", last.eta),
        _one("diverged", "1 if the objective has diverged, else 0.", last.diverged),
        _one("memory_bytes", "Resident memory of the server's process.", last.memory_bytes),
        _one("received_bytes_total", "Payload received by this server process.", last.bytes_received, "counter"),
        _one("sent_bytes_total", "Payload sent by this server process.", last.bytes_sent, "counter"),
        _one("lease_losses_total", "Leases lost at this server process.", last.lease_losses, "counter"),
    ]


class _Metric(NamedTuple):
    name: str
    help: str
    samples: _Samples
    kind: str = "gauge"

    def text(self) -> str:
        """The metric in the text format; empty if there is no sample."""
        name = f"ringmaster_{self.name}"
        lines = [f"{name}{_labels(labels)} {_number(value)}\n" for labels, value in self.samples if value is not None]
        return f"# HELP {name} {self.help}\n# TYPE {name} {self.kind}\n{''.join(lines)}" if lines else ""


def _one(name: str, help: str, value: float | None, kind: str = "gauge") -> _Metric:
    """A metric without labels."""
    return _Metric(name, help, [({}, value)], kind)


def _recent_loss(recording: Recording, recent: np.ndarray) -> float | None:
    trace = recording.trace
    losses = trace["loss"][recent & (trace["verdict"] == ACCEPTED)]
    losses = losses[np.isfinite(losses)]
    return float(losses.mean()) if len(losses) else None


def _delays(recording: Recording, recent: np.ndarray) -> _Samples:
    delays = np.sort(recording.trace["delay"][recent])
    if not len(delays):
        return []
    return [({"statistic": name}, float(delays.mean()) if part is None else measures.quantile(delays, part))
            for name, part in _DELAYS.items()]  # fmt: skip


def _labels(labels: _Labels) -> str:
    """A value may hold anything, so what would end it is escaped."""
    if not labels:
        return ""
    escaped = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})
    return "{" + ",".join(f'{name}="{value.translate(escaped)}"' for name, value in labels.items()) + "}"


def _number(value: float) -> str:
    number = float(value)
    if math.isfinite(number):
        return f"{number:.15g}"
    return "NaN" if math.isnan(number) else "+Inf" if number > 0 else "-Inf"
