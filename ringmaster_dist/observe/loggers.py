"""Loggers: what else gets the rows and the summary of a run. The one there is writes to wandb.

Everything that touches wandb happens in one thread behind a queue of limited length. If wandb hangs, the queue fills
and rows are dropped. If it fails, it is tried offline, and if that fails too, the run continues without it. Training
never waits for wandb. The id of the wandb run is in the run directory, so a restarted server continues the same one.
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
from pathlib import Path
from typing import Any, Literal, Protocol

import yaml

from ringmaster_dist.observe.records import MetricsRow, Summary
from ringmaster_dist.observe.wandb_names import AXES, flattened, histogram, worker_rows

log = logging.getLogger(__name__)

_QUEUED = 256
_MOST_FAILURES = 5  # in a row, before the run continues without wandb
_ID_FILE = "wandb.id"


class Logger:
    """Receives the rows and the summary of a run, and keeps none of them. No call raises. Only `close` may block."""

    def row(self, row: MetricsRow) -> None:
        """A row of metrics.jsonl."""

    def text(self, text: str) -> None:
        """A sample of what a model writes."""

    def file(self, path: Path, kind: str) -> None:
        """A checkpoint, or the final weights."""

    def close(self, summary: Summary) -> None:
        """The end of the run. Waits a while for what is on its way, and no longer."""


class WandbSettings(Protocol):
    """The section ``logger`` of the configuration."""

    name: str
    project: str
    entity: str | None
    group: str | None
    run_name: str | None
    tags: list[str]
    artifacts: bool
    init_seconds: float
    finish_seconds: float


def open_logger(settings: WandbSettings, directory: Path, config_text: str) -> Logger:
    if settings.name == "none":
        return Logger()
    return WandbLogger(directory, settings, yaml.safe_load(config_text))


class WandbLogger(Logger):
    def __init__(self, directory: Path, settings: WandbSettings, config: Mapping[str, Any]) -> None:
        self._directory, self._settings, self._config = directory, settings, dict(config)
        self._queue: queue.Queue[Callable[[Any], None] | None] = queue.Queue(_QUEUED)
        self._dropped = 0
        self._version = 0  # of the newest row
        self._thread = threading.Thread(target=self._work, name="wandb", daemon=True)
        self._thread.start()

    def row(self, row: MetricsRow) -> None:
        self._version = row.version
        self._put(lambda run: _log_row(run, row.to_json()))

    def text(self, text: str) -> None:
        self._put(lambda run: _log_text(run, text, self._version))

    def file(self, path: Path, kind: str) -> None:
        if self._settings.artifacts:
            self._put(lambda run: _log_file(run, path, kind))

    def close(self, summary: Summary) -> None:
        deadline = time.monotonic() + self._settings.finish_seconds
        if self._thread.is_alive():
            self._put(lambda run: _log_end(run, summary, self._version))
            with contextlib.suppress(queue.Full):
                self._queue.put(None, timeout=self._settings.finish_seconds)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            log.warning("wandb has not taken everything within %g s: the rest is lost", self._settings.finish_seconds)
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
        except BaseException as error:  # whatever wandb raises must not end the run
            log.warning("no wandb (%s): training continues without it", _first_line(error))
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
                    log.warning("wandb failed %d times in a row: training continues without it", failures)
                    return
        with contextlib.suppress(Exception):
            run.finish()

    def _open(self) -> Any:
        os.environ.setdefault("WANDB_SILENT", "true")  # the terminal belongs to the run
        if self._settings.name == "wandb_offline":
            return self._init("offline")
        import wandb

        try:
            if not has_key():
                raise RuntimeError("there is no key: wandb login, or set WANDB_API_KEY")
            return self._init("online")
        except Exception as error:
            with contextlib.suppress(Exception):
                wandb.teardown()  # otherwise the failed attempt would keep the id in use
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
        path = self._directory / _ID_FILE
        if not path.exists():
            temporary = path.with_name(f".{_ID_FILE}")
            temporary.write_text(secrets.token_hex(4))
            temporary.replace(path)
        return path.read_text().strip()


def has_key() -> bool:
    """Whether wandb has an API key. It asks nobody for one."""
    import wandb

    try:
        return bool(wandb.login(prompt=False))
    except TypeError:  # an older wandb
        return bool(wandb.api.api_key)


def _log_row(run: Any, row: Mapping[str, Any]) -> None:
    import wandb

    values: dict[str, Any] = flattened(row)
    if row.get("delay_histogram"):
        values["staleness/delays"] = wandb.Histogram(np_histogram=histogram(row["delay_histogram"]))
    run.log(values)


def _log_text(run: Any, text: str, version: int) -> None:
    import wandb

    run.log({"version": version, "progress/sample": wandb.Table(columns=["version", "text"], data=[[version, text]])})


def _log_file(run: Any, path: Path, kind: str) -> None:
    import wandb

    artifact = wandb.Artifact(f"{kind}-{run.id}", type=kind)
    artifact.add_file(os.fspath(path))
    run.log_artifact(artifact)


def _log_end(run: Any, summary: Summary, version: int) -> None:
    import wandb

    values = summary.to_json()
    columns, data = worker_rows(values["per_worker"])
    run.log({"version": version, "workers/table": wandb.Table(columns=list(columns), data=data)})
    for key, value in values.items():
        if isinstance(value, int | float | str):
            run.summary[f"final/{key}"] = value


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
