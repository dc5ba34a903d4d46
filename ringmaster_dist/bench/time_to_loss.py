"""``ringmaster bench time-to-loss``: how long ours and what people use instead take to the same loss.

Each contender is tuned on each cluster in virtual time, over its grid, with one seed. Then the best setting trains in
real processes on paced workers, with other seeds. The table has medians and ranges over these seeds. A contender that
does not reach the target in virtual time, where nothing but its gradients takes time, is not run. Every finished trial
is a file in the folder, so the same command continues after an interruption, and can be run in parts.
"""

from __future__ import annotations

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
from typing import Any

from ringmaster_dist.bench import contest_tables, machine, show, train
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
    races,
    settings_of,
)
from ringmaster_dist.bench.contest_tables import COLUMNS, Result
from ringmaster_dist.bench.peers import descendants
from ringmaster_dist.simulation.pool import processes

Progress = Callable[[float, str], None]


_RUNS = "runs.csv"
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
        return _curve(self._read(trial))

    def brief(self, trial: Trial) -> Result:
        read = self._read(trial)
        words = "{processor}, {cores} cores, python {python}, torch {torch}".format_map(read["machine"])
        return Result.of(trial, _curve(read), read["date"], words)

    def _read(self, trial: Trial) -> dict[str, Any]:
        read: dict[str, Any] = json.loads((self._folder / f"{trial.key}.json").read_text())
        return read


def _curve(read: dict[str, Any]) -> list[Point]:
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
        earlier = [] if quick else contest_tables.read(kept / _RUNS)  # a file that cannot be read is noticed now
        line = ProgressLine(Console(file=sys.stderr))
        try:
            found = race(chosen, results, 1 if quick else seeds, line.show)
        finally:
            line.close()
        for table in contest_tables.tables(found, {cluster.name: cluster for cluster, _ in chosen}):
            title = f"time-to-loss {table.cluster.target:g}, {table.cluster.title}"
            show(title, ["contender", *COLUMNS], table.rows, as_json)
            print(table.words, file=sys.stderr)
        if not quick:
            _write_files(kept, contest_tables.merged(earlier, found))


def _write_files(folder: Path, results: Sequence[Result]) -> None:
    """Writes the results, and the tables and figures of them."""
    from ringmaster_dist.bench import contest_figure

    paths = [folder / name for name in (_RUNS, "tables.md", "time-to-loss.png", "overview.png")]
    runs, document, figure, overview = paths
    made = contest_tables.tables(results)
    contest_tables.write(runs, results)
    document.write_text(contest_tables.markdown(made))
    seconds = [(table.cluster, table.seconds) for table in made]
    contest_figure.draw(seconds, figure)
    contest_figure.draw_overview(seconds, overview)
    print(f"files: {', '.join(map(str, paths))}", file=sys.stderr)


def race(
    chosen: Iterable[tuple[Cluster, list[Contender]]], results: Results, seeds: int, progress: Progress
) -> list[Result]:
    """Tunes and runs. Returns the results in the order of clusters, contenders and seeds."""
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
    return [
        results.brief(trial)
        for winner in winners
        for trial in ([winner] if winner in hopeless else wanted)
        if (trial.cluster, trial.contender) == (winner.cluster, winner.contender)
    ]


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


# --- selection ---------------------------------------------------------------------------------------------------


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
