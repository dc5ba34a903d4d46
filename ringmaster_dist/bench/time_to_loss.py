"""``ringmaster bench time-to-loss``: how long ours and what people use instead take to the same loss.

Each contender is tuned on each cluster in virtual time, over its grid, with one seed. Then the best setting trains in
real processes on paced workers, with other seeds. The table has medians and ranges over these seeds. A contender that
does not reach the target in virtual time, where nothing but its gradients takes time, is not run. Every finished trial
is a file in the folder, so the same command continues after an interruption, and can be run in parts.
"""

from __future__ import annotations

import csv
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

from ringmaster_dist.bench import machine, show, train
from ringmaster_dist.bench.contest import (
    BASELINE,
    CLUSTERS,
    CONTENDERS,
    DDP,
    DILOCO,
    OURS,
    RAY,
    REAL,
    TUNING_SEED,
    VIRTUAL,
    Cluster,
    Contender,
    Point,
    Trial,
    arrival,
    median_seconds,
    races,
    seconds_by_seed,
    settings_of,
    standing,
    verdict,
)
from ringmaster_dist.bench.peers import descendants
from ringmaster_dist.simulation.pool import processes

Progress = Callable[[float, str], None]


class Table(NamedTuple):
    """What was found on a cluster."""

    cluster: Cluster
    rows: list[dict[str, Any]]  # of the table
    words: str  # that name the quickest contender
    seconds: dict[str, list[float]]  # of each seed by contender, infinite where the target was not reached
    runs: list[dict[str, Any]]  # one for each contender and seed


COLUMNS = ["seconds", "x ringmaster", "updates", "rows used", "waste", "bytes", "setting"]
_RUN_COLUMNS = ["cluster", "contender", "setting", "clock", "seed", "lowest loss", *Point._fields]
_START_SECONDS = 12.0  # what a real trial takes before its clock starts and after it ends, for the estimate
_ROWS_PER_SECOND = 2  # of metrics.jsonl, each with an evaluation


