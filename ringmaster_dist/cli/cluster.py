"""Commands that reason about a cluster from the gradient times of its workers: theory and advise."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringmaster_dist.cli.parser import Parser, several, whole
from ringmaster_dist.config.errors import UserError

if TYPE_CHECKING:
    from ringmaster_dist.config.schema import Config
    from ringmaster_dist.simulation.forecast import Forecast

_ENOUGH = 0.9  # of the updates that accepting everything would make
_LISTED_WORKERS = 12
_AUTO = "auto"  # the value of method.threshold


def _cluster_options(parser: Parser) -> None:
    parser.setting("times=S,S,...", "SOURCE: the seconds per gradient of each worker, such as times=1,2,4")
    parser.setting("file=FILE", "SOURCE: a file that ringmaster profile has written")
    parser.setting("run=RUN_DIR", "SOURCE: a finished run, with the mean time of each of its workers")
    parser.setting("thresholds=R,R,...", "the thresholds to look at", several(whole(1)), "1,2,4,8,16,32")


def _load_cluster(arguments: Namespace, overrides: list[str], *defaults: str) -> tuple[list[float], str, Config]:
    """The seconds per gradient of each worker, sorted; their source in words; the configuration. Raises UserError."""
    from ringmaster_dist.config.compose import load
    from ringmaster_dist.simulation.cluster_times import gradient_times

    config = load(["cluster.workers=8", *defaults, *(word for word in overrides if word != "gpus")])
    given = {name: getattr(arguments, name) for name in ("times", "file", "run")}
    sources = {name: value for name, value in given.items() if value is not None}
    times, what = gradient_times(sources, "gpus" in overrides, config)
    return times, what, config


def _print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    from rich import box
    from rich.table import Table

    from ringmaster_dist.observe.closing import Stdout

    table = Table(box=box.SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, justify="left" if column == "method" else "right")
    for row in rows:
        table.add_row(*row)
    Stdout().print(table)


def theory_options(parser: Parser) -> None:
    _cluster_options(parser)
    parser.setting("updates=K", "the number of updates", whole(1), 1000)
    parser.setting("plot=FILE.png", "also draw H_m and the bounds", Path)


def run_theory(arguments: Namespace, overrides: list[str]) -> int:
    """ringmaster theory [SOURCE] [updates=K] [thresholds=R,R,...] [plot=FILE.png] [key=value ...]

    Prints what the paper's time bounds say about a cluster. SOURCE is times=, file=, run=, or the word gpus for the
    paper's table of GPUs. Without it, the times come from the configuration: cluster.workers=8 cluster.profile=linear
    cluster.unit_seconds=1 ...

    It prints the harmonic means H_m of the m quickest workers. For each threshold R it prints how many workers are
    useful (m*), how long any R consecutive updates take at most, t(R) = 2 min_m H_m (1 + R/m), and how long K updates
    take at most, ceil(K/R) t(R). Then it prints the time of K updates if the threshold grows as a square root. If
    speeds change (cluster.phases), it prints the same by the universal model. With constants
    (method.constants.smoothness=1 method.constants.noise=1 method.constants.initial_gap=1) it also prints the schedules
    of the theorems.
    """
    from ringmaster_dist import theory as bounds
    from ringmaster_dist.algorithm.schedules import agnostic

    updates, thresholds = arguments.updates, arguments.thresholds
    times, what, config = _load_cluster(arguments, overrides, f"budget.updates={updates}")
    totals = [bounds.seconds_of_run(times, updates, lambda k, r=r: r) for r in thresholds]  # type: ignore[misc]
    means = bounds.harmonic_means(times)
    shown = sorted({1, 2, 4, 8, 16, 32, 64, len(times)} & set(range(1, len(times) + 1)))
    print(f"{what}: {len(times)} workers, {times[0]:.4g} to {times[-1]:.4g} s per gradient")
    print("H_m: " + ", ".join(f"H_{m} = {means[m - 1]:.4g}" for m in shown))
    work = _work_by_phases(config)
    columns = ["R", "useful workers m*", "t(R)", f"T({updates:,})", "updates/s at least"]
    rows = []
    for threshold, total in zip(thresholds, totals, strict=True):
        useful, seconds = bounds.useful_workers(times, threshold), bounds.seconds_of_updates(times, threshold)
        row = [str(threshold), str(useful), f"{seconds:.4g}", f"{total:.4g}", f"{updates / total:.4g}"]
        by_phases = [f"{bounds.seconds_of_run_at(work, updates, threshold):.4g}"] if work else []
        rows.append([*row, *by_phases])
    _print_table([*columns, "T by phases"] if work else columns, rows)
    growing = bounds.seconds_of_run(times, updates, agnostic(1.0).threshold)
    print(f"threshold growing as sqrt(k): T({updates:,}) = {growing:.4g} s at most")
    print(f"waiting for all: T({updates:,}) = {updates * times[-1]:.4g} s")
    _print_schedules(config, updates)
    if arguments.plot:
        from ringmaster_dist.observe.cluster_figures import draw_theory

        _drawn(arguments.plot, draw_theory, means.tolist(), thresholds, totals, updates, updates * times[-1])
    return 0


def _work_by_phases(config: Config) -> Callable[[float], Any] | None:
    """How many gradients each worker could have computed by a time, if speeds change; otherwise None."""
    if not config.cluster.phases:
        return None
    import numpy as np

    from ringmaster_dist.simulation.session import build_speeds

    speeds = build_speeds(config)
    rates = speeds.rates
    assert rates is not None

    def work(time: float) -> Any:
        edges = np.append(rates.times, np.inf)
        spent = np.clip(time - edges[:-1], 0.0, edges[1:] - edges[:-1])
        return spent @ rates.factors / speeds.base

    return work


def _print_schedules(config: Config, updates: int) -> None:
    from ringmaster_dist.algorithm.schedules import Constants, agnostic, theory

    given = config.method.constants
    if given.smoothness is None or given.noise is None or given.initial_gap is None:
        return
    constants = Constants(given.smoothness, given.generalized_smoothness, given.noise, given.norm_ratio,
                          given.initial_gap, updates)  # fmt: skip
    fixed = theory(constants)
    print(f"Theorem 1 for K = {updates:,}: eta = {fixed.eta_value:.4g}, alpha = {fixed.alpha_value:.4g} "
          f"(beta = {1 - fixed.alpha_value:.4g}), R = {fixed.threshold_value:g}")  # fmt: skip
    schedule = agnostic(config.method.eta, generalized=given.generalized_smoothness > 0)
    for k in sorted({0, updates // 10, updates - 1}):
        print(f"agnostic at k = {k:,}: eta = {schedule.eta(k):.4g}, alpha = {schedule.alpha(k):.4g}, "
              f"R = {schedule.threshold(k):g}")  # fmt: skip


def _drawn(path: Path, draw: Callable[..., None], *numbers: Any) -> None:
    """Draws to the path and says so. Raises UserError if the file cannot be written."""
    try:
        draw(path, *numbers)
    except (OSError, ValueError) as error:
        raise UserError(f"plot={path} cannot be written ({error})") from error
    print(f"drawn: {path}")


def advise_options(parser: Parser) -> None:
    _cluster_options(parser)
    parser.setting("plot=FILE.png", "also draw what each candidate would do", Path)


def run_advise(arguments: Namespace, overrides: list[str]) -> int:
    """ringmaster advise [SOURCE] [thresholds=R,R,...] [plot=FILE.png] [key=value ...]

    Plays candidate methods and thresholds on a cluster in virtual time and shows what each would do: updates per
    second, wasted compute, workers that would starve (none of their gradients is ever accepted), speed-up over
    synchronous training. "ringmaster auto" is method.threshold=auto, the default, as long as late gradients help: then
    it accepts all of them. It lowers its threshold when they do not, which depends on the problem, and then one of the
    rows with a fixed R says what it does. Then it recommends a fixed threshold, for those who want one. It is the
    smallest that uses nine tenths of the work that accepting everything would use, because a larger one only adds older
    gradients. For this threshold it also shows how much of each worker's work is accepted. "slow half" is the share of
    accepted gradients that comes from the slower half of the workers. SOURCE is times=, file=, run=, or the word gpus
    for the paper's table of GPUs. Without it, the times come from the configuration: cluster.workers=8
    cluster.profile=linear cluster.unit_seconds=1 ...

    With problem=nanochat cluster.batch=auto it also plays rows by speed, and "grads/s" are the accepted gradients per
    second, in gradients of problem.batch rows. A time is that of such a gradient.

    This shows what another threshold would have done in a finished run:
      ringmaster advise run=runs/a thresholds=4
    """
    times, what, config = _load_cluster(arguments, overrides)
    if len(times) < 2:
        raise UserError(f"{what}: with one worker nothing is ever late and there is nothing to choose")
    thresholds = sorted(arguments.thresholds)
    rows_bounds = _rows_bounds(config)
    found = _forecasts(times, thresholds, 0.0 if arguments.run else config.cluster.jitter, rows_bounds)
    steps = config.local.steps
    pushed = "gradient" if steps == 1 else f"push of {steps} local steps"
    print(f"{what}: {len(times)} workers, {times[0]:.4g} to {times[-1]:.4g} s per {pushed}")
    synchronous = max(1e-12, found["synchronous"].updates_per_second)
    rows = []
    for name, played in found.items():
        slow = int(played.accepted[len(times) // 2 :].sum()) / max(1, int(played.accepted.sum()))
        starving = f"{len(played.starving)} of {len(times)}" if played.starving else "none"
        rate = played.updates_per_second
        gain = f"{played.work_per_second:.4g}" if rows_bounds else f"{rate / synchronous:.2f}"
        rows.append([name, f"{rate:.4g}", gain, f"{played.wasted_fraction:.0%}", starving, f"{slow:.0%}"])
    second = "grads/s" if rows_bounds else "x sync"
    _print_table(["method", "updates/s", second, "wasted", "starving", "slow half"], rows)
    most = found["asynchronous"].work_per_second
    candidates = [_candidate(r, by_speed=rows_bounds is not None) for r in thresholds]
    enough = [name for name in candidates if found[name].work_per_second >= _ENOUGH * most]
    name = enough[0] if enough else candidates[-1]
    chosen, advised = thresholds[candidates.index(name)], found[name]
    _print_table(["worker", "s/gradient", *(["rows"] if rows_bounds else []), "accepted of what it began",
                  "share of updates"], _by_worker(times, advised))  # fmt: skip
    by_speed = " cluster.batch=auto" if rows_bounds else ""
    automatic = found[_candidate(_AUTO, by_speed=rows_bounds is not None)]
    print(f"advice: method=ringmaster method.threshold={chosen}{by_speed} "
          f"({advised.updates_per_second:.4g} updates/s, {advised.work_per_second / most:.0%} of the work that "
          "accepting everything would use)")  # fmt: skip
    print(f"    or: method=ringmaster method.threshold={_AUTO}{by_speed} ({automatic.updates_per_second:.4g} updates/s "
          "as long as late gradients help; it finds out during the run)")  # fmt: skip
    if arguments.plot:
        from ringmaster_dist.observe.cluster_figures import draw_advice

        work = {name: played.work_per_second for name, played in found.items()}
        wasted = {name: played.wasted_fraction for name, played in found.items()}
        useful = [int(a) / max(1, int(b)) for a, b in zip(advised.accepted, advised.begun, strict=True)]
        _drawn(arguments.plot, draw_advice, work, wasted, name, useful)
    return 0


def _rows_bounds(config: Config) -> tuple[int, int, int] | None:
    """The usual, the least and the most rows of a gradient with cluster.batch=auto, else None."""
    if config.cluster.batch != "auto":
        return None
    usual, cluster = config.problem.batch, config.cluster
    return usual, cluster.batch_min, cluster.batch_max or usual


def _candidate(threshold: int | str, *, by_speed: bool) -> str:
    if threshold == _AUTO:
        return "rows auto, R auto" if by_speed else "ringmaster auto"
    return f"rows auto, R={threshold}" if by_speed else f"ringmaster R={threshold}"


def _forecasts(
    times: Sequence[float], thresholds: Sequence[int], jitter: float, rows_bounds: tuple[int, int, int] | None
) -> dict[str, Forecast]:
    """What each candidate would do on this cluster, by its name. Some assign rows by speed, if there are bounds."""
    from ringmaster_dist.algorithm.methods import Method, Rennala, Synchronous
    from ringmaster_dist.algorithm.rows import RowsBySpeed
    from ringmaster_dist.algorithm.schedules import Constant
    from ringmaster_dist.simulation.forecast import forecast, horizon_of

    everything = Method(Constant(0.1, 0.1, math.inf))
    candidates: dict[str, Method] = {
        **{_candidate(r, by_speed=False): Method(Constant(0.1, 0.1, r)) for r in thresholds},
        _candidate(_AUTO, by_speed=False): everything,
        "asynchronous": everything,
        f"rennala B={len(times)}": Rennala(Constant(0.1, 0.1), len(times)),
        "synchronous": Synchronous(Constant(0.1, 0.1)),
    }
    by_speed: dict[str, Method] = {}
    if rows_bounds:
        by_speed = {_candidate(r, by_speed=True): Method(Constant(0.1, 0.1, r)) for r in thresholds}
        by_speed[_candidate(_AUTO, by_speed=True)] = everything
    candidates |= by_speed
    horizon = horizon_of(times)
    return {
        name: forecast(
            times, method, jitter=jitter, interrupt=True, horizon_seconds=horizon,
            rows=RowsBySpeed(*rows_bounds) if rows_bounds and name in by_speed else None,
        )
        for name, method in candidates.items()
    }  # fmt: skip


def _by_worker(times: Sequence[float], played: Forecast) -> Iterable[Sequence[str]]:
    """What would become of each worker's work. The middle of a large cluster is left out."""
    total, last = max(1, int(played.accepted.sum())), len(times) - 1
    for worker in range(len(times)):
        accepted, begun = int(played.accepted[worker]), int(played.begun[worker])
        if worker < _LISTED_WORKERS or worker == last:
            rows = [str(played.rows[worker])] if played.rows[worker] else []
            share = f"{accepted / total:.1%}"
            yield str(worker), f"{times[worker]:.4g}", *rows, f"{accepted / max(1, begun):.0%}", share
        elif worker == _LISTED_WORKERS:
            yield ("...",)
