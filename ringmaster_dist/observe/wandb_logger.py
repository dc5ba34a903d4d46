"""wandb, from the server's process: one run, the rows of metrics.jsonl, delay histograms, workers, samples, weights.

Everything that touches wandb happens in one thread behind a queue of limited length. If wandb hangs, the queue fills
and rows are dropped; if it fails, it is tried offline, and if that fails too it is let go. Training never waits for it.
The id of the wandb run lies in the run directory: a server that is started again goes on with the same one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ringmaster_dist.observe.logger import Logger
from ringmaster_dist.observe.wandb_names import AXES, flattened, histogram, worker_rows

log = logging.getLogger(__name__)

_QUEUED = 256
_MOST_FAILURES = 5  # in a row; then it is let go
ID_FILE = "wandb.id"


@dataclass(frozen=True)
class WandbSettings:
    offline: bool
    project: str
    entity: str | None = None
    group: str | None = None
    run_name: str | None = None
    tags: list[str] = field(default_factory=list)
    artifacts: bool = False
    init_seconds: float = 30.0
    finish_seconds: float = 30.0


class WandbLogger(Logger):
    def __init__(self, directory: Path, settings: WandbSettings, config: Mapping[str, Any]) -> None:
        self._directory, self._settings, self._config = directory, settings, dict(config)
        self._queue: queue.Queue[Callable[[Any], None] | None] = queue.Queue(_QUEUED)
        self._dropped = 0
        self._last_row: Mapping[str, Any] = {}
        self._thread = threading.Thread(target=self._work, name="wandb", daemon=True)
        self._thread.start()

    def row(self, row: Mapping[str, Any]) -> None:
        self._last_row = row
        self._put(lambda run: _log_row(run, row))

    def text(self, text: str) -> None:
        self._put(lambda run: _log_text(run, text, self._last_row))

    def file(self, path: Path, kind: str) -> None:
        if self._settings.artifacts:
            self._put(lambda run: _log_file(run, path, kind))

    def close(self, summary: Mapping[str, Any]) -> None:
        deadline = time.monotonic() + self._settings.finish_seconds
        if self._thread.is_alive():
            self._put(lambda run: _log_end(run, summary, self._last_row))
            with contextlib.suppress(queue.Full):
                self._queue.put(None, timeout=self._settings.finish_seconds)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            log.warning("wandb has not taken everything within %g s: left behind", self._settings.finish_seconds)
        if self._dropped:
            log.warning("wandb was too slow for %d of its rows; metrics.jsonl has them all", self._dropped)

    def _put(self, item: Callable[[Any], None]) -> None:
        try:
            self._queue.put_nowait(item)
        except queue.Full:
            self._dropped += 1

    # --- in its own thread -----------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            run = self._open()
        except BaseException as error:  # wandb raises what it likes; none of it is the run's business
            log.warning("no wandb (%s): training goes on without it", _first_line(error))
            return
        failures = 0
        while (item := self._queue.get()) is not None:
            try:
                item(run)
                failures = 0
            except Exception as error:
                failures += 1
                log.warning("wandb did not take something (%s)", _first_line(error))
                if failures >= _MOST_FAILURES:
                    log.warning("wandb failed %d times in a row: training goes on without it", failures)
                    return
        with contextlib.suppress(Exception):
            run.finish()

    def _open(self) -> Any:
        os.environ.setdefault("WANDB_SILENT", "true")  # the terminal belongs to the run
        if self._settings.offline:
            return self._init("offline")
        import wandb

        try:
            if not has_key():
                raise RuntimeError("there is no key: wandb login, or set WANDB_API_KEY")
            return self._init("online")
        except Exception as error:
            with contextlib.suppress(Exception):
                wandb.teardown()  # what is left of the attempt would keep the id to itself
            run = self._init("offline")
            log.warning(
                "wandb cannot be reached (%s): the run is kept offline; upload it later with: wandb sync %s",
                _first_line(error), Path(run.dir).parent,
            )  # fmt: skip
            return run

    def _init(self, mode: Literal["online", "offline"]) -> Any:
        import wandb

        given = self._settings
        run = wandb.init(
            project=given.project, entity=given.entity, group=given.group, tags=given.tags or None,
            name=given.run_name or self._directory.resolve().name, id=self._id(), dir=str(self._directory),
            config=self._config, mode=mode, resume="allow" if mode == "online" else None,
            settings=wandb.Settings(silent=True, console="off", init_timeout=given.init_seconds,
                                    login_timeout=max(1, int(given.init_seconds))),
        )  # fmt: skip
        for axis in AXES:
            run.define_metric(axis)
        run.define_metric("*", step_metric="version")
        return run

    def _id(self) -> str:
        path = self._directory / ID_FILE
        if not path.exists():
            temporary = path.with_name(f".{ID_FILE}")
            temporary.write_text(secrets.token_hex(4))
            temporary.replace(path)
        return path.read_text().strip()


def has_key() -> bool:
    """Whether wandb knows who this is. Does not ask anybody."""
    import wandb

    try:
        return bool(wandb.login(prompt=False))
    except TypeError:  # of an earlier wandb
        return bool(wandb.api.api_key)


def _log_row(run: Any, row: Mapping[str, Any]) -> None:

    values: dict[str, Any] = flattened(row)
    if row.get("delay_histogram"):
        values["staleness/delays"] = _histogram(row["delay_histogram"])
    run.log(values)


def _histogram(pairs: Any) -> Any:
    import numpy as np
    import wandb

    counts, edges = histogram(pairs)
    return wandb.Histogram(np_histogram=(np.array(counts), np.array(edges)))


def _log_text(run: Any, text: str, row: Mapping[str, Any]) -> None:
    import wandb

    version = row.get("version", 0)
    run.log({"version": version, "progress/sample": wandb.Table(columns=["version", "text"], data=[[version, text]])})


def _log_file(run: Any, path: Path, kind: str) -> None:
    import wandb

    artifact = wandb.Artifact(f"{kind}-{run.id}", type=kind)
    artifact.add_file(os.fspath(path))
    run.log_artifact(artifact)


def _log_end(run: Any, summary: Mapping[str, Any], row: Mapping[str, Any]) -> None:
    import wandb

    columns, data = worker_rows(summary.get("per_worker", {}))
    run.log({"version": row.get("version", 0), "workers/table": wandb.Table(columns=list(columns), data=data)})
    for key, value in summary.items():
        if isinstance(value, int | float | str):
            run.summary[f"final/{key}"] = value


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
