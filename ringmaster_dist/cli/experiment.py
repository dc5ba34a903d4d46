"""``ringmaster experiment NAME``."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ringmaster_dist.config.errors import UserError

if TYPE_CHECKING:
    from ringmaster_dist.experiment.plan import Plan

_HELP = """ringmaster experiment quadratic|nanochat|auto|radii|steps [size=...] [dir=...] [seeds=3] [jobs=N] [workers=8]
           [regimes=...]

Runs an experiment in virtual time, the paper's or one of our own: tunes every method over its grid in each regime under
the same budget, runs the winners with several seeds, and writes the tables (tuning.csv, curves.csv), the figure
(PNG, PDF) and a summary in words. Interrupted at any time, the same command goes on with what is missing.

  quadratic  size=full    6174 workers, 1729 coordinates, 2000 s, the paper's grids (the default; needs the extra fast)
             size=smoke   the same in small, a minute
  nanochat   size=full    the paper's model and grids; one command for a machine with a GPU; workers=8 or 32
             size=cpu     the tiny model on Python's standard library, the same methods and grids (the default)
             size=smoke   a minute, with 3 workers
  auto       size=full    method.threshold=auto beside the best fixed threshold, also where speeds change in mid-run
             size=smoke   the same in small
  radii      size=full    a radius for every role versus one eta, and versus torch.optim.Muon with AdamW, on the tiny
                          model: one worker, and eight unequal ones, 400 updates each; half an hour on two cores
             size=smoke   the same in small
  steps      size=full    the step size by method and geometry on the tiny model: what method.eta=null means
             size=smoke   the same in small

  regimes=linear,similar   only these
"""
_KNOWN = ("size", "dir", "seeds", "jobs", "workers", "regimes")


def main(argv: list[str]) -> int:
    if not argv or "-h" in argv or "--help" in argv:
        print(_HELP)
        return 0

    from rich.console import Console

    from ringmaster_dist.experiment import results, runner
    from ringmaster_dist.observe.console import ProgressLine

    name, *words = argv
    plan, options = _plan(name, words)
    folder = Path(options.get("dir", f"runs/{name}-{plan.size}"))
    jobs = _whole("jobs", options.get("jobs", str(os.cpu_count() or 1)))
    console, began = Console(file=sys.stderr), time.monotonic()
    line = ProgressLine(console)
    try:
        outcome = runner.run(plan, folder, jobs, line.show)
    finally:
        line.close()
    paths = results.write(outcome, folder)
    print(results.summary(outcome))
    runs = len(outcome.tuning) + len(outcome.final)
    compute = sum(r.wall_seconds for r in (*outcome.tuning, *outcome.final))
    print(f"{runs} runs, {compute / 60:.1f} min of simulation, {(time.monotonic() - began) / 60:.1f} min this time")
    print("files: " + ", ".join(map(str, paths)))
    return 0


def _plan(name: str, words: list[str]) -> tuple[Plan, dict[str, str]]:
    from ringmaster_dist.experiment import plan

    options = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or key not in _KNOWN:
            raise UserError(f"{word}: write key=value with one of {', '.join(_KNOWN)}")
        options[key] = value
    sizes = {"quadratic": ("full", "smoke"), "nanochat": ("cpu", "full", "smoke"), "auto": ("full", "smoke"),
             "radii": ("full", "smoke"), "steps": ("full", "smoke")}  # fmt: skip
    if name not in sizes:
        raise UserError(f"there is no experiment {name!r}; known: {', '.join(sizes)}")
    size = options.get("size", sizes[name][0])
    if size not in sizes[name]:
        raise UserError(f"size={size}: {name} has {', '.join(sizes[name])}")
    seeds = _whole("seeds", options.get("seeds", "3"))
    if name == "quadratic":
        chosen = plan.quadratic(size, seeds)
    elif name in ("auto", "radii", "steps"):
        chosen = {"auto": plan.auto, "radii": plan.radii, "steps": plan.steps}[name](size, seeds)
    else:
        chosen = plan.nanochat(size, seeds, _whole("workers", options.get("workers", "8")))
    regimes = tuple(options.get("regimes", ",".join(chosen.regimes)).split(","))
    for regime in regimes:
        if regime not in chosen.regimes:
            raise UserError(f"regimes={options['regimes']}: {regime!r} is not one of {', '.join(chosen.regimes)}")
    return chosen._replace(regimes=regimes), options


def _whole(key: str, text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise UserError(f"{key}={text}: must be a whole number of at least 1")
    return int(text)
