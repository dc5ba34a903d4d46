"""What is measured of a real run, each figure defined once: docs/metrics.md says in words what is computed here.

`arrival` is called for every gradient, under the service's lock: it appends to lists and no more. Everything else is
computed when a row is made, by the thread that makes it. Norms need passes over the parameters: they are taken of one
gradient and one update now and then, so rarely that they cost at most a two-hundredth of the time.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ringmaster_dist.algorithm.layout import Layout
from ringmaster_dist.observe.divergence import finite
from ringmaster_dist.protocol import Push, Receipt, Verdict
from ringmaster_dist.server.service import Service

SMOOTHING = 0.05  # weight of the newest loss in the smoothed one
_LISTED_WORKERS = 64  # in a row
_LISTED_DELAYS = 64  # single ones in a histogram; those above are counted as this
_REMEMBERED_UPDATES = 1 << 15
_NORMS_FRACTION = 1 / 200  # of the time, at most
_PAGE_BYTES = 4096


class Metrics:
    """Takes note of arrivals and makes rows for metrics.jsonl."""

    def __init__(self, layout: Layout, first_version: int, tokens_of: Callable[[int], int] = lambda slot: 0) -> None:
        """``tokens_of`` gives the tokens of a gradient by the slot of its worker."""
        self.train_loss: float | None = None  # of accepted gradients, smoothed
        self.accepted_loss: float | None = None  # of the newest
        self._tokens_of = tokens_of
        self._groups = _groups(layout)
        self._arrivals: list[tuple[int, int]] = []  # since the last row: delay, and the part of it while computing
        self._queue_seconds: list[float] = []
        self._last: dict[int, tuple[int, float]] = {}  # sequence and time of each worker's last arrival
        self._tau: dict[int, float] = {}
        self._first_version, self._made = first_version, [-math.inf]  # when each version from the first one was decided
        self._last_accepted = 0.0
        self._gradient: torch.Tensor | None = None
        self._norms_at = 0.0  # when they may be computed again
        self._before = (0.0, first_version, 0, 0, 0.0, 0, 0.0)

    def arrival(self, seconds: float, worker: int, push: Push, receipt: Receipt) -> None:
        made, compute_seconds = self._made, push.compute_seconds
        while self._first_version + len(made) <= receipt.version:  # the last accepted gradient has made a version
            made.append(self._last_accepted)
        began_at = self._first_version + bisect_right(made, seconds - compute_seconds) - 1
        self._arrivals.append((receipt.delay, min(max(receipt.version - began_at, 0), receipt.delay)))
        sequence, last_seconds = self._last.get(worker, (-1, 0.0))
        if push.sequence == sequence + 1 and sequence >= 0:
            self._queue_seconds.append(max(0.0, seconds - last_seconds - compute_seconds))
        self._last[worker] = push.sequence, seconds
        tau = self._tau.get(worker, compute_seconds)
        self._tau[worker] = tau + 0.1 * (compute_seconds - tau)
        if receipt.verdict is Verdict.ACCEPTED:
            self._last_accepted = seconds
            if math.isfinite(push.loss):
                before = push.loss if self.train_loss is None else self.train_loss
                self.train_loss = before + SMOOTHING * (push.loss - before)
                self.accepted_loss = push.loss
            if self._gradient is None:
                self._gradient = push.gradient
        if len(made) > _REMEMBERED_UPDATES:
            del made[: _REMEMBERED_UPDATES // 2]
            self._first_version += _REMEMBERED_UPDATES // 2

    def row(self, service: Service, evaluation: Mapping[str, float], counts: Mapping[str, int]) -> dict[str, Any]:
        """A row of metrics.jsonl. Rates and delays are those since the last one. ``counts`` are the transport's."""
        core, meter, seconds = service.core, service.meter, service.seconds
        statuses = [status for _, status in list(service.workers.items())]
        version, method = core.version, core.method
        alpha = method.alpha(version)
        return {
            **finite(evaluation),  # first: a name of the user's may be one of ours
            "time": seconds,
            "version": core.snapshot.version,
            **({"evaluation": finite(evaluation)} if evaluation else {}),
            "train_loss": self.train_loss,
            "accepted_loss": self.accepted_loss,
            "accepted": core.accepted,
            "stale": core.stale,
            "invalid": core.invalid,
            "interrupted": sum(status.interruptions.num for status in statuses),
            "workers": len(core.live),
            **self._rates(seconds, service),
            **self._delays(),
            "threshold": _finite(method.threshold(version)),
            "eta": method.eta(version, 0, len(core.live)),
            "beta": 1.0 - alpha,
            **self._norms(service),
            "used_seconds": sum(status.used_seconds for status in statuses),
            "wasted_seconds": sum(status.wasted_seconds + status.interruptions.seconds for status in statuses),
            "tokens": self._tokens(service),
            "bytes_received": meter.bytes_received,
            "bytes_sent": meter.bytes_sent,
            "memory_bytes": _resident_bytes(),
            "lease_losses": meter.lease_losses,
            "reconnects": max(0, counts["pipes"] - meter.num_joined),
            "tunnel_bytes_received": counts["received"],
            "tunnel_bytes_sent": counts["sent"],
            "refused_peers": counts["refused"],
            "per_worker": self._per_worker(service),
        }

    def _rates(self, seconds: float, service: Service) -> dict[str, float | None]:
        core, meter = service.core, service.meter
        now = (seconds, core.version, core.pushes, meter.num_updates, meter.update_seconds, meter.num_pushes,
               meter.lock_wait_seconds)  # fmt: skip
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

    def _delays(self) -> dict[str, Any]:
        arrivals, self._arrivals = self._arrivals, []
        queues, self._queue_seconds = self._queue_seconds, []
        if not arrivals:
            return {}
        delays = sorted(delay for delay, _ in arrivals)
        count, computing = len(delays), sum(part for _, part in arrivals)
        histogram = Counter(min(delay, _LISTED_DELAYS) for delay in delays)
        return {
            "delay_mean": sum(delays) / count,
            "delay_p50": delays[(count - 1) // 2],
            "delay_p95": delays[math.ceil(0.95 * count) - 1],
            "delay_max": delays[-1],
            "delay_compute": computing / count,
            "delay_queue": (sum(delays) - computing) / count,
            "delay_histogram": sorted(histogram.items()),
            "queue_seconds": sum(queues) / len(queues) if queues else None,
        }

    def _norms(self, service: Service) -> dict[str, dict[str, float]]:
        """By role, of one gradient and of one update: those that came first after the last time."""
        gradient, kept = self._gradient, service.meter.kept
        began = time.monotonic()
        if gradient is None or kept is None or began < self._norms_at:
            return {}
        update = kept[1].iterate - kept[0].iterate
        norms = {
            "gradient_norm": {role: _norm(gradient, parts) for role, parts in self._groups.items()},
            "update_norm": {role: _norm(update, parts) for role, parts in self._groups.items()},
        }
        self._norms_at = time.monotonic() + (time.monotonic() - began) / _NORMS_FRACTION
        self._gradient, service.meter.kept = None, None
        service.meter.keeps_next = True
        return norms

    def _tokens(self, service: Service) -> int:
        workers = list(service.workers.items())
        return sum(service.core.workers[worker].accepted * self._tokens_of(status.slot) for worker, status in workers)

    def _per_worker(self, service: Service) -> dict[str, dict[str, float | None]]:
        total, found = max(1, service.core.accepted), {}
        for worker, status in list(service.workers.items())[:_LISTED_WORKERS]:
            record = service.core.workers[worker]
            found[str(worker)] = {
                "accepted": record.accepted,
                "stale": record.stale,
                "invalid": record.invalid,
                "interrupted": status.interruptions.num,
                "tau": self._tau.get(worker),
                "share": record.accepted / total,
                "used_seconds": status.used_seconds,
                "wasted_seconds": status.wasted_seconds + status.interruptions.seconds,
            }
        return found


def _groups(layout: Layout) -> dict[str, list[slice]]:
    """Where the parameters of each role lie, neighbours as one."""
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


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _resident_bytes() -> int | None:
    """Of this process; None where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES
    except OSError:
        return None
