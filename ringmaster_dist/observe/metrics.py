"""What is measured of a run: the rows of metrics.jsonl of a real run, and the summary of any run.

`Metrics.arrival` is called for every gradient, under the service's lock, so it does little: it appends to lists and
updates two smoothed figures. Everything else is computed by the thread that makes a row, from what the service has
measured under its lock. Norms need passes over the parameters. They are taken of one gradient and one update now and
then, so rarely that they cost at most a two-hundredth of the time.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ringmaster_dist import quantized
from ringmaster_dist.algorithm.layout import Layout
from ringmaster_dist.observe import measures
from ringmaster_dist.observe.records import MetricsRow, Summary, WorkerRow, WorkerSummary
from ringmaster_dist.protocol import Push, Receipt, Snapshot, Verdict
from ringmaster_dist.server.core import ServerCore
from ringmaster_dist.server.meter import Measurements, WorkerMeasurements

_WORKERS_IN_ROW, _WORKERS_IN_SUMMARY = 64, 1000  # the first ones
_LISTED_DELAYS = 64  # single ones in a histogram; those above are counted as this
_REMEMBERED_UPDATES = 1 << 15
_NORMS_FRACTION = 1 / 200  # of the time, at most
_PAGE_BYTES = 4096
_Noted = tuple[float, int, int, float, bool]  # of an arrival: seconds, version, delay, compute_seconds, accepted
_Counts = tuple[float, int, int, int, float, int, float]  # what rates are taken of


class Metrics:
    """Takes note of arrivals and makes rows for metrics.jsonl."""

    def __init__(
        self, layout: Layout, first_version: int, tokens_of: Callable[[WorkerMeasurements], int] = lambda worker: 0
    ) -> None:
        """``tokens_of`` gives the tokens of a worker's accepted gradients."""
        self.train_loss: float | None = None  # of accepted gradients, smoothed
        self.accepted_loss: float | None = None  # of the newest
        self._lock = threading.Lock()  # between `arrival` and `row`, which different threads call
        self._tokens_of = tokens_of
        self._groups = _groups(layout)
        self._arrivals: list[_Noted] = []  # since the last row
        self._queue_seconds: list[float] = []  # since the last row
        self._last: dict[int, tuple[int, float]] = {}  # sequence and time of each worker's last arrival
        self._tau: dict[int, float] = {}
        self._updates = measures.UpdateTimes(first_version, _REMEMBERED_UPDATES)
        self._gradient: torch.Tensor | None = None
        self._norms_at = 0.0  # when they may be computed again
        self._before: _Counts = (0.0, first_version, 0, 0, 0.0, 0, 0.0)

    def arrival(self, seconds: float, worker: int, push: Push, receipt: Receipt) -> None:
        compute_seconds, accepted = push.compute_seconds, receipt.verdict is Verdict.ACCEPTED
        with self._lock:
            self._arrivals.append((seconds, receipt.version, receipt.delay, compute_seconds, accepted))
            sequence, last_seconds = self._last.get(worker, (-1, 0.0))
            if push.sequence == sequence + 1 and sequence >= 0:
                self._queue_seconds.append(max(0.0, seconds - last_seconds - compute_seconds))
            self._last[worker] = push.sequence, seconds
            self._tau[worker] = measures.smoothed_tau(self._tau.get(worker), compute_seconds)
            if accepted:
                if math.isfinite(push.loss):
                    self.train_loss, self.accepted_loss = measures.smoothed_loss(self.train_loss, push.loss), push.loss
                if self._gradient is None:
                    self._gradient = push.gradient

    def row(
        self,
        measured: Measurements,
        evaluation: Mapping[str, float],
        counts: Mapping[str, int],
        *,
        diverged: bool = False,
    ) -> MetricsRow:
        """Makes a row. Its rates and delays are those since the last one. ``counts`` are the transport's."""
        with self._lock:
            arrivals, self._arrivals = self._arrivals, []
            queues, self._queue_seconds = self._queue_seconds, []
            tau, gradient = dict(self._tau), self._gradient
            train_loss, accepted_loss = self.train_loss, self.accepted_loss
        meter = measured.meter
        per_worker = {
            worker.worker: WorkerRow(
                worker.accepted, worker.stale, worker.invalid, worker.interruptions.num, tau.get(worker.worker),
                measures.share_of(worker.accepted, measured.accepted), worker.used_seconds, worker.wasted_seconds,
                worker.rows,
            )
            for worker in measured.workers
        }  # fmt: skip
        rates = self._rates(
            (measured.seconds, measured.version, measured.pushes, meter.num_updates, meter.update_seconds,
             meter.num_pushes, meter.lock_wait_seconds)
        )  # fmt: skip
        return MetricsRow(
            time=measured.seconds,
            version=measured.computed_version,
            evaluation=dict(evaluation),
            train_loss=train_loss,
            accepted_loss=accepted_loss,
            accepted=measured.accepted,
            stale=measured.stale,
            invalid=measured.invalid,
            interrupted=sum(worker.interrupted for worker in per_worker.values()),
            workers=measured.num_live,
            **rates,
            **self._delays(arrivals, queues),
            threshold=measured.threshold if math.isfinite(measured.threshold) else None,
            eta=measured.eta,
            beta=1.0 - measured.alpha,
            **self._norms(gradient, meter.kept),
            used_seconds=sum(worker.used_seconds for worker in per_worker.values()),
            wasted_seconds=sum(worker.wasted_seconds for worker in per_worker.values()),
            tokens=sum(self._tokens_of(worker) for worker in measured.workers),
            bytes_received=meter.bytes_received,
            bytes_sent=meter.bytes_sent,
            memory_bytes=_resident_bytes(),
            device_memory_bytes=measured.device_memory_bytes,
            lease_losses=meter.lease_losses,
            reconnects=max(0, counts["pipes"] - meter.num_joined),
            tunnel_bytes_received=counts["received"],
            tunnel_bytes_sent=counts["sent"],
            refused_peers=counts["refused"],
            per_worker={str(worker): per_worker[worker] for worker in list(per_worker)[:_WORKERS_IN_ROW]},
            diverged=diverged,
        )

    def _rates(self, now: _Counts) -> dict[str, Any]:
        passed, versions, pushes, updates, computing, asked, waiting = (
            new - old for new, old in zip(now, self._before, strict=True)
        )
        self._before = now
        return {
            "updates_per_second": versions / passed if passed > 0 else None,
            "gradients_per_second": pushes / passed if passed > 0 else None,
            "update_seconds": computing / updates if updates else None,
            "lock_wait_seconds": waiting / asked if asked else None,
        }

    def _delays(self, arrivals: list[_Noted], queues: list[float]) -> dict[str, Any]:
        if not arrivals:
            return {}
        seconds, versions, delays, compute_seconds, accepted = (
            np.array(column) for column in zip(*arrivals, strict=True)
        )
        self._updates.add(seconds, versions, accepted)
        computing = int(self._updates.computing_part(seconds, versions, delays, compute_seconds).sum())
        ordered, count, total = np.sort(delays), len(delays), int(delays.sum())
        histogram = Counter(min(delay, _LISTED_DELAYS) for delay in delays.tolist())
        return {
            "delay_mean": total / count,
            "delay_p50": measures.quantile(ordered, 0.5),
            "delay_p95": measures.quantile(ordered, 0.95),
            "delay_max": measures.quantile(ordered, 1.0),
            "delay_compute": computing / count,
            "delay_queue": (total - computing) / count,
            "delay_histogram": sorted(histogram.items()),
            "queue_seconds": sum(queues) / len(queues) if queues else None,
        }

    def _norms(self, gradient: torch.Tensor | None, kept: tuple[Snapshot, Snapshot] | None) -> dict[str, Any]:
        """The norms by role of one gradient and one update: the first since the last norms. Empty if none are due."""
        began = time.monotonic()
        if gradient is None or kept is None or began < self._norms_at:
            return {}
        before, after = kept
        gradient = quantized.whole(gradient, before.iterate.numel())  # it and the next are of shape (parameters,)
        update = after.iterate - before.iterate
        norms = {
            "gradient_norm": {role: _norm(gradient, parts) for role, parts in self._groups.items()},
            "update_norm": {role: _norm(update, parts) for role, parts in self._groups.items()},
        }
        self._norms_at = time.monotonic() + (time.monotonic() - began) / _NORMS_FRACTION
        with self._lock:
            self._gradient = None
        return norms


