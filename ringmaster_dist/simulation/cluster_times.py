"""The gradient times of a cluster, for the commands that reason about one.

Without ``run=`` this module imports no torch, so that these commands start quickly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from ringmaster_dist.config.errors import UserError
from ringmaster_dist.config.profile_file import cluster_seconds, read_profile
from ringmaster_dist.config.schema import Config
from ringmaster_dist.profiles import GPU_GRADIENT_SECONDS


def gradient_times(given: Mapping[str, str], gpus: bool, config: Config) -> tuple[list[float], str]:
    """Seconds per push of each worker, sorted, and a description of their source. A push is local.steps gradients.

    ``given`` may have one of the words ``times``, ``file`` and ``run`` of the command line. Raises UserError.
    """
    sources = [name for name in ("times", "file", "run") if name in given] + (["gpus"] if gpus else [])
    if len(sources) > 1:
        raise UserError(f"{' and '.join(sources)}: give one source of times")
    if "times" in given:
        try:
            times, what = [float(word) for word in given["times"].split(",")], "the given times"
        except ValueError:
            raise UserError(f"times={given['times']}: must be numbers of seconds, such as 1,2,4") from None
    elif "file" in given:
        times, what = read_profile(Path(given["file"]), "file").seconds, given["file"]
    elif "run" in given:
        from ringmaster_dist.observe.run_files import belong_together

        with belong_together(Path(given["run"])):
            times, what = _times_of_run(Path(given["run"])), f"the workers of {given['run']}"
    elif gpus:
        times, what = list(GPU_GRADIENT_SECONDS.values()), "the paper's GPUs"
    else:
        times = cluster_seconds(config, config.cluster.workers).tolist()
        what = f"{config.cluster.workers} workers, {config.cluster.profile}"
    if sources and "run" not in given:  # the others are times of pushes already
        times = [config.local.steps * seconds for seconds in times]
    if min(times) <= 0 or not all(map(math.isfinite, times)):
        raise UserError(f"gradient times must be above 0 seconds: {min(times):g}")
    return sorted(times), what


def _times_of_run(directory: Path) -> list[float]:
    """The mean compute time of each worker. For a worker that delivered nothing it is the pace it was given, if any."""
    from ringmaster_dist.observe.measures import mean_compute_seconds
    from ringmaster_dist.observe.run_files import TRACE, RunFiles, Trace

    if not (directory / TRACE).is_file():
        raise UserError(f"run={directory}: there is no trace.jsonl in it")
    trace = Trace(directory / TRACE)
    trace.read_new()
    if not len(trace):
        raise UserError(f"{directory / TRACE} is empty: the run delivered no gradient")
    config = RunFiles(directory).config()
    usual_rows = config["problem"].get("batch") if config["cluster"].get("batch") == "auto" else None
    delivered, summary = mean_compute_seconds(trace, usual_rows), RunFiles(directory).summary()
    silent = {} if summary is None else {int(w): worker.base_seconds for w, worker in summary.per_worker.items()}
    paced = [seconds for worker, seconds in silent.items() if worker not in delivered and seconds > 0]
    return [*delivered.values(), *paced]
