"""``ringmaster chaos``: the same training twice, undisturbed and under faults, and the account of the difference."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from ringmaster_dist.chaos.faults import Injector, schedule
from ringmaster_dist.chaos.report import account, show
from ringmaster_dist.config.compose import compose, to_typed
from ringmaster_dist.config.errors import UserError
from ringmaster_dist.observe.run_files import RunFiles
from ringmaster_dist.runtime.preparation import prepare
from ringmaster_dist.runtime.processes import SupervisedProcess, become, leave
from ringmaster_dist.runtime.supervisor import supervise

_HELP = """ringmaster chaos [seconds=600] [faults=60] [restarts=2] [seed=0] [dir=DIR] [key=value ...] [--json]

Trains undisturbed for a while, then for the given time under a random schedule, the same for the same seed: workers are
killed, stopped for some seconds, cut off from the server and made to send NaN; the server is killed. Then it accounts:
faults that struck, goodput (accepted updates per second beside the undisturbed run), updates lost beyond the newest
checkpoint (must be 0), and whether the trace replays to the same bits. Exit code 0 if nothing was lost, no bit is wrong
and the server did not die by itself, 1 otherwise. Writes chaos.json and both runs to dir.

  seconds    how long the disturbed run takes           baseline   how long the undisturbed one (a tenth, at least 8)
  faults     of workers, all kinds equally often        restarts   of the server
  key=value  other keys are those of ringmaster train, such as cluster.workers=16 method=rennala
  --json     one line of JSON instead of the table

  ringmaster chaos seconds=60 faults=12 restarts=1
"""
_NUMBERS = {"seconds": 600.0, "faults": 60, "restarts": 2, "seed": 0, "baseline": 0.0}
_DEFAULTS = ["cluster.workers=8", "cluster.unit_seconds=0.1", "method=ringmaster", "method.threshold=16",
             "checkpoint.every=25", "server.lease_seconds=3", "server.farewell_seconds=5", "server.max_invalid=100",
             "budget.updates=null", "budget.seconds=1e6", "run.samples=1000000"]  # fmt: skip


def main(argv: list[str]) -> int:
    if "-h" in argv or "--help" in argv:
        print(_HELP)
        return 0
    numbers, directory, overrides = _parse([word for word in argv if word != "--json"])
    seconds = numbers["seconds"]
    baseline = numbers["baseline"] or max(8.0, seconds / 10)
    print(f"chaos: {baseline:.0f} s undisturbed, then {seconds:.0f} s under faults, in {directory}", file=sys.stderr)
    seed, faults, restarts = (int(numbers[name]) for name in ("seed", "faults", "restarts"))
    with _said_to(directory / "processes.log"):
        undisturbed = _train(directory / "undisturbed", overrides, baseline, lambda workers: [])
        disturbed = _train(
            directory / "disturbed", overrides, seconds,
            lambda workers: schedule(seed, seconds, workers, faults, restarts),
        )  # fmt: skip
    report = account(directory, undisturbed, disturbed, {**numbers, "baseline": baseline})
    (directory / "chaos.json").write_text(json.dumps(report, indent=2) + "\n")
    show(report, as_json="--json" in argv)
    sound = report["replay"] == "same" and report["lost_updates"] == 0 and report["unplanned_restarts"] == 0
    return 0 if sound else 1


def _train(path: Path, overrides: list[str], seconds: float, plan: Callable[[int], list[Any]]) -> Injector:
    """One run, ended after its time."""
    config, _, directory = prepare([*_DEFAULTS, *overrides, f"run.dir={path}"])
    injector = Injector(path, plan(config.cluster.workers), seconds, lambda: os.kill(os.getpid(), signal.SIGTERM))

    def watch(server: SupervisedProcess, workers: list[SupervisedProcess]) -> None:
        injector.tick(server.pid, [worker.pid for worker in workers])

    try:
        code = supervise(config, directory, work=partial(_suffer, str(path / "faults.jsonl")), watch=watch)
    finally:
        injector.release()
    if code == 0 and not injector.is_over:
        raise UserError(f"the run in {path} was stopped before its time: there is nothing to account for")
    if code != 0:
        raise UserError(
            f"the run in {path} ended with code {code} at version {RunFiles(path).last_version()}: see processes.log"
        )
    return injector


@contextmanager
def _said_to(path: Path) -> Iterator[None]:
    """What this process and its children write to stderr goes to a file: most of it is what was asked for."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stderr.flush()
    terminal = os.dup(2)
    with path.open("w") as said:
        os.dup2(said.fileno(), 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(terminal, 2)
        os.close(terminal)


def _suffer(told: str, name: str, address: str, token: str, slot: int, arguments: dict[str, Any]) -> None:
    """A worker's process, with a saboteur in it."""
    from ringmaster_dist.chaos.saboteur import Saboteur
    from ringmaster_dist.worker.__main__ import work

    become(name)
    saboteur = Saboteur(Path(told))
    leave(work(address, token, saboteur.make_job, slot=slot, **arguments))


def _parse(argv: list[str]) -> tuple[dict[str, float], Path, list[str]]:
    numbers, overrides = dict(_NUMBERS), []
    directory = Path("runs") / f"chaos-{datetime.now():%Y-%m-%d_%H-%M-%S}"
    for word in argv:
        key, equals, value = word.partition("=")
        if word.startswith("-") or not equals:
            raise UserError(f"{word!r} is not understood; see ringmaster chaos --help")
        if key == "dir":
            directory = Path(value)
        elif key in numbers:
            try:
                numbers[key] = float(value)
            except ValueError:
                raise UserError(f"{key}={value}: not a number") from None
            least = 5.0 if key == "seconds" else 0.0
            if not numbers[key] >= least or (key not in ("seconds", "baseline") and numbers[key] % 1):
                raise UserError(f"{key}={value}: must be at least {least:g}, and faults, restarts and seed whole")
        else:
            overrides.append(word)
    to_typed(compose([*_DEFAULTS, *overrides], "train"), real_time=True)  # a mistake is told before anything is begun
    if directory.exists() and any(directory.iterdir()):
        raise UserError(f"dir={directory} is not empty: choose another")
    return numbers, directory, overrides
