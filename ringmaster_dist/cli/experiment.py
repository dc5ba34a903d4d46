"""``ringmaster experiment``."""

from __future__ import annotations

import os
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from ringmaster_dist.cli.parser import Parser, several, whole
from ringmaster_dist.config.errors import UserError

if TYPE_CHECKING:
    from ringmaster_dist.experiment.machines import Machines
    from ringmaster_dist.experiment.plan import Plan
    from ringmaster_dist.experiment.runner import Progress, Result

_SIZES = {  # of each experiment, the default first
    "quadratic": ("full", "smoke"),
    "nanochat": ("cpu", "full", "smoke"),
    "auto": ("full", "smoke"),
    "radii": ("full", "smoke"),
    "steps": ("full", "smoke"),
    "machines": ("full", "smoke", "six"),
}


def experiment_options(parser: Parser) -> None:
    parser.add_argument("name", metavar="NAME", choices=_SIZES, help="one of the experiments above")
    parser.setting("size=SIZE", "one of the sizes above (default: the first)")
    parser.setting("dir=DIR", "where to write (default: runs/NAME-SIZE)", Path)
    parser.setting("seeds=N", "how many seeds the winners run with", whole(1), 3)
    parser.setting("jobs=N", "how many runs at once", whole(1), os.cpu_count() or 1)
    parser.setting("regimes=A,B", "only these regimes, or those with this part in their name", several(str))


def run_experiment(arguments: Namespace, overrides: list[str]) -> int:
    """ringmaster experiment NAME [size=SIZE] [dir=DIR] [seeds=N] [jobs=N] [regimes=A,B]

    Runs an experiment in virtual time, one of the paper's or one of our own. It tunes every method over its grid in
    each regime under the same budget, and runs the winners with several seeds. It writes the tables (tuning.csv,
    curves.csv), the figure (PNG, PDF) and a summary in words. After an interruption, the same command continues with
    the missing runs.

      quadratic  size=full    6174 workers, 1729 coordinates, 2000 s, the paper's grids; needs the extra fast. It also
                              tunes every method for the time to a gap
                 size=smoke   a small version, a minute
      nanochat   size=cpu     a small model on Python's standard library, with the paper's methods and grids, on 8
                              and on 32 workers; about an hour on two cores. regimes=8 or linear-32 plays a part
                 size=full    the paper's model and time, for a machine with a GPU
                 size=smoke   a minute, with 3 workers
      auto       size=full    method.threshold=auto versus the best fixed threshold, also where speeds change in mid-run
                 size=smoke   a small version
      radii      size=full    a radius for every role versus one eta, and versus torch.optim.Muon with AdamW, on the
                              tiny model, with one worker and with eight unequal ones; half an hour on two cores
                 size=smoke   a small version
      steps      size=full    the step size by method and geometry on the tiny model: what method.eta=null means
                 size=smoke   a small version
      machines   size=full    seconds to a target loss of the automatic choices versus the best of the other methods,
                              each tuned, on 8 and 32 workers with five kinds of speeds and three problems; an hour and
                              a half on two cores. regimes= also takes a part of a cell's name, or several
                 size=smoke   a small version
                 size=six     a picture of six machines before and after the automatic choices; a minute
    """
    from rich.console import Console

    from ringmaster_dist.experiment import before_after
    from ringmaster_dist.observe.console import ProgressLine

    size = _size(arguments)
    folder = arguments.dir or Path(f"runs/{arguments.name}-{size}")
    began, line = time.monotonic(), ProgressLine(Console(file=sys.stderr))
    try:
        if size == "six":
            print(f"files: {before_after.make(folder, line.show)}")
            return 0
        results, paths, summary = _played(_plan(arguments, size), folder, arguments.jobs, line.show)
    finally:
        line.close()
    print(summary)
    compute = sum(result.wall_seconds for result in results)
    minutes = (time.monotonic() - began) / 60
    print(f"{len(results)} runs, {compute / 60:.1f} min of simulation, {minutes:.1f} min this time")
    print("files: " + ", ".join(map(str, paths)))
    return 0


def _played(plan: Plan | Machines, folder: Path, jobs: int, show: Progress) -> tuple[list[Result], list[Path], str]:
    """Runs the plan and writes its files. Returns the results, the files and the summary."""
    from ringmaster_dist.experiment import race, results, runner, standings
    from ringmaster_dist.experiment.machines import Machines

    if isinstance(plan, Machines):
        raced = race.run(plan, folder, jobs, show)
        return [*raced.tuning, *raced.final], standings.write(raced, folder), standings.summary(raced)
    outcome = runner.run(plan, folder, jobs, show)
    played = [*outcome.tuning, *outcome.final, *outcome.timed]
    return played, results.write(outcome, folder), results.summary(outcome)


def _size(arguments: Namespace) -> str:
    sizes = _SIZES[arguments.name]
    size: str = arguments.size or sizes[0]
    if size not in sizes:
        raise UserError(f"size={size}: {arguments.name} has {', '.join(sizes)}")
    return size


def _plan(arguments: Namespace, size: str) -> Plan | Machines:
    from ringmaster_dist.experiment import machines, plan

    if arguments.name == "machines":
        return machines.machines(size, arguments.seeds).only(arguments.regimes)
    made: Plan = getattr(plan, arguments.name)(size, arguments.seeds)
    return made.only(arguments.regimes)
