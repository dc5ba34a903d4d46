"""``ringmaster train``."""

from __future__ import annotations

import math
import sys
from argparse import Namespace
from typing import TYPE_CHECKING

from ringmaster_dist.cli.configured import configuration_options, run_configured
from ringmaster_dist.cli.parser import Parser

if TYPE_CHECKING:
    from ringmaster_dist.config.schema import Config


def train_options(parser: Parser) -> None:
    configuration_options(parser)
    parser.switch("--dry-run", help="build everything, time one gradient and one update, say how many updates per "
                  "second to expect and what the network will carry, and stop; nothing is written")  # fmt: skip


def run_train(arguments: Namespace, overrides: list[str]) -> int:
    """ringmaster train [key=value ...]

    Trains in real time over torch RPC. It starts a server and cluster.workers workers on this machine, each as a
    process of its own, restarts any of them that dies (the server resumes from its last checkpoint), and ends when the
    budget is used up. Slower machines are emulated by pacing (cluster.profile, cluster.unit_seconds). It writes the run
    directory, which ringmaster replay RUN_DIR then verifies.

      resume=RUN_DIR     resume a run that was stopped, or lost its machine, from its newest good checkpoint. The
                         configuration is the run's own. budget.*, cluster.*, server.*, checkpoint.* and logger.* may be
                         given again, except cluster.batch*, cluster.threads and server.compute_threads (the bits depend
                         on them), and budget.updates if step sizes depend on it (method.warmup, method.decay, theory).
                         In that case, train the weights further in a new run with init=RUN_DIR.
      resume=auto        resume the run in run.dir if there is one, otherwise begin it. The command stays the same each
                         time, which suits a program that restarts it. A run that is over stays as it is.
      init=RUN_DIR|FILE  begin from the weights of a run (its newest good checkpoint), of one checkpoint, or of a
                         safetensors file that has every trained parameter by name, such as an exported one. A
                         checkpoint of nanochat (model_NNNNNN.pt, or its folder) is one too. They are copied into the
                         run directory.
      cluster.local_workers=0 cluster.workers=N cluster.profile=none server.host=ADDRESS server.port=PORT
                         only serve. The workers run on other machines, at their own speed. See docs/cluster.md.
      watch=true         serve a page on this machine that shows the run while it continues
      run.report=false   leave out the figures and the page that are drawn at the end

    The token is made for each run, or taken from RINGMASTER_TOKEN_FILE or RINGMASTER_TOKEN.

    torchrun and further workers
      torchrun --standalone --nproc-per-node=5 -m ringmaster_dist.train [key=value ...]     rank 0 serves, 4 work
                         with --max-restarts=N, restarted ranks resume the run
      ringmaster worker server=$(cat RUN_DIR/address) token_file=RUN_DIR/token     adds a worker at any time

    Exit code 0: the run is over, or was stopped by Ctrl+C or SIGTERM. 1: the server, or every worker, failed each time
    it was started, or the loss has diverged. 2: a mistake; the line on stderr says which.

    Examples
      ringmaster train method=ringmaster method.threshold=4 run.dir=runs/a && ringmaster replay runs/a
      ringmaster train method=synchronous cluster.workers=8 cluster.profile=gpus budget.updates=100
      ringmaster train -m method=ringmaster,rennala run.dir=runs/compare
    """
    if arguments.dry_run and not arguments.cfg:
        from ringmaster_dist.runtime.dry_run import dry_run
        from ringmaster_dist.runtime.preparation import prepare_dry_run

        config, initial = prepare_dry_run(overrides)
        _explain_recipe(config, overrides)
        return dry_run(config, initial)
    return run_configured(arguments, overrides, _train, "train")


def _explain_recipe(config: Config, overrides: list[str]) -> None:
    """Shows what the recipe of a depth has chosen, if the overrides ask for it, and the radii of a checkout."""
    from ringmaster_dist.config.build import build_radii
    from ringmaster_dist.config.compose import compose, recipe_of
    from ringmaster_dist.config.recipe import NAME, explained

    if f"experiment={NAME}" not in overrides:
        return
    composed = compose(overrides, "train")
    print(explained(composed, recipe_of(composed, overrides)))
    radii = ", ".join(f"{role} {least:.3g}" + (f" to {most:.3g}" if most > least else "")
                      for role, (least, most) in build_radii(config).items())  # fmt: skip
    print(f"  The radii follow the learning rates of the checkout's own optimizer: {radii}.", flush=True)


def _train(overrides: list[str]) -> int:
    """Prepares a run directory, supervises the processes until the run is over, and shows how it ended."""
    from rich.console import Console

    from ringmaster_dist.config.compose import compose, to_typed
    from ringmaster_dist.runtime.processes import prepare_fork_server

    if not any(word.startswith("resume=") for word in overrides):
        to_typed(compose(overrides, "train"), real_time=True)  # a mistake is reported before a process is started
        prepare_fork_server()

    from ringmaster_dist.cli.runs import open_watcher
    from ringmaster_dist.cli.weights import write_sample
    from ringmaster_dist.config.schema import CHECKOUT, TEXT_PROBLEMS
    from ringmaster_dist.observe.console import LiveTable
    from ringmaster_dist.observe.report import show_summary
    from ringmaster_dist.runtime.preparation import RunIsOver, prepare
    from ringmaster_dist.runtime.supervisor import supervise

    try:
        config, _, directory = prepare(overrides)
    except RunIsOver as over:
        print(over)
        return 0
    _explain_recipe(config, overrides)
    budget, console = config.budget, Console(file=sys.stdout)
    table = LiveTable(directory.path, console, budget.updates or math.inf, budget.seconds or math.inf)
    if config.watch:
        print(f"the run is shown at {open_watcher(directory.path).url}", flush=True)
    try:
        code = supervise(config, directory, table.update)
    finally:
        table.close()
    if code == 0:
        code = show_summary(directory, report=config.run.report)
    if code == 0 and config.problem.name in TEXT_PROBLEMS:
        print("  a sample (ringmaster sample writes more):\n", flush=True)
        write_sample(directory.path, "" if config.problem.name == CHECKOUT else "def ", 80)
    return code
