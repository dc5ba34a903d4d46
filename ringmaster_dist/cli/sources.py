"""The gradient times of a cluster, for the commands that reason about one."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

from ringmaster_dist.config.errors import UserError
from ringmaster_dist.config.profile_file import cluster_seconds, read_times
from ringmaster_dist.config.schema import Config
from ringmaster_dist.profiles import GPU_GRADIENT_SECONDS


def gradient_times(given: Mapping[str, str], gpus: bool, config: Config) -> tuple[list[float], str]:
    """Seconds per gradient of each worker, sorted, and a description of their source.

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
        times, what = read_times(Path(given["file"])), given["file"]
    elif "run" in given:
        times, what = _times_of_run(Path(given["run"])), f"the workers of {given['run']}"
    elif gpus:
        times, what = list(GPU_GRADIENT_SECONDS.values()), "the paper's GPUs"
    else:
        times = cluster_seconds(config.cluster, config.cluster.workers).tolist()
        what = f"{config.cluster.workers} workers, {config.cluster.profile}"
    if min(times) <= 0 or not all(map(math.isfinite, times)):
        raise UserError(f"gradient times must be above 0 seconds: {min(times):g}")
    return sorted(times), what


def _times_of_run(directory: Path) -> list[float]:
    """The mean compute time of each worker; for one that delivered nothing, the pace it was given, if any."""
    trace = directory / "trace.jsonl"
    if not trace.is_file():
        raise UserError(f"run={directory}: there is no trace.jsonl in it")
    sums: dict[int, list[float]] = {}
    try:
        for line in trace.read_text().splitlines(keepends=True):
            if line.endswith("\n"):  # else it is being written
                record = json.loads(line)
                sums.setdefault(record["worker"], []).append(float(record["compute_seconds"]))
        workers = json.loads(_text(directory / "summary.json") or "{}").get("per_worker", {})
        silent = {int(worker): float(facts["base_seconds"]) for worker, facts in workers.items()}
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{trace} is not the trace of a run of this program ({error!r})") from error
    if not sums:
        raise UserError(f"{trace} is empty: the run delivered no gradient")
    paced = [seconds for worker, seconds in silent.items() if worker not in sums and seconds > 0]
    return [sum(times) / len(times) for times in sums.values()] + paced


def _text(path: Path) -> str:
    return path.read_text() if path.is_file() else ""
