"""The server process, in a run directory that `preparation` has made.

It continues from the newest good checkpoint in the directory, if there is one. So a restarted server resumes the run.
"""

from __future__ import annotations

import logging
import math
import multiprocessing
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ringmaster_dist.config.build import accepted_tokens, build_core, build_fingerprint, build_problem, build_wire
from ringmaster_dist.config.compose import from_yaml
from ringmaster_dist.config.errors import UserError
from ringmaster_dist.config.profile_file import cluster_seconds
from ringmaster_dist.config.schema import AUTO, Config
from ringmaster_dist.logs import set_up_logging
from ringmaster_dist.observe.closing import STOPPED_BY_USER
from ringmaster_dist.observe.divergence import Divergence
from ringmaster_dist.observe.loggers import Logger, open_logger
from ringmaster_dist.observe.metrics import Metrics, summarize
from ringmaster_dist.observe.records import Summary, Term, WorkerSummary
from ringmaster_dist.observe.run_directory import RunDirectory
from ringmaster_dist.observe.run_files import BEST, CONFIG, FINAL, ROWS, TERMS, THRESHOLDS
from ringmaster_dist.problems import Problem, evaluate_at_the_end, evaluated_on
from ringmaster_dist.runtime.best_weights import BestWeights
from ringmaster_dist.runtime.checkpoint_writer import CheckpointWriter
from ringmaster_dist.runtime.journal import Journal, close_logger, write_sample
from ringmaster_dist.runtime.mirror import Mirror
from ringmaster_dist.runtime.placement import servers_device
from ringmaster_dist.server import weights
from ringmaster_dist.server.checkpoints import Checkpoints, CheckpointState, Unusable
from ringmaster_dist.server.core import ServerCore
from ringmaster_dist.server.service import Service, Settings
from ringmaster_dist.signals import StopRequest, stop_signals, unless_stopped
from ringmaster_dist.wire import Codec

if TYPE_CHECKING:
    from ringmaster_dist.transport.host import Host

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.05
_MOST_INVALID = 30  # gradients in a row, if every worker has sent some: this is not the fault of one worker
_SAME_PORT_SECONDS = 5.0  # a restarted server tries this long to get its port back


def serve(
    config: Config,
    config_text: str,
    directory: RunDirectory,
    token: str,
    *,
    announce: Callable[[str], None] = lambda address: None,
    should_stop: Callable[[], bool] = lambda: False,
    look: Callable[[], None] = lambda: None,
) -> Summary:
    """Serves until the budget is used up or a stop is requested. Writes the summary, and returns it.

    ``look`` is called many times a second, to show the progress.
    """
    from ringmaster_dist.process_settings import return_memory

    began = time.monotonic()
    return_memory()
    directory.lock()
    problem = build_problem(config)
    device = servers_device(config)
    core = build_core(config, problem, directory.path, device, AUTO)
    checkpoints = Checkpoints(directory.path / "checkpoints", config.checkpoint.keep)
    state = _restore(core, checkpoints, directory)
    metrics = Metrics(core.update.layout, core.version, accepted_tokens(config))
    choices = [THRESHOLDS] * (config.method.threshold == "auto") + [ROWS] * (core.rows is not None)
    journal = Journal(directory, state.files if state else {}, metrics, choices)
    writer = CheckpointWriter(checkpoints, journal, config.checkpoint.every, core)
    torch.set_num_threads(config.server.compute_threads)
    fingerprint = build_fingerprint(core.update.layout, problem)
    service = Service(
        core, _settings(config, config_text, fingerprint, token, _session_key(directory)), journal, writer, state=state
    )
    host = _listen(service, config, directory, token)
    service.start()
    directory.write_secret("address", host.address)
    announce(host.address)

    logger = open_logger(config.logger, directory.path, config_text)
    mirror = Mirror(url, directory.path, config.checkpoint.keep) if (url := config.checkpoint.mirror) else None

    def written(path: Path, state: CheckpointState) -> None:
        logger.file(path, "checkpoint")
        if mirror is not None:
            mirror.submit(path, state.files)

    writer.on_written = written
    best = BestWeights(directory.path / BEST, core.update.layout, problem.objective) if config.checkpoint.best else None
    monitor = _Monitor(config, problem, service, metrics, journal, logger, directory, lambda: host.counts, best)
    while not service.ended.wait(_POLL_SECONDS):
        if should_stop():
            service.end()
        host.check()
        monitor.sample_if_due()
        look()
    if service.failure is not None:
        raise RuntimeError("the server failed; the traceback is above") from service.failure
    stopped = should_stop()
    monitor.record(monitor.evaluate() or {})
    service.wait_until_all_left(config.server.farewell_seconds)
    service.close()
    journal.close()
    final = weights.by_name(problem, core.update.layout, core.snapshot.iterate.cpu())
    weights.write(directory.path / FINAL, final, core.version)
    divergence = monitor.divergence
    ended = STOPPED_BY_USER if stopped else "diverged" if divergence.is_hopeless else "budget"
    summary = _summary(config, monitor.last_evaluation, service, ended, time.monotonic() - began)
    summary.diverged = divergence.diverged
    summary.evaluated_on = evaluated_on(
        problem, at_the_end=False, version=monitor.evaluated_version, final_version=core.version
    )
    if best is not None:
        summary.best_value, summary.best_version = best.value, best.version
    directory.write_summary(summary)
    # The closing evaluation takes longer, and a user that stops the run does not wait for it.
    thorough = None if stopped else unless_stopped(lambda: evaluate_at_the_end(problem, core.snapshot.iterate.cpu()))
    if thorough is not None:
        divergence.look(thorough, metrics.train_loss, core.accepted)
        summary.evaluation.update(thorough)
        summary.diverged, summary.evaluated_on = divergence.diverged, evaluated_on(problem, at_the_end=True)
        directory.write_summary(summary)
        if not summary.diverged:
            write_sample(problem, core, directory)
    host.close()
    close_logger(logger, config, directory, summary)
    if mirror is not None:
        mirror.finish(config.checkpoint.mirror_seconds)
    return summary


