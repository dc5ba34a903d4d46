"""Writes what happens in a run, as the service tells it: the trace, the members, the thresholds that were chosen."""

from __future__ import annotations

from collections.abc import Mapping

from ringmaster_dist.algorithm.methods import Change
from ringmaster_dist.observe.metrics import Metrics
from ringmaster_dist.observe.run_directory import RunDirectory
from ringmaster_dist.protocol import Push, Receipt


class Journal:
    """Writes what the service tells: the trace and the members. Called under the service's lock."""

    def __init__(
        self, directory: RunDirectory, sizes: Mapping[str, int], measured: Metrics, *, chooses: bool = False
    ) -> None:
        """``chooses`` is whether the method chooses its threshold, which is a file then."""
        self._measured = measured
        self._trace = directory.open_trace(sizes.get("trace.jsonl", 0))
        self._members = directory.open_rows("members.jsonl", sizes.get("members.jsonl", 0))
        self.metrics = directory.open_rows("metrics.jsonl", sizes.get("metrics.jsonl", 0))  # not by the service
        self._lines = {
            "trace.jsonl": self._trace.lines,
            "members.jsonl": self._members.lines,
            "metrics.jsonl": self.metrics.lines,
        }
        if chooses:
            self._changes = directory.open_rows("thresholds.jsonl", sizes.get("thresholds.jsonl", 0))
            self._lines["thresholds.jsonl"] = self._changes.lines

    def arrival(self, time: float, worker: int, push: Push, receipt: Receipt) -> None:
        self._measured.arrival(time, worker, push, receipt)
        # Of a gradient on a lost line of history the trace names the last version that was not lost.
        shared, extra = receipt.version - receipt.delay, f', "term": {push.term}'
        if shared < push.gradient_version:
            extra += f', "lost_version": {push.gradient_version}'
        else:
            shared = push.gradient_version
        self._trace.arrival(time, worker, push.sequence, shared, receipt, push.loss, push.compute_seconds, extra)

    def membership(self, worker: int, event: str, pushes: int, slot: int) -> None:
        self._members.write({"worker": worker, "event": event, "pushes": pushes, "slot": slot})

    def change(self, time: float, change: Change) -> None:
        self._changes.write({"time": time, **change._asdict()})

    def flush(self) -> None:
        self._trace.lines.flush()

    def mark(self) -> dict[str, int]:
        for name, lines in self._lines.items():
            if not lines.flush():
                raise OSError(f"{name} cannot be written")
        return {name: lines.size for name, lines in self._lines.items()}

    def sync(self) -> None:
        for lines in self._lines.values():
            lines.sync()

    def close(self) -> None:
        for lines in self._lines.values():
            lines.close()
