"""The server process, in a run directory that `preparation` has made.

It continues from the newest good checkpoint in the directory, if there is one: to restart a server is to resume.
"""

from __future__ import annotations

import logging
import math
import multiprocessing
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ringmaster_dist.config.build import build_core, build_fingerprint, build_problem, build_wire, tokens_of_slot
from ringmaster_dist.config.compose import from_yaml
from ringmaster_dist.config.errors import UserError
from ringmaster_dist.config.profile_file import cluster_seconds
from ringmaster_dist.config.schema import Config
from ringmaster_dist.logs import log_as_told
from ringmaster_dist.observe.divergence import Divergence, finite
from ringmaster_dist.observe.metrics import Metrics
from ringmaster_dist.observe.run_directory import RunDirectory, RunDirectoryError
from ringmaster_dist.observe.summary import summarize
from ringmaster_dist.problems import Problem, evaluate_at_the_end, evaluated_on
from ringmaster_dist.runtime.checkpoint_writer import CheckpointWriter
from ringmaster_dist.runtime.journal import Journal
from ringmaster_dist.runtime.logger import open_logger, tell_the_end
from ringmaster_dist.runtime.processes import stop_signals
from ringmaster_dist.server import weights
from ringmaster_dist.server.checkpoints import Checkpoints, Unusable
from ringmaster_dist.server.core import ServerCore
from ringmaster_dist.server.service import Service, Settings

if TYPE_CHECKING:
    from ringmaster_dist.transport.star import Host

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.05
_MOST_INVALID = 30  # gradients in a row, of all workers: then it is not a worker's fault
_SAME_PORT_SECONDS = 5.0  # a restarted server tries this long to get its port back