class Results:
    """The curves of trials, one file each, by the key of the trial."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "trials"
        self._folder.mkdir(parents=True, exist_ok=True)

    def has(self, trial: Trial) -> bool:
        return (self._folder / f"{trial.key}.json").exists()

    def add(self, trial: Trial, curve: Sequence[Point]) -> None:
        facts = {"cluster": trial.cluster.name, "contender": trial.contender.name, "setting": trial.chosen,
                 "seed": trial.seed, "clock": trial.clock, "date": str(date.today()), "machine": machine()}  # fmt: skip
        rows = [[value if math.isfinite(value) else None for value in point] for point in curve]
        hidden = self._folder / f".{trial.key}-{os.getpid()}"
        hidden.write_text(json.dumps({**facts, "curve": rows}))
        hidden.replace(self._folder / f"{trial.key}.json")

    def curve(self, trial: Trial) -> list[Point]:
        read = json.loads((self._folder / f"{trial.key}.json").read_text())
        return [Point(*(math.inf if value is None else value for value in row)) for row in read["curve"]]


def run(
    quick: bool,
    as_json: bool,
    clusters: Sequence[str] | None = None,
    contenders: Sequence[str] | None = None,
    seeds: int = 3,
    folder: Path | None = None,
) -> None:
    """Runs the trials that are missing, and shows a table for each cluster. ``quick`` is a small race of two."""
    from rich.console import Console

    from ringmaster_dist.observe.console import ProgressLine

    with tempfile.TemporaryDirectory() as scratch:
        kept = folder or Path("runs/time-to-loss")
        results = Results(Path(scratch) if quick else kept)
        chosen = _quick_races() if quick else _installed(races(clusters, contenders))
        if not chosen:
            return
        line = ProgressLine(Console(file=sys.stderr))
        try:
            tables = race(chosen, results, 1 if quick else seeds, line.show)
        finally:
            line.close()
        for cluster, rows, words, _, _ in tables:
            show(f"time-to-loss {cluster.target:g}, {cluster.title}", ["contender", *COLUMNS], rows, as_json)
            print(words, file=sys.stderr)
        if not quick:
            from ringmaster_dist.bench import contest_figure

            (kept / "tables.md").write_text(_markdown(tables, seeds))
            contest_figure.draw([(table.cluster, table.seconds) for table in tables], kept / "time-to-loss.png")
            with (kept / "runs.csv").open("w", newline="") as file:
                writer = csv.DictWriter(file, _RUN_COLUMNS)
                writer.writeheader()
                writer.writerows(row for table in tables for row in table.runs)
            names = ("tables.md", "runs.csv", "time-to-loss.png")
            print(f"files: {', '.join(str(kept / name) for name in names)}", file=sys.stderr)


def race(
    chosen: Iterable[tuple[Cluster, list[Contender]]], results: Results, seeds: int, progress: Progress
) -> list[Table]:
    """Tunes and runs. Returns a table for each cluster."""
    chosen = list(chosen)
    pairs = [(cluster, contender) for cluster, named in chosen for contender in named]
    _tune(pairs, results, progress)
    winners = [tuned(cluster, contender, results) for cluster, contender in pairs]
    hopeless = [winner for winner in winners if _is_hopeless(winner, results)]
    wanted = [
        winner._replace(seed=TUNING_SEED + number, clock=REAL)
        for number in range(1, seeds + 1)  # so that a part of the seeds is a table of all contenders
        for winner in winners
        if winner not in hopeless
    ]
    missing = [trial for trial in wanted if not results.has(trial)]
    costs = [_cost(trial, results) for trial in missing]
    left = total = sum(costs)
    for number, (trial, cost) in enumerate(zip(missing, costs, strict=True)):
        words = f"{trial.cluster.name}, {trial.contender.name}, seed {trial.seed}"
        progress(1 - left / total, f"{number} of {len(missing)} runs, {words}, about {left / 60:.0f} min left")
        results.add(trial, play(trial))
        left -= cost
    tables = []
    for cluster, named in chosen:
        shown = [*wanted, *hopeless]
        trials = {each.name: [t for t in shown if t.cluster == cluster and t.contender == each] for each in named}
        curves = {name: [results.curve(trial) for trial in own] for name, own in trials.items()}
        seconds = {name: seconds_by_seed(cluster, own) for name, own in curves.items()}
        medians = {name: median_seconds(own) for name, own in seconds.items()}
        rows = [{"contender": each.title, **standing(cluster, curves[each.name], medians.get(BASELINE)),
                 "setting": trials[each.name][0].words()} for each in named]  # fmt: skip
        for row, each in zip(rows, named, strict=True):
            if trials[each.name][0] in hopeless:
                row["seconds"] += " in virtual time"
        runs = [
            _run_row(trial, curve) for name in trials for trial, curve in zip(trials[name], curves[name], strict=True)
        ]
        tables.append(Table(cluster, rows, verdict(medians), seconds, runs))
    return tables


def _run_row(trial: Trial, curve: Sequence[Point]) -> dict[str, Any]:
    """A trial as a row of runs.csv. What is not known of a run that did not reach the target is empty."""
    reached = arrival(curve, trial.cluster.target)
    figures = dict.fromkeys(Point._fields, "") if reached is None else reached._asdict()
    names = [trial.cluster.name, trial.contender.name, trial.words(), trial.clock, trial.seed]
    lowest = min((point.loss for point in curve), default=math.inf)
    return dict(zip(_RUN_COLUMNS, [*names, lowest, *figures.values()], strict=True))


# --- tuning ------------------------------------------------------------------------------------------------------


def _tuning(cluster: Cluster, contender: Contender) -> list[Trial]:
    """The trials of a grid. Those in its middle come first, because the best is likely to be there."""
    settings = list(settings_of(contender))
    inner = sorted(range(len(settings)), key=lambda index: abs(2 * index - len(settings) + 1))
    return [Trial(cluster, contender, settings[index], TUNING_SEED, VIRTUAL) for index in inner]


def _tune(pairs: Sequence[tuple[Cluster, Contender]], results: Results, progress: Progress) -> None:
    """Plays the grids in virtual time, one trial per core. A grid of one setting needs no trial.

    A trial is ended when another setting of the same contender has been at the target by that time. So the winner is
    the same as without this rule.
    """
    grids = [grid for cluster, contender in pairs if len(grid := _tuning(cluster, contender)) > 1]
    missing = list({trial.key: (trial, grid) for grid in grids for trial in grid if not results.has(trial)}.values())
    if not missing:
        return
    from ringmaster_dist.bench.rivals import fork_server

    total, cores = len(missing), os.cpu_count() or 1
    running: dict[Future[list[Point]], Trial] = {}
    with processes(cores, fork_server()) as pool:
        while missing or running:
            while missing and len(running) < cores:
                trial, grid = missing.pop(0)
                running[pool.submit(_twin, trial, _best_so_far(grid, results))] = trial
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                results.add(running.pop(future), future.result())
            done = total - len(missing) - len(running)
            progress(done / total, f"tuning in virtual time, {done} of {total}")


def _best_so_far(grid: Sequence[Trial], results: Results) -> float:
    """When the first of the finished trials of a grid was at the target, or the limit."""
    points = [arrival(results.curve(trial), trial.cluster.target) for trial in grid if results.has(trial)]
    return min([grid[0].cluster.limit_seconds, *(point.seconds for point in points if point is not None)])


def _twin(trial: Trial, limit_seconds: float) -> list[Point]:
    from ringmaster_dist.bench import twins

    return twins.play(trial, limit_seconds)


def tuned(cluster: Cluster, contender: Contender, results: Results) -> Trial:
    """The setting that reaches the target first in virtual time, or else comes nearest to it."""
    grid = _tuning(cluster, contender)
    if len(grid) == 1:
        return grid[0]

    def rank(trial: Trial) -> tuple[float, float]:
        curve = results.curve(trial)
        point = arrival(curve, cluster.target)
        lowest = min((each.loss for each in curve), default=math.inf)
        return (math.inf if point is None else point.seconds), lowest

    return min(grid, key=rank)


def _is_hopeless(winner: Trial, results: Results) -> bool:
    """Whether the best setting did not reach the target in virtual time. A grid of one setting was not tried."""
    return results.has(winner) and arrival(results.curve(winner), winner.cluster.target) is None


def _cost(trial: Trial, results: Results) -> float:
    """About how many seconds a real trial takes."""
    twin = trial._replace(seed=TUNING_SEED, clock=VIRTUAL)
    point = arrival(results.curve(twin), trial.cluster.target) if results.has(twin) else None
    return _START_SECONDS + (trial.cluster.limit_seconds if point is None else point.seconds)


# --- in real time ------------------------------------------------------------------------------------------------


def play(trial: Trial) -> list[Point]:
    """Trains in real processes until the target or the limit. Returns the curve."""
    return _ours(trial) if trial.contender.kind == OURS else _rival(trial)


def _ours(trial: Trial) -> list[Point]:
    """A run of ours, which is stopped when it has reached the target."""
    from ringmaster_dist.config.compose import load
    from ringmaster_dist.observe.records import MetricsRow
    from ringmaster_dist.observe.run_files import METRICS, Tail

    cluster = trial.cluster
    curve: list[Point] = []
    context = load(trial.our_overrides).model.sequence_len
    tail: Tail[MetricsRow] | None = None
    kills = 0

    def watch(process: subprocess.Popen[bytes], directory: Path) -> None:
        nonlocal tail, kills
        tail = tail or Tail(directory / METRICS, MetricsRow.from_json)
        for row in tail.new():
            loss = row.evaluation.get("loss")
            if loss is not None and not (curve and curve[-1].loss <= cluster.target):
                num_bytes = (row.bytes_received or 0) + (row.bytes_sent or 0)
                rows = (row.tokens or 0) / context
                curve.append(Point(row.time, loss, row.version, rows, row.used_seconds or 0.0, num_bytes))
                if loss <= cluster.target:
                    process.send_signal(signal.SIGINT)
        if cluster.kill_seconds and curve and curve[-1].seconds >= (kills + 1) * cluster.kill_seconds:
            kills += 1
            _kill_worker(process.pid, _victim(trial, kills))

    _, trace = train(*trial.our_overrides, "budget.updates=null", f"budget.seconds={cluster.limit_seconds:g}",
          f"run.samples={round(cluster.limit_seconds * _ROWS_PER_SECOND)}", watch=watch)  # fmt: skip
    # The server's clock starts when the workers have joined. They build the model after that, which rivals do before.
    first = min((arrived.time - arrived.compute_seconds for arrived in trace), default=0.0)
    return [point._replace(seconds=max(0.0, point.seconds - first)) for point in curve]


def _victim(trial: Trial, number: int) -> int:
    from ringmaster_dist.bench.rivals import victim_of

    return victim_of(trial.seed, number, trial.cluster.workers)


def _kill_worker(launcher: int, slot: int) -> None:
    """Kills the worker in a slot, by the name that its process has."""
    for pid in descendants(launcher):
        if Path(f"/proc/{pid}/comm").read_text().strip() == f"worker-slot-{slot}":
            os.kill(pid, signal.SIGKILL)
            return


def _rival(trial: Trial) -> list[Point]:
    """Starts the processes of a rival, evaluates what they publish, and ends them."""
    import torch

    from ringmaster_dist.bench.rivals import Crew, config_of, problem_of

    torch.set_num_threads(1)
    problem = problem_of(config_of(trial))
    curve: list[Point] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        body, num, together, _helper = _parts(trial, folder)
        with Crew(trial, body, num, folder, together=together) as crew:
            while crew.seconds < trial.cluster.limit_seconds:
                crew.tick()
                for point, weights in crew.snapshots():
                    torch.nn.utils.vector_to_parameters(weights, problem.model.parameters())
                    with torch.no_grad():
                        loss = problem.score(problem.model, problem.validation_rows)["loss"]
                    curve.append(point._replace(loss=loss if math.isfinite(loss) else math.inf))
                    if loss <= trial.cluster.target:
                        return curve
                time.sleep(0.02)
    return curve


def _parts(trial: Trial, folder: Path) -> tuple[Any, int, bool, Any]:
    """The body of a rival's processes, their number, whether they restart together, and what has to stay alive."""
    kind, workers = trial.contender.kind, trial.cluster.workers
    if kind == DDP:
        from ringmaster_dist.bench import ddp

        return ddp.rank, workers, True, None
    if kind == DILOCO:
        from ringmaster_dist.bench import diloco

        return diloco.replica, workers, False, diloco.lighthouse(trial, folder)
    assert kind == RAY
    from ringmaster_dist.bench import ray_server

    return ray_server.driver, 1, True, None


