"""``ringmaster bench simulator``: the paper's quadratic at full size, on one thread."""

from __future__ import annotations

import tempfile
from typing import Any

import torch

from ringmaster_dist.bench import best_and_worst, show
from ringmaster_dist.config.compose import load
from ringmaster_dist.config.schema import Config
from ringmaster_dist.observe.records import Summary
from ringmaster_dist.observe.run_directory import RunDirectory
from ringmaster_dist.simulation.session import simulate

# The seconds reported for the authors' simulator on the ringmaster rows, with 2 cores. This bench does not run it.
AUTHORS_SECONDS = {"similar": 390.0, "sublinear": 83.0, "linear": 51.0}
_COLUMNS = ["run", "seconds", "worst", "updates", "us/update", "started", "ns/start", "authors/ours"]


def run(quick: bool, as_json: bool) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        show("simulator", _COLUMNS, measure(quick), as_json)
    finally:
        torch.set_num_threads(threads)


def measure(quick: bool) -> list[dict[str, Any]]:
    repeats, shorter = (1, 10) if quick else (3, 1)
    paper = ["experiment=paper_quadratic", "simulation.engine=compiled"]
    _play(load([*paper, "method.threshold=8", "budget.seconds=2"]))  # the first run compiles, or loads compiled code
    rows = []
    for profile in ("similar", "sublinear", "linear"):
        for method in ("ringmaster method.threshold=8", "rennala method.batch=8"):
            rows.append(_row([*paper, f"cluster.profile={profile}", *f"method={method}".split()], repeats))
    # With this many updates most of the time would go into the trace, so these runs have none.
    long = [*paper, "run.trace=false"]
    for profile in ("similar", "sublinear", "linear"):
        limit = f"budget.updates={100_000 // shorter}"
        rows.append(_row([*long, f"cluster.profile={profile}", "method=ringmaster_agnostic", limit], repeats))
    for method in ("delay_adaptive", "asynchronous"):
        limit = f"budget.updates={500_000 // shorter}"
        rows.append(_row([*long, "cluster.profile=similar", f"method={method}", limit], repeats))
    if not quick:  # parts of two runs with the interpreted core, for comparison
        core = ["experiment=paper_quadratic", "simulation.engine=core", "cluster.profile=similar"]
        rows.append(_row([*core, "budget.seconds=20", "method=ringmaster", "method.threshold=8"], 1))
        rows.append(_row([*core, "budget.updates=5000", "method=asynchronous"], 1))
    return rows


def _row(overrides: list[str], repeats: int) -> dict[str, Any]:
    config = load(overrides)
    results: list[Summary] = []
    best, worst = best_and_worst(lambda: results.append(_play(config)), repeats)
    summary = results[-1]
    started = summary.pushes + summary.interrupted + summary.num_workers
    authors = AUTHORS_SECONDS[summary.profile]
    comparable = summary.method == "ringmaster" and summary.seconds == 2000.0
    return {
        "run": f"{summary.method} {summary.profile}" + (" (core)" if summary.engine == "core" else ""),
        "seconds": round(best, 3),
        "worst": round(worst, 3),
        "updates": summary.updates,
        "us/update": round(best / summary.updates * 1e6, 1),
        "started": started,
        "ns/start": round(best / started * 1e9),
        "authors/ours": f"{authors / best:.0f}x" if comparable else "",
    }


def _play(config: Config) -> Summary:
    with tempfile.TemporaryDirectory() as folder:
        return simulate(config, RunDirectory(folder, name="bench"))
