"""A simulated run, from its configuration to its run directory."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ringmaster_dist.config.build import build_core, build_problem
from ringmaster_dist.config.errors import UserError
from ringmaster_dist.config.profile_file import cluster_seconds
from ringmaster_dist.config.schema import Config
from ringmaster_dist.observe.closing import STOPPED_BY_USER
from ringmaster_dist.observe.divergence import Divergence
from ringmaster_dist.observe.loggers import Logger
from ringmaster_dist.observe.measures import smoothed_loss
from ringmaster_dist.observe.metrics import summarize
from ringmaster_dist.observe.records import MetricsRow, Summary, WorkerSummary
from ringmaster_dist.observe.run_directory import RunDirectory
from ringmaster_dist.observe.run_files import METRICS, ROWS, THRESHOLDS
from ringmaster_dist.problems import Problem, evaluate_at_the_end, evaluated_on
from ringmaster_dist.protocol import Receipt
from ringmaster_dist.server.core import ServerCore
from ringmaster_dist.signals import unless_stopped
from ringmaster_dist.simulation.simulator import Simulator, Stalled
from ringmaster_dist.simulation.speeds import Phase, Rates, Speeds

_ARRIVALS_PER_PROGRESS = 1024
_MANY_GRADIENTS = 20_000  # from here on the compiled engine saves more time than it costs to load
_MOST_INVALID = 2000  # gradients in a row that are not finite

log = logging.getLogger(__name__)

ProgressCallback = Callable[[float, str], None]


class Recorder:
    """Observes the simulator: writes arrivals to the trace, measures at samples and reports progress."""

    def __init__(
        self, core: ServerCore, problem: Problem, config: Config, directory: RunDirectory, progress: ProgressCallback,
        logger: Logger,
    ) -> None:  # fmt: skip
        self._core, self._problem, self._budget = core, problem, config.budget
        self._progress, self._logger = progress, logger
        self._trace = directory.open_trace() if config.run.trace else None
        self._metrics = directory.open_rows(METRICS)
        self._changes = directory.open_rows(THRESHOLDS) if config.method.threshold == "auto" else None
        self._rows = directory.open_rows(ROWS) if core.rows is not None else None
        self._arrivals = 0
        self.train_loss: float | None = None  # smoothed
        self._every, self._next_evaluation = config.eval.every, 0
        self.last_evaluation: dict[str, float] = {}  # empty before the first
        self.evaluated_version = core.version  # of the last evaluation
        self.divergence, self._eta = Divergence(problem.objective), config.method.eta

    def arrival(
        self, time: float, worker: int, sequence: int, gradient_version: int, receipt: Receipt,
        loss: float | None, compute_seconds: float, rows: int,
    ) -> None:  # fmt: skip
        self._note_changes(time)
        if loss is not None:
            self.train_loss = smoothed_loss(self.train_loss, loss)
        if self._trace is not None:
            self._trace.arrival(time, worker, sequence, gradient_version, receipt, loss, compute_seconds, rows=rows)
        self._arrivals += 1
        if self._arrivals % _ARRIVALS_PER_PROGRESS == 0:
            self._report(time, receipt.version)

    def _note_changes(self, time: float) -> None:
        if self._changes is not None:
            for change in self._core.method.changes():
                self._changes.write({"time": time, **change._asdict()})
        if self._rows is not None and self._core.rows is not None:
            for assigned in self._core.rows.changes():
                self._rows.write({"time": time, **assigned._asdict()})

    def sample(self, time: float) -> None:
        core = self._core
        self._note_changes(time)
        due = self._problem.quick_to_evaluate or core.version >= self._next_evaluation
        if due:
            self._next_evaluation = core.version + self._every
            found = unless_stopped(lambda: self._problem.evaluate(core.snapshot.iterate))
            due = found is not None
            if found is not None:
                self.last_evaluation, self.evaluated_version = found, core.version
        evaluation, threshold = self.last_evaluation if due else {}, core.method.threshold(core.version)
        if self.divergence.look(evaluation, self.train_loss, core.accepted):
            log.warning("simulation v=%d: %s", core.version, self.divergence.words(self._eta))
        row = MetricsRow(
            time=time,
            version=core.version,
            evaluation=dict(evaluation),
            threshold=threshold if math.isfinite(threshold) else None,
            accepted=core.accepted,
            stale=core.stale,
            invalid=core.invalid,
            diverged=self.divergence.diverged,
        )
        self._metrics.write(row.to_json())
        self._logger.row(row)
        self._report(time, core.version)

    def close(self) -> None:
        for file in (self._trace, self._metrics, self._changes, self._rows):
            if file is not None:
                file.close()

    def _report(self, time: float, version: int) -> None:
        by_seconds = time / (self._budget.seconds or math.inf)
        by_updates = version / (self._budget.updates or math.inf)
        value = self.last_evaluation.get(self._problem.objective, math.nan)
        text = f"{time:,.0f} s  version {version:,}  {self._problem.objective} {value:.4g}"
        self._progress(min(1.0, max(by_seconds, by_updates)), text)


def build_speeds(config: Config) -> Speeds:
    cluster = config.cluster
    base = cluster_seconds(config, cluster.workers)
    rates = None
    if cluster.phases:
        phases = [Phase(p.start_seconds, p.rate, p.workers) for p in cluster.phases]
        rates = Rates.from_phases(phases, cluster.workers)
    return Speeds(base, jitter=cluster.jitter, seed=config.run.seed, rates=rates)


def choose_engine(config: Config, core: ServerCore, problem: Problem, speeds: Speeds) -> type[Simulator]:
    """The compiled engine if it can play the run and the run is long, or if the configuration asks for it."""
    engine = config.simulation.engine
    if engine == "core":
        return Simulator
    try:
        from ringmaster_dist.simulation.compiled import CompiledSimulator, supports
    except ImportError:
        if engine == "compiled":
            raise UserError("simulation.engine=compiled needs numba: pip install 'ringmaster-dist[fast]'") from None
        return Simulator
    if not supports(core, problem, speeds):
        if engine == "compiled":
            raise UserError(
                "simulation.engine=compiled plays the quadratic at speeds and thresholds that do not change; "
                "remove cluster.phases, problem.clip and local.steps, give method.threshold a number, or use "
                "simulation.engine=core"
            )
        return Simulator
    seconds = config.budget.seconds or math.inf
    updates = config.budget.updates or math.inf
    expected = min(float((seconds / speeds.base).sum()), updates * (config.method.batch or 1))
    is_long = expected + speeds.num_workers > _MANY_GRADIENTS
    return CompiledSimulator if engine == "compiled" or is_long else Simulator


def simulate(
    config: Config,
    directory: RunDirectory,
    progress: ProgressCallback = lambda fraction, text: None,
    should_stop: Callable[[], bool] = lambda: False,
    logger: Logger | None = None,
    make_core: Callable[[Config, Problem, Path], ServerCore] = build_core,
) -> Summary:
    """Plays the run, writes its files and returns the summary. ``should_stop`` is asked between two arrivals."""
    began = time.perf_counter()
    problem = build_problem(config)
    core = make_core(config, problem, directory.path)
    speeds = build_speeds(config)
    engine = choose_engine(config, core, problem, speeds)
    recorder = Recorder(core, problem, config, directory, progress, logger or Logger())
    stuck = _Stuck(core)
    simulator = _simulator(engine, config, core, problem, speeds, recorder, lambda: should_stop() or stuck.look())
    seconds = config.budget.seconds or math.inf
    try:
        simulator.run(updates=config.budget.updates or math.inf, seconds=seconds)
    except Stalled as error:
        raise UserError(f"{error}: cluster.phases stops them all and budget.seconds is not set") from error
    finally:
        recorder.sample(simulator.now)
        recorder.close()
    if stuck.found:
        recorder.divergence.give_up()
    ended = "diverged" if stuck.found else STOPPED_BY_USER if should_stop() else "budget"
    at_the_end = ended == "budget"
    iterate = core.snapshot.iterate
    evaluation = unless_stopped(
        lambda: evaluate_at_the_end(problem, iterate) if at_the_end else problem.evaluate(iterate)
    )
    version = core.version
    if evaluation is None:
        at_the_end, evaluation, version = False, recorder.last_evaluation, recorder.evaluated_version
    recorder.divergence.look(evaluation, recorder.train_loss, core.accepted)
    summary = _summary(config, evaluation, core, speeds, simulator, ended, time.perf_counter() - began)
    summary.diverged = recorder.divergence.diverged
    summary.evaluated_on = evaluated_on(problem, at_the_end=at_the_end, version=version, final_version=core.version)
    directory.write_summary(summary)
    return summary


class _Stuck:
    """Notices that many gradients in a row are not finite, since such a run would never end."""

    def __init__(self, core: ServerCore) -> None:
        self._core, self._accepted, self._invalid = core, 0, 0
        self.found = False

    def look(self) -> bool:
        core = self._core
        if core.accepted != self._accepted:
            self._accepted, self._invalid = core.accepted, core.invalid
        self.found = self.found or core.invalid - self._invalid > _MOST_INVALID
        return self.found


def _simulator(
    engine: type[Simulator], config: Config, core: ServerCore, problem: Problem, speeds: Speeds, recorder: Recorder,
    should_stop: Callable[[], bool],
) -> Simulator:  # fmt: skip
    budget, samples = config.budget, config.run.samples
    return engine(
        core,
        problem,
        speeds,
        seed=config.run.seed,
        interrupt=config.method.interrupt,
        observer=recorder,
        record_arrivals=config.run.trace,
        should_stop=should_stop,
        sample_seconds=(budget.seconds or math.inf) / samples,
        sample_updates=max(1.0, (budget.updates or math.inf) / samples),
    )


def _summary(
    config: Config, evaluation: dict[str, float], core: ServerCore, speeds: Speeds, simulator: Simulator, ended: str,
    wall_seconds: float,
) -> Summary:  # fmt: skip
    interrupted = simulator.interrupted
    busy = np.flatnonzero(simulator.used_seconds + simulator.wasted_seconds)
    workers = {
        worker: WorkerSummary(
            base_seconds=float(speeds.base[worker]),
            gradient_seconds=float(simulator.delivered_seconds[worker]) / max(1, core.workers[worker].pushes),
            interrupted=int(interrupted[worker]),
            used_seconds=float(simulator.used_seconds[worker]),
            wasted_seconds=float(simulator.wasted_seconds[worker]),
            rows=core.rows_of(worker),
        )
        for worker in busy.tolist()
    }
    return summarize(
        core,
        evaluation,
        seconds=simulator.now,
        wall_seconds=wall_seconds,
        workers=workers,
        method=config.method.name,
        problem=config.problem.name,
        clock="virtual",
        ended=ended,
        synchronous_updates=math.floor(simulator.now / float(speeds.base.max())),
        num_workers=speeds.num_workers,
        profile=config.cluster.profile,
        engine=simulator.engine,
    )
