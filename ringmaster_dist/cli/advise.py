"""``ringmaster advise``."""

from __future__ import annotations

import math
import sys
from argparse import Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ringmaster_dist.cli.parser import Parser
from ringmaster_dist.cli.sources import cluster_times, source_options
from ringmaster_dist.config.errors import UserError

if TYPE_CHECKING:
    from rich.table import Table

    from ringmaster_dist.simulation.forecast import Forecast

_ENOUGH = 0.9
_LISTED_WORKERS = 12


def advise_options(parser: Parser) -> None:
    source_options(parser)


def run_advise(arguments: Namespace, overrides: list[str]) -> int:
    """ringmaster advise [SOURCE] [thresholds=R,R,...] [key=value ...]

    Plays candidate methods and thresholds on a cluster in virtual time and shows what each would do: updates per
    second, wasted compute, workers that would starve (none of their gradients is ever accepted), speed-up over
    synchronous training. Then it recommends a threshold. It is the smallest that makes nine tenths of the updates that
    accepting everything would make, because a larger one only adds older gradients. For this threshold it also shows
    what becomes of each worker's work. "slow half" is the share of accepted gradients that comes from the slower half
    of the workers. SOURCE is times=, file=, run=, or the word gpus for the paper's table of GPUs. Without it, the
    times come from the configuration: cluster.workers=8 cluster.profile=linear cluster.unit_seconds=1 ...

    This shows what another threshold would have done in a finished run:
      ringmaster advise run=runs/a thresholds=4
    """
    times, what, config = cluster_times(arguments, overrides)
    if len(times) < 2:
        raise UserError(f"{what}: with one worker nothing is ever late and there is nothing to choose")
    jitter = 0.0 if arguments.run else config.cluster.jitter
    _advise(times, what, sorted(arguments.thresholds), jitter)
    return 0


def _advise(times: Sequence[float], what: str, thresholds: Sequence[int], jitter: float) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from ringmaster_dist.algorithm.auto import AutoThreshold
    from ringmaster_dist.algorithm.methods import Method, Rennala, Synchronous
    from ringmaster_dist.algorithm.schedules import Constant
    from ringmaster_dist.simulation.forecast import forecast, horizon_of

    horizon = horizon_of(times)
    candidates: dict[str, Method] = {
        **{f"ringmaster R={r}": Method(Constant(0.1, 0.1, r)) for r in thresholds},
        "ringmaster R=auto": AutoThreshold(Constant(0.1, 0.05)),
        "asynchronous": Method(Constant(0.1, 0.1, math.inf)),
        f"rennala B={len(times)}": Rennala(Constant(0.1, 0.1), len(times)),
        "synchronous": Synchronous(Constant(0.1, 0.1)),
    }
    found: dict[str, Forecast] = {
        name: forecast(times, method, jitter=jitter, interrupt=True, horizon_seconds=horizon)
        for name, method in candidates.items()
    }
    console = Console(file=sys.stdout)
    console.print(f"{what}: {len(times)} workers, {times[0]:.4g} to {times[-1]:.4g} s per gradient", highlight=False)
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("method", "updates/s", "x sync", "wasted", "starving", "slow half"):
        table.add_column(column, justify="left" if column == "method" else "right", no_wrap=True)
    for name, forecast_ in found.items():
        total = max(1, int(forecast_.accepted.sum()))
        slow = int(forecast_.accepted[len(times) // 2 :].sum()) / total
        ratio = forecast_.updates_per_second / max(1e-12, found["synchronous"].updates_per_second)
        starving = f"{len(forecast_.starving)} of {len(times)}" if forecast_.starving else "none"
        table.add_row(name, f"{forecast_.updates_per_second:.4g}", f"{ratio:.2f}", f"{forecast_.wasted_fraction:.0%}",
                      starving, f"{slow:.0%}")  # fmt: skip
    console.print(table)
    most = found["asynchronous"].updates_per_second
    enough = [r for r in thresholds if found[f"ringmaster R={r}"].updates_per_second >= _ENOUGH * most]
    chosen = enough[0] if enough else thresholds[-1]
    advised = found[f"ringmaster R={chosen}"]
    console.print(_workers(times, advised))
    rate = advised.updates_per_second
    console.print(
        f"advice: method=ringmaster method.threshold={chosen} "
        f"({rate:.4g} updates/s, {rate / most:.0%} of what accepting everything would make)",
        highlight=False,
        soft_wrap=True,
    )


def _workers(times: Sequence[float], forecast_: Forecast) -> Table:
    """What would become of each worker's work, as advised."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for column in ("worker", "s/gradient", "accepted of what it began", "share of updates"):
        table.add_column(column, justify="right", no_wrap=True)
    total = max(1, int(forecast_.accepted.sum()))
    last = len(times) - 1
    for worker in range(len(times)):
        if _LISTED_WORKERS <= worker < last:
            if worker == _LISTED_WORKERS:
                table.add_row("...", "", "", "")
            continue
        accepted, begun = int(forecast_.accepted[worker]), int(forecast_.begun[worker])
        table.add_row(str(worker), f"{times[worker]:.4g}", f"{accepted / max(1, begun):.0%}", f"{accepted / total:.1%}")
    return table
