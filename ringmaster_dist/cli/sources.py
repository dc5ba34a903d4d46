"""Where theory and advise take the gradient times of a cluster from."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from ringmaster_dist.cli.parser import Parser, several, whole
from ringmaster_dist.config.errors import UserError

if TYPE_CHECKING:
    from ringmaster_dist.config.schema import Config


def _seconds(text: str) -> list[float]:
    try:
        return [float(word) for word in text.split(",")]
    except ValueError:
        raise ValueError("must be numbers of seconds, such as 1,2,4") from None


def source_options(parser: Parser) -> None:
    parser.setting("times=S,S,...", "SOURCE: the seconds per gradient of each worker, such as times=1,2,4", _seconds)
    parser.setting("file=FILE", "SOURCE: a file that ringmaster profile has written", Path)
    parser.setting("run=RUN_DIR", "SOURCE: a finished run, with the mean time of each of its workers", Path)
    parser.setting("thresholds=R,R,...", "the thresholds to look at", several(whole(1)), "1,2,4,8,16,32")


def cluster_times(arguments: Namespace, overrides: list[str], *defaults: str) -> tuple[list[float], str, Config]:
    """The seconds per gradient of each worker, sorted; their source in words; the configuration. Raises UserError."""
    from ringmaster_dist.config.compose import load
    from ringmaster_dist.config.profile_file import cluster_seconds, read_times
    from ringmaster_dist.profiles import GPU_GRADIENT_SECONDS

    config = load(["cluster.workers=8", *defaults, *(word for word in overrides if word != "gpus")])
    given = [name for name in ("times", "file", "run") if getattr(arguments, name) is not None]
    given += ["gpus"] if "gpus" in overrides else []
    if len(given) > 1:
        raise UserError(f"{' and '.join(given)}: give one source of times")
    if given == ["times"]:
        times, what = arguments.times, "the given times"
    elif given == ["file"]:
        times, what = read_times(arguments.file), str(arguments.file)
    elif given == ["run"]:
        times, what = _times_of_run(arguments.run), f"the workers of {arguments.run}"
    elif given == ["gpus"]:
        times, what = list(GPU_GRADIENT_SECONDS.values()), "the paper's GPUs"
    else:
        times = cluster_seconds(config.cluster, config.cluster.workers).tolist()
        what = f"{config.cluster.workers} workers, {config.cluster.profile}"
    if min(times) <= 0 or not all(map(math.isfinite, times)):
        raise UserError(f"gradient times must be above 0 seconds: {min(times):g}")
    return sorted(times), what, config


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