class _Monitor:
    """Evaluates the run now and then, writes rows of metrics, and notices divergence. Only the main thread enters."""

    def __init__(
        self, config: Config, problem: Problem, service: Service, metrics: Metrics, journal: Journal, logger: Logger,
        directory: RunDirectory, counts: Callable[[], Mapping[str, int]], best: BestWeights | None,
    ) -> None:  # fmt: skip
        """``counts`` are the transport's."""
        self._config, self._problem, self._service, self._metrics = config, problem, service, metrics
        self._journal, self._logger, self._counts, self._best = journal, logger, counts, best
        self._interval = (config.budget.seconds or 60.0) / config.run.samples
        self._next_sample, self._next_evaluation = service.seconds, service.core.version
        self._accepted, self._invalid = service.core.accepted, service.core.invalid  # when one was last accepted
        self.divergence = Divergence(problem.objective)
        self.last_evaluation: dict[str, float] = {}  # empty before the first
        self.evaluated_version = service.core.version  # of the last evaluation
        for row in directory.metrics():  # of earlier terms
            self.divergence.look(row.evaluation, row.train_loss, row.accepted)

    def sample_if_due(self) -> None:
        service, core = self._service, self._service.core
        if service.seconds < self._next_sample:
            return
        self._next_sample = service.seconds + self._interval
        if core.accepted > self._accepted:
            self._accepted, self._invalid = core.accepted, core.invalid
        num_invalid = core.invalid - self._invalid  # all gradients since the last accepted one
        due = self._problem.quick_to_evaluate or core.version >= self._next_evaluation or num_invalid > 0
        if due:
            self._next_evaluation = core.version + self._config.eval.every
        self.record((self.evaluate() if due else None) or {})
        if num_invalid and service.all_are_invalid and (self.divergence.is_hopeless or num_invalid >= _MOST_INVALID):
            log.warning("server v=%d: no gradient is a finite number any more: the run is ended", core.version)
            self.divergence.give_up()
            service.end()

    def evaluate(self) -> dict[str, float] | None:
        """Evaluates the newest iterate, and keeps it if it is the best so far. None if a signal arrives meanwhile."""
        snapshot = self._service.core.snapshot
        iterate = snapshot.iterate.cpu()  # (size,)
        found = unless_stopped(lambda: self._problem.evaluate(iterate))
        if found is not None:
            self.last_evaluation, self.evaluated_version = found, snapshot.version
            if self._best is not None:
                self._best.offer(iterate, snapshot.version, found)
        return found

    def record(self, evaluation: Mapping[str, float]) -> None:
        """Writes a row of metrics."""
        measured, divergence = self._service.measure(), self.divergence
        begins_to_diverge = divergence.look(evaluation, self._metrics.train_loss, measured.accepted)
        row = self._metrics.row(measured, evaluation, self._counts(), diverged=divergence.diverged)
        if row.update_norm:
            self._service.keep_next_update()
        self._journal.row(row)
        self._logger.row(row)
        if begins_to_diverge:
            log.warning("server v=%d: %s", row.version, divergence.words(self._config.method.eta))


def _settings(config: Config, config_text: str, fingerprint: str, token: str, session_key: str) -> Settings:
    return Settings(
        config_text=config_text,
        fingerprint=fingerprint,
        token=token,
        session_key=session_key,
        max_updates=config.budget.updates or math.inf,
        max_seconds=config.budget.seconds or math.inf,
        lease_seconds=config.server.lease_seconds,
        expected_workers=config.cluster.workers,
        start_seconds=config.server.start_seconds,
        max_invalid=config.server.max_invalid,
        wire=build_wire(config),
    )