# --- selection and tables ----------------------------------------------------------------------------------------


def _quick_races() -> list[tuple[Cluster, list[Contender]]]:
    """Ours and DDP with one setting each, to an easy target."""
    first = next(iter(CLUSTERS.values()))
    ours = CONTENDERS[BASELINE]._replace(grid={"method.eta": (0.01,), "method.threshold": (8,)})
    ddp = CONTENDERS["ddp"]._replace(grid={"factor": (1.0,)})
    return [(first._replace(target=5.5, limit_seconds=40.0), [ours, ddp])]


def _installed(chosen: list[tuple[Cluster, list[Contender]]]) -> list[tuple[Cluster, list[Contender]]]:
    """Without the contenders whose package is not there. A line says how to get it."""
    packages = {each.package for _, named in chosen for each in named if each.package}
    absent = {package for package in packages if importlib.util.find_spec(package) is None}
    if absent:
        print(f"without {', '.join(sorted(absent))}: pip install 'ringmaster-dist[compare]'", file=sys.stderr)
    present = [(cluster, [each for each in named if each.package not in absent]) for cluster, named in chosen]
    return [(cluster, named) for cluster, named in present if named]


def _markdown(tables: Sequence[Table], seeds: int) -> str:
    """The tables for a document, with the date and the machine."""
    facts = ", ".join(f"{key} {value}" for key, value in machine().items())
    parts = [f"Made by `ringmaster bench time-to-loss` on {date.today()}, {seeds} seeds: {facts}.\n"]
    for cluster, rows, words, _, _ in tables:
        parts.append(f"### {cluster.title}, to a loss of {cluster.target:g}\n")
        parts.append("| | " + " | ".join(COLUMNS) + " |\n|" + "---|" * (len(COLUMNS) + 1))
        parts += [
            f"| {row['contender']} | " + " | ".join(str(row[column]) for column in COLUMNS) + " |" for row in rows
        ]
        parts.append(f"\n{words}\n")
    return "\n".join(parts)
