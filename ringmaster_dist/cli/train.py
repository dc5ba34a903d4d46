"""``ringmaster train``."""

from __future__ import annotations

import sys
from argparse import Namespace
from typing import TYPE_CHECKING

from ringmaster_dist.cli.configured import configuration_options, run_configured
from ringmaster_dist.cli.parser import Parser
from ringmaster_dist.config.errors import UserError
from ringmaster_dist.signals import STOPPED

if TYPE_CHECKING:
    from ringmaster_dist.config.schema import Config
    from ringmaster_dist.observe.run_directory import RunDirectory


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
                         configuration is the run's own. budget.*, cluster.*, server.*, worker.*, checkpoint.*,
                         logger.*, run.report and watch* may be given again, except cluster.batch*, cluster.threads and
                         server.compute_threads (the bits depend on them), and budget.updates if step sizes depend on
                         it (method.warmup, method.decay, theory). In that case, train the weights further in a new run
                         with init=RUN_DIR.
      resume=URL run.dir=DIR
                         copy the newest checkpoint from where checkpoint.mirror=URL has put it, and resume in DIR
      resume=auto        resume the run in run.dir, or else at checkpoint.mirror, or else begin it. The command stays
                         the same each time, which suits a program that restarts it. A run that is over stays as it is.
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

    Exit code 0: the run is over. 130 or 143: it was stopped by Ctrl+C or SIGTERM, and can be resumed. 1: the server,
    or every worker, failed each time it was started, or the loss has diverged. 2: a mistake; the line on stderr says
    which.

    Examples
      ringmaster train method=ringmaster method.threshold=4 run.dir=runs/a && ringmaster replay runs/a
      ringmaster train method=synchronous cluster.workers=8 cluster.profile=gpus budget.updates=100
      ringmaster train -m method=ringmaster,rennala run.dir=runs/compare
    """
    if arguments.dry_run and not arguments.cfg:
        from ringmaster_dist.runtime.dry_run import dry_run
        from ringmaster_dist.runtime.preparation import prepare_dry_run

        if arguments.multirun:
            raise UserError("--dry-run is for one run: leave out -m, and give one value for each key")
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
    from ringmaster_dist import addresses
    from ringmaster_dist.config.compose import compose, to_typed
    from ringmaster_dist.config.sizes import refuse_too_many_processes
    from ringmaster_dist.runtime.processes import prepare_fork_server

    if not any(word.startswith("resume=") for word in overrides):
        # A mistake is reported before a process is started, and before there is a run directory.
        config = to_typed(compose(overrides, "train"), real_time=True)
        refuse_too_many_processes(config)
        try:
            addresses.check(config.server.host, config.server.port)
        except addresses.AddressError as error:
            raise UserError(str(error)) from error
        prepare_fork_server()

    from ringmaster_dist.cli.runs import open_watcher
    from ringmaster_dist.observe.closing import Stdout
    from ringmaster_dist.observe.console import LiveTable
    from ringmaster_dist.observe.report import show_summary
    from ringmaster_dist.observe.run_files import SAMPLE
    from ringmaster_dist.runtime.placement import local_workers
    from ringmaster_dist.runtime.preparation import RunIsOver, prepare
    from ringmaster_dist.runtime.supervisor import supervise

    try:
        config, _, directory = prepare(overrides)
    except RunIsOver as over:
        print(over)
        return 0
    _explain_recipe(config, overrides)
    budget, console = config.budget, Stdout()
    others = config.cluster.workers > local_workers(config)
    table = LiveTable(
        directory.path, console, budget.updates, budget.seconds,
        awaited=config.cluster.workers if others else 0, local_steps=config.local.steps,
    )  # fmt: skip
    if config.watch:
        watcher = open_watcher(directory.path, config.watch_port, metrics=config.watch_metrics)
        print(f"the run is shown at {watcher.url}", flush=True)
    try:
        code = supervise(config, directory, table.update)
    finally:
        table.close()
    if code in STOPPED:
        return _say_stopped(directory, code)
    if code == 0:
        code = show_summary(directory, report=config.run.report)
    if code == 0 and (sample := directory.read(SAMPLE)):
        print(f"  a sample (ringmaster sample writes more):\n\n{sample}", flush=True)
    return code


def _say_stopped(directory: RunDirectory, code: int) -> int:
    """Shows how far a run came that a signal has stopped. It draws nothing, since the user wants to leave."""
    from ringmaster_dist.observe.report import show_summary
    from ringmaster_dist.observe.run_files import TRACE

    if directory.summary() is None:
        began = directory.size(TRACE) > 0  # the server was about to be restarted
        resume = f"while the server was down; continue with {directory.resume_command}"
        print(f"ringmaster: stopped {resume if began else 'before the run began'}", file=sys.stderr)
        return code
    show_summary(directory, report=False)
    return code