def summarize(
    core: ServerCore,
    evaluation: Mapping[str, float],
    *,
    seconds: float,
    workers: Mapping[int, WorkerSummary],
    **facts: Any,
) -> Summary:
    """The summary of a run on either clock. ``workers`` are those that did anything; their counts come from the core.

    ``facts`` are the other fields of `Summary`, which the caller knows.
    """
    for worker_id, worker in workers.items():
        record = core.workers[worker_id]
        worker.accepted, worker.stale, worker.invalid = record.accepted, record.stale, record.invalid
    used, wasted = (
        sum(getattr(worker, key) for worker in workers.values()) for key in ("used_seconds", "wasted_seconds")
    )
    return Summary(
        **facts,
        updates=core.version,
        seconds=seconds,
        pushes=core.pushes,
        accepted=core.accepted,
        stale=core.stale,
        invalid=core.invalid,
        interrupted=sum(worker.interrupted for worker in workers.values()),
        evaluation=dict(evaluation),
        gradients_per_second=measures.per_second(core.pushes, seconds),
        updates_per_second=measures.per_second(core.version, seconds),
        wasted_fraction=measures.wasted_fraction(used, wasted),
        per_worker={str(worker): figures for worker, figures in list(workers.items())[:_WORKERS_IN_SUMMARY]},
        per_worker_omitted=max(0, len(workers) - _WORKERS_IN_SUMMARY),
    )


def _groups(layout: Layout) -> dict[str, list[slice]]:
    """The slices of the flat vector that hold the parameters of each role; neighbours are one slice."""
    found: dict[str, list[slice]] = {}
    for parameter in layout.parameters:
        start = layout.offsets[parameter.name]
        parts = found.setdefault(parameter.role, [])
        if parts and parts[-1].stop == start:
            start = parts.pop().start
        parts.append(slice(start, layout.offsets[parameter.name] + parameter.size))
    return found


def _norm(flat: torch.Tensor, parts: list[slice]) -> float:
    wide = torch.promote_types(flat.dtype, torch.float32)  # a short type would overflow
    return math.hypot(*(float(torch.linalg.vector_norm(flat[part], dtype=wide)) for part in parts))


def _resident_bytes() -> int | None:
    """The memory of this process; None where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES
    except OSError:
        return None