def _restore(core: ServerCore, checkpoints: Checkpoints, directory: RunDirectory) -> CheckpointState | None:
    """Loads the newest good checkpoint, if there is one, and begins a new term. The term is on disk afterwards."""

    def fits(state: CheckpointState) -> str:
        iterate = state.core.iterate
        if iterate.shape != core.snapshot.iterate.shape or iterate.dtype != core.update.dtype:
            return "it is of another model"
        return "" if directory.has_sizes(state.files) else "the trace is shorter than it was then"

    earlier = directory.terms()  # a term whose line is torn has served no worker
    try:
        found = checkpoints.newest(fits)
    except Unusable as error:
        raise UserError(f"{error}. To start from the beginning, use another run.dir, or run.overwrite=true") from error
    if found:
        core.load(found[1].core)
    if earlier:
        core.enter_term([*(term.version for term in earlier), core.version])
        log.warning(
            "server: term %d begins at version %d%s", core.term, core.version, f" from {found[0].name}" if found else ""
        )
    terms = directory.open_rows(TERMS, directory.whole_bytes(TERMS))
    update = core.update
    terms.write(Term(core.term, core.version, core.pushes, str(update.device), update.precision)._asdict())
    terms.sync()
    terms.close()
    return found[1] if found else None


def _session_key(directory: RunDirectory) -> str:
    """The key that signs sessions. A run that comes from elsewhere gets another, and its workers join again."""
    if not directory.read("sessions"):
        directory.write_secret("sessions", secrets.token_hex(32))
    return directory.read("sessions")


def _listen(service: Service, config: Config, directory: RunDirectory, token: str) -> Host:
    """Listens at the configured port. Without one, a restarted server takes its earlier port, and another takes any."""
    from ringmaster_dist.addresses import AddressError, unavailable
    from ringmaster_dist.transport import AuthenticationFailed
    from ringmaster_dist.transport.host import Host

    settings, update = config.server, service.core.update
    codec = Codec(build_wire(config), update.layout.size, update.dtype)
    most_bytes = max(update.layout.size * update.dtype.itemsize, codec.gradient_bytes)

    def listen(port: int) -> Host:
        return Host(
            service, settings.host, port, token=token, tensor_bytes=most_bytes, tls=settings.tls,
            handshake_seconds=settings.handshake_seconds, threads=settings.threads, timeout=settings.call_seconds,
            insecure=settings.insecure, workers_per_address=settings.workers_per_address,
        )  # fmt: skip

    earlier = directory.read("address")
    port = settings.port or int(earlier.rpartition(":")[2] or 0)
    deadline = time.monotonic() + (_SAME_PORT_SECONDS if earlier else 0.0)
    while True:
        try:
            return listen(port)
        except (AddressError, AuthenticationFailed, RuntimeError) as error:
            raise UserError(str(error)) from error
        except OSError as error:
            if time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
            elif settings.port == 0 and port != 0:
                log.warning("server: port %d is in use now, so another is used: see <run.dir>/address", port)
                port = 0
            else:
                raise UserError(unavailable(settings.host, port, error)) from error


def _summary(
    config: Config, evaluation: Mapping[str, float], service: Service, ended: str, wall_seconds: float
) -> Summary:
    cluster = config.cluster
    paced = cluster.profile != "none"
    workers = {}
    slowest = 0.0
    for worker, status in service.workers.items():
        base = float(cluster_seconds(config, status.seat.slot + 1)[-1]) if paced else 0.0
        record, stopped = service.core.workers[worker], status.interruptions
        workers[worker] = WorkerSummary(
            base_seconds=base,
            gradient_seconds=(status.used_seconds + status.wasted_seconds) / max(1, record.pushes),
            interrupted=stopped.num,
            used_seconds=status.used_seconds,
            wasted_seconds=status.wasted_seconds + stopped.seconds,
            device=status.seat.device.name,
            device_title=status.seat.device.title,
            rows=service.core.rows_of(worker),
        )
        # A worker whose work was always stopped needs longer than that work took.
        at_least = stopped.seconds / stopped.num if stopped.num else base
        slowest = max(slowest, workers[worker].gradient_seconds or max(base, at_least))
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


class StopOnceServing(ExitStack):
    """Whether a signal has asked the server to stop.

    Before `begin`, a signal does what it did before. A server that is still being built has nothing to save.
    """

    def __init__(self) -> None:
        super().__init__()
        self.asked = StopRequest()

    def begin(self, address: str = "") -> None:
        self.asked = self.enter_context(stop_signals())


def serve_directory(path: str) -> int:
    """Runs in the child process of the supervisor. Returns the exit code."""
    set_up_logging()
    directory = RunDirectory.opened(Path(path))
    config_text = directory.read(CONFIG)
    parent = multiprocessing.parent_process()
    with StopOnceServing() as stop:
        serve(
            from_yaml(config_text),
            config_text,
            directory,
            directory.read("token"),
            announce=stop.begin,
            should_stop=lambda: stop.asked() or not (parent is None or parent.is_alive()),  # an orphan ends itself
        )
    return 0
