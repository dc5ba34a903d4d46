"""``ringmaster chaos``: the same training twice, undisturbed and under faults, and the account of the difference."""

from __future__ import annotations

import json
import os
import signal
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringmaster_dist.cli.parser import Parser, number, whole
from ringmaster_dist.config.errors import UserError
from ringmaster_dist.signals import STOPPED

if TYPE_CHECKING:
    from ringmaster_dist.chaos.faults import Fault, Injector
    from ringmaster_dist.runtime.processes import SupervisedProcess

_DEFAULTS = ["cluster.workers=8", "cluster.unit_seconds=0.1", "method=ringmaster", "method.threshold=16",
             "checkpoint.every=25", "server.lease_seconds=3", "server.farewell_seconds=5", "server.max_invalid=100",
             "budget.updates=null", "budget.seconds=1e6", "run.samples=1000000"]  # fmt: skip


def chaos_options(parser: Parser) -> None:
    parser.setting("seconds=S", "how long the disturbed run takes", number(5), 600)
    parser.setting("baseline=S", "how long the undisturbed run takes (default: a tenth, at least 8)", number(0))
    parser.setting("faults=N", "how many faults of workers, all kinds equally often", whole(0), 60)
    parser.setting("restarts=N", "how many kills of the server", whole(0), 2)
    parser.setting("seed=N", "the same seed gives the same schedule", whole(0), 0)
    parser.setting("dir=DIR", "where to write (default: runs/chaos-DATE)", Path)
    parser.switch("--json", help="one line of JSON instead of the table")


def run_chaos(arguments: Namespace, overrides: list[str]) -> int:
    """ringmaster chaos [seconds=S] [faults=N] [restarts=N] [seed=N] [dir=DIR] [key=value ...] [--json]

    Trains undisturbed for a while, then for the given time under a random schedule of faults. Workers are killed,
    stopped for some seconds, cut off from the server and made to send NaN. The server is killed. Then it reports the
    faults that happened, the goodput (accepted updates per second versus the undisturbed run), the updates that the
    newest checkpoint had and the restarted server lost (must be 0), and whether the trace replays to the same bits. It
    writes chaos.json and both runs to dir. Other keys are those of ringmaster train, such as cluster.workers=16
    method=rennala.

    The exit code is 0 if nothing was lost, no bit is wrong and the server did not die by itself. It is 1 otherwise.

    Example
      ringmaster chaos seconds=60 faults=12 restarts=1
    """
    from ringmaster_dist.chaos.faults import schedule
    from ringmaster_dist.chaos.report import account, show
    from ringmaster_dist.config.compose import compose, to_typed

    # The configuration is composed to report a mistake before anything is written.
    config = to_typed(compose([*_DEFAULTS, *overrides], "train"), real_time=True)
    directory = arguments.dir or Path("runs") / f"chaos-{datetime.now():%Y-%m-%d_%H-%M-%S}"
    if directory.exists() and any(directory.iterdir()):
        raise UserError(f"dir={directory} is not empty: choose another")
    seconds, seed, num_faults, restarts = arguments.seconds, arguments.seed, arguments.faults, arguments.restarts
    baseline = arguments.baseline or max(8.0, seconds / 10)
    print(f"chaos: {baseline:.0f} s undisturbed, then {seconds:.0f} s under faults, in {directory}", file=sys.stderr)
    with _stderr_to(directory / "processes.log"):
        undisturbed = _train(directory / "undisturbed", overrides, baseline, [])
        faults = schedule(seed, seconds, config.cluster.workers, num_faults, restarts)
        disturbed = _train(directory / "disturbed", overrides, seconds, faults)
    given = {"seconds": seconds, "faults": num_faults, "restarts": restarts, "seed": seed, "baseline": baseline}
    report = account(directory, undisturbed, disturbed, given)
    (directory / "chaos.json").write_text(json.dumps(report, indent=2) + "\n")
    show(report, as_json=arguments.json)
    sound = report["replay"] == "same" and report["lost_updates"] == 0 and report["unplanned_restarts"] == 0
    return 0 if sound else 1


def _train(path: Path, overrides: list[str], seconds: float, faults: Sequence[Fault]) -> Injector:
    """One run under these faults, which is stopped after its time."""
    from ringmaster_dist.chaos.faults import Injector
    from ringmaster_dist.observe.run_files import RunFiles
    from ringmaster_dist.runtime.preparation import prepare
    from ringmaster_dist.runtime.supervisor import supervise

    config, _, directory = prepare([*_DEFAULTS, *overrides, f"run.dir={path}"])
    injector = Injector(path, faults, seconds, lambda: os.kill(os.getpid(), signal.SIGTERM))

    def watch(server: SupervisedProcess, workers: list[SupervisedProcess]) -> None:
        injector.tick(server.pid, [worker.pid for worker in workers])

    try:
        code = supervise(config, directory, work=partial(_work_with_saboteur, str(path / "faults.jsonl")), watch=watch)
    finally:
        injector.release()
    if code >= 128 and injector.is_over:
        code = 0  # the injector has stopped it
    elif code in (0, *STOPPED):
        raise UserError(f"the run in {path} was stopped before its time: there is nothing to account for")
    if code != 0:
        raise UserError(
            f"the run in {path} ended with code {code} at version {RunFiles(path).last_version()}: see processes.log"
        )
    return injector


@contextmanager
def _stderr_to(path: Path) -> Iterator[None]:
    """Writes the stderr of this process and its children to a file, because most of it reports the faults we caused."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stderr.flush()
    terminal = os.dup(2)
    with path.open("w") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(terminal, 2)
        os.close(terminal)


def _work_with_saboteur(
    faults_file: str, name: str, address: str, token: str, slot: int, arguments: dict[str, Any]
) -> None:
    """The body of a worker's process that causes its own faults."""
    from ringmaster_dist.chaos.saboteur import Saboteur
    from ringmaster_dist.logs import set_up_logging
    from ringmaster_dist.runtime.processes import become, leave
    from ringmaster_dist.worker.process import work

    become(name)
    set_up_logging()
    saboteur = Saboteur(Path(faults_file))
    leave(work(address, token, saboteur.make_job, slot=slot, **arguments))