def serve(
    config: Config,
    config_text: str,
    directory: RunDirectory,
    token: str,
    *,
    announce: Callable[[str], None] = lambda address: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Serves until the budget is used up or a stop is asked for; returns the summary, which is written too."""
    from ringmaster_dist.transport.memory import return_memory

    began = time.monotonic()
    return_memory()
    try:
        directory.lock()
    except RunDirectoryError as error:
        raise UserError(str(error)) from error
    problem = build_problem(config)
    core = build_core(config, problem, directory.path)
    checkpoints = Checkpoints(directory.path / "checkpoints", config.checkpoint.keep)
    state = _restore(core, checkpoints, directory)
    metrics = Metrics(core.update.layout, core.version, tokens_of_slot(config))
    chooses = config.method.threshold == "auto"
    journal = Journal(directory, state["files"] if state else {}, metrics, chooses=chooses)
    writer = CheckpointWriter(checkpoints, journal, config.checkpoint.every, core)
    torch.set_num_threads(config.server.compute_threads)
    fingerprint = build_fingerprint(core.update.layout, problem)
    service = Service(
        core, _settings(config, config_text, fingerprint, token), journal,
        state=state, checkpoint_due=writer.due, save=writer.submit, save_last=writer.write_last,
    )  # fmt: skip
    host = _listen(service, config, directory, token)
    service.start()
    directory.write_secret("address", host.address)
    announce(host.address)

    logger = open_logger(config, directory, config_text)
    writer.on_written = lambda path: logger.file(path, "checkpoint")
    interval = (config.budget.seconds or 60.0) / config.run.samples
    next_sample, next_evaluation = service.seconds, core.version
    divergence, counted = _divergence(problem, directory), (core.accepted, core.invalid)

    def record(evaluation: Mapping[str, float]) -> None:
        loud = divergence.look(evaluation, metrics.train_loss, core.accepted)
        row = metrics.row(service, evaluation, host.counts) | {"diverged": divergence.diverged}
        journal.metrics.write(row)
        logger.row(row)
        if loud:
            log.warning("server v=%d: %s", row["version"], divergence.words(config.method.eta))

    while not service.ended.wait(_POLL_SECONDS):
        if should_stop():
            service.end()
        host.check()
        if service.seconds >= next_sample:
            next_sample = service.seconds + interval
            if core.accepted > counted[0]:
                counted = core.accepted, core.invalid
            stuck = core.invalid > counted[1]  # since the last one that was accepted, all were invalid
            due = problem.quick_to_evaluate or core.version >= next_evaluation or stuck
            if due:
                next_evaluation = core.version + config.eval.every
            record(problem.evaluate(core.snapshot.iterate) if due else {})
            if stuck and (divergence.is_hopeless or core.invalid - counted[1] >= _MOST_INVALID):
                log.warning("server v=%d: no gradient is a finite number any more: the run is ended", core.version)
                divergence.give_up()
                service.end()
    if service.failure is not None:
        raise RuntimeError("the server could not go on; its last words are above") from service.failure
    stopped = should_stop()
    evaluation = problem.evaluate(core.snapshot.iterate)
    record(evaluation)
    service.wait_until_all_left(config.server.farewell_seconds)
    service.close()
    journal.close()
    final = weights.by_name(problem, core.update.layout, core.snapshot.iterate)
    weights.write(directory.path / "final.safetensors", final, core.version)
    ended = "stopped by the user" if stopped else "diverged" if divergence.is_hopeless else "budget"
    summary = _summary(config, evaluation, service, ended, time.monotonic() - began)
    summary |= {"diverged": divergence.diverged, "evaluated_on": evaluated_on(problem, at_the_end=False)}
    directory.write_summary(summary)
    if not stopped:  # the closing evaluation takes longer: a user that stops the run does not wait for it
        evaluation = evaluate_at_the_end(problem, core.snapshot.iterate)
        divergence.look(evaluation, metrics.train_loss, core.accepted)
        summary |= finite({f"final_{name}": value for name, value in evaluation.items()})
        summary |= {"diverged": divergence.diverged, "evaluated_on": evaluated_on(problem, at_the_end=True)}
        directory.write_summary(summary)
    host.close()
    tell_the_end(logger, config, problem, core, directory, summary)
    return summary


def _divergence(problem: Problem, directory: RunDirectory) -> Divergence:
    """That has seen what an earlier term has measured."""
    divergence = Divergence(problem.objective)
    for row in directory.read_rows("metrics.jsonl"):
        divergence.look(row, row.get("train_loss"), row["accepted"])
    return divergence


def _settings(config: Config, config_text: str, fingerprint: str, token: str) -> Settings:
    return Settings(
        config_text=config_text,
        fingerprint=fingerprint,
        token=token,
        max_updates=config.budget.updates or math.inf,
        max_seconds=config.budget.seconds or math.inf,
        lease_seconds=config.server.lease_seconds,
        expected_workers=config.cluster.workers,
        start_seconds=config.server.start_seconds,
        max_invalid=config.server.max_invalid,
        wire=build_wire(config),
    )


def _restore(core: ServerCore, checkpoints: Checkpoints, directory: RunDirectory) -> dict[str, Any] | None:
    """Brings the core to the newest good checkpoint, if any, and begins a new term, which is on the disk then."""

    def fits(state: Mapping[str, Any]) -> str:
        if state["iterate"].shape != core.snapshot.iterate.shape or state["iterate"].dtype != core.update.dtype:
            return "it is of another model"
        return "" if directory.has_sizes(state["files"]) else "the trace is shorter than it was then"

    earlier = directory.read_rows("terms.jsonl")  # a term whose line is torn has served nobody
    try:
        found = checkpoints.newest(fits)
    except Unusable as error:
        raise UserError(f"{error}. To begin anew: another run.dir, or run.overwrite=true") from error
    if found:
        core.load_state_dict(found[1])
    if earlier:
        core.begins = [term["version"] for term in earlier]
        core.begin_term()
        log.warning(
            "server: term %d begins at version %d%s", core.term, core.version, f" from {found[0].name}" if found else ""
        )
    terms = directory.open_rows("terms.jsonl", directory.size_of_terms())
    terms.write({"term": core.term, "version": core.version, "pushes": core.pushes})
    terms.lines.sync()
    terms.close()
    return found[1] if found else None


def _listen(service: Service, config: Config, directory: RunDirectory, token: str) -> Host:
    """At the configured port; at the one it had before, if it is a restart; else at any."""
    from ringmaster_dist.transport.addresses import AddressError
    from ringmaster_dist.transport.errors import Mistrusted
    from ringmaster_dist.transport.star import Host

    settings, update = config.server, service.core.update
    widest = max(update.dtype.itemsize, (build_wire(config).gradient_dtype or update.dtype).itemsize)

    def listen(port: int) -> Host:
        return Host(
            service, settings.host, port, token=token, tensor_bytes=update.layout.size * widest, tls=settings.tls,
            handshake_seconds=settings.handshake_seconds, threads=settings.threads, timeout=settings.call_seconds,
        )  # fmt: skip

    earlier = directory.read("address")
    port = settings.port or int(earlier.rpartition(":")[2] or 0)
    deadline = time.monotonic() + (_SAME_PORT_SECONDS if earlier else 0.0)
    while True:
        try:
            return listen(port)
        except (AddressError, Mistrusted, RuntimeError) as error:
            raise UserError(str(error)) from error
        except OSError as error:
            if time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
            elif settings.port == 0 and port != 0:
                log.warning("server: port %d is taken by now, another is used: see <run.dir>/address", port)
                port = 0
            else:
                where = f"server.host={settings.host} server.port={port}"
                raise UserError(
                    f"{where} cannot be listened on ({error.strerror}): choose another, or server.port=0"
                ) from error


def _summary(
    config: Config, evaluation: Mapping[str, float], service: Service, ended: str, wall_seconds: float
) -> dict[str, Any]:
    cluster = config.cluster
    paced = cluster.profile != "none"
    workers = {}
    for worker, status in service.workers.items():
        base = float(cluster_seconds(cluster, status.slot + 1)[-1]) if paced else 0.0
        workers[worker] = {
            "base_seconds": base,
            "interrupted": status.interruptions.num,
            "used_seconds": status.used_seconds,
            "wasted_seconds": status.wasted_seconds + status.interruptions.seconds,
        }
    slowest = max((worker["base_seconds"] for worker in workers.values()), default=0.0)
    return summarize(
        service.core,
        evaluation,
        seconds=service.seconds,
        wall_seconds=wall_seconds,
        workers=workers,
        method=config.method.name,
        problem=config.problem.name,
        clock="real",
        ended=ended,
        terms=len(service.core.begins),
        synchronous_updates=math.floor(service.seconds / slowest) if slowest else 0,
        num_workers=len(workers),
        profile=cluster.profile,
        engine="rpc",
    )


def serve_directory(path: str) -> int:
    """What the supervisor's child does. Returns the exit code."""
    log_as_told()
    directory = RunDirectory.opened(Path(path))
    config_text = directory.read("config.yaml")
    parent = multiprocessing.parent_process()
    with stop_signals() as asked:
        serve(
            from_yaml(config_text),
            config_text,
            directory,
            directory.read("token"),
            should_stop=lambda: asked() or not (parent is None or parent.is_alive()),  # an orphan ends itself
        )
    return 0
