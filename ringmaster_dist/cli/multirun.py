"""Several runs of one command line: ``-m method=ringmaster,rennala``, one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from ringmaster_dist.config.compose import expand


def multirun_of(overrides: list[str], run: Callable[[list[str]], int], check: Callable[[list[str]], object]) -> int:
    """Each combination in a directory of its own, <run.dir>/0 and so on; for a logger they are one group."""
    parent = next((o.partition("=")[2] for o in overrides if o.startswith("run.dir=")), "")
    combinations = []
    for index, combination in enumerate(expand(overrides)):
        kept = [o for o in combination if not o.startswith("run.dir=")]
        combinations.append([*kept, f"run.dir={parent}/{index}"] if parent else kept)
    for combination in combinations:  # a slip in the last one is told before the first one runs
        check(combination)
    group = Path(parent).name or time.strftime("multirun-%Y-%m-%d_%H-%M-%S")
    for combination in combinations:
        words = {o.partition("=")[0] for o in combination}
        logs = any(o.startswith("logger=") and o != "logger=none" for o in combination)
        code = run([*combination, f"logger.group={group}"] if logs and "logger.group" not in words else combination)
        if code:
            return code
    return 0
