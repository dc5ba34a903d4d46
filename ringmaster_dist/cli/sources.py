"""Where the times of a cluster come from, for the commands that reason about one."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from ringmaster_dist.config.errors import UserError


def wholes(key: str, text: str) -> list[int]:
    words = text.split(",")
    if not all(word.isdigit() and int(word) >= 1 for word in words):
        raise UserError(f"{key}={text}: must be whole numbers of at least 1")
    return [int(word) for word in words]


def sort_words(argv: list[str], names: tuple[str, ...]) -> tuple[dict[str, str], list[str]]:
    """The values of a command's own ``name=value`` words, and the words that are the configuration's."""
    pairs = [(word, *word.partition("=")[::2]) for word in argv if word != "gpus"]
    own = {name: value for _, name, value in pairs if name in names}
    return own, [word for word, name, _ in pairs if name not in names]


def times_of(own: dict[str, str], gpus: bool, config: Any) -> tuple[list[float], str]:
    """Seconds per gradient, sorted, and what they are. Raises UserError."""
    from ringmaster_dist.config.profile_file import cluster_seconds, read_times
    from ringmaster_dist.profiles import GPU_GRADIENT_SECONDS

    given = [name for name in ("times", "file", "run") if name in own] + (["gpus"] if gpus else [])
    if len(given) > 1:
        raise UserError(f"{' and '.join(given)}: give one source of times")
    if "times" in own:
        try:
            times = [float(word) for word in own["times"].split(",")]
        except ValueError:
            raise UserError(f"times={own['times']}: must be numbers of seconds, such as 1,2,4") from None
        what = "the given times"
    elif "file" in own:
        times, what = read_times(Path(own["file"])), own["file"]
    elif "run" in own:
        times, what = _times_of_run(Path(own["run"])), f"the workers of {own['run']}"
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
