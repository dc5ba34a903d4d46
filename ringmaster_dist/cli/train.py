"""``ringmaster train``: a server and workers on this machine, each its own process and failure domain."""

from __future__ import annotations

import logging
import math
import sys

from rich.console import Console

from ringmaster_dist.cli.multirun import multirun_of
from ringmaster_dist.cli.options import parse
from ringmaster_dist.cli.watch import open_watcher
from ringmaster_dist.config.compose import compose, to_typed
from ringmaster_dist.config.describe import annotated, keys_and_choices
from ringmaster_dist.observe.console import LiveTable
from ringmaster_dist.observe.report import show_summary
from ringmaster_dist.observe.run_directory import RunDirectory
from ringmaster_dist.runtime.dry_run import dry_run
from ringmaster_dist.runtime.preparation import RunIsOver, prepare, prepare_data, prepare_dry_run
from ringmaster_dist.runtime.supervisor import supervise

log = logging.getLogger(__name__)

_HELP = """ringmaster train [key=value ...]

Trains in real time over torch RPC: starts a server and cluster.workers workers on this machine as processes of their
own, brings back whichever of them dies (the server goes on from its last checkpoint), and ends when the budget is used
up. Slower machines are emulated by pacing (cluster.profile, cluster.unit_seconds). Writes the run directory; ringmaster
replay RUN_DIR then proves it.

  resume=RUN_DIR   go on with a run that was stopped, or lost its machine, from its newest good checkpoint. The
                   configuration is the run's own; budget.*, cluster.*, server.*, checkpoint.* and logger.* may be
                   given anew, except cluster.batch, cluster.threads and server.compute_threads (the bits depend on
                   them), and budget.updates where step sizes depend on it (method.warmup, method.decay, theory): there,
                   train the weights further in a new run with init=RUN_DIR.
  resume=auto      go on with the run in run.dir if there is one, else begin it: the same line each time, for whatever
                   starts it again. A run that is over stays as it is.
  init=RUN_DIR|FILE
                   begin from these weights: of a run (its newest good checkpoint), of one checkpoint, or of a
                   safetensors file that has every trained parameter by name, such as an exported one. They are copied
                   into the run directory.
  cluster.local_workers=0 cluster.workers=N cluster.profile=none server.host=ADDRESS server.port=PORT
                   only serve; the workers come from elsewhere, as fast as they are. See docs/cluster.md.

The token is made anew for a run, or taken from RINGMASTER_TOKEN_FILE or RINGMASTER_TOKEN.

  watch=true       serve a page on this machine that shows the run as it goes on
  run.report=false leave out the figures and the page that are drawn at the end

  -m          several runs, one after the other: -m method=ringmaster,rennala run.dir=runs/compare
  --dry-run   build everything, time one gradient and one update, say how many updates per second to expect and what
              the network will carry, and stop; nothing is written
  --cfg job   print the composed configuration and stop
  --help      this text

Also
  torchrun --standalone --nproc-per-node=5 -m ringmaster_dist.train [key=value ...]     rank 0 serves, 4 work
                              with --max-restarts=N also run.dir=DIR: ranks that are started again go on with it
  python -m ringmaster_dist.worker server=$(cat RUN_DIR/address) token_file=RUN_DIR/token    one more worker, any time

Exit code 0: over, or stopped by Ctrl+C or SIGTERM. 1: the server, or every worker, failed each time it was started, or
the loss has diverged. 2: a mistake; the line on stderr says which.

Examples
  ringmaster train method=ringmaster method.threshold=4 run.dir=runs/a && ringmaster replay runs/a
  ringmaster train method=synchronous cluster.workers=8 cluster.profile=gpus budget.updates=100
"""


def main(argv: list[str]) -> int:
    multirun = any(word in ("-m", "--multirun") for word in argv)
    dry = "--dry-run" in argv
    overrides, show = parse([word for word in argv if word not in ("-m", "--multirun", "--dry-run")], "train")
    if show == "help":
        print(_HELP)
        print(keys_and_choices("train"))
        return 0
    if show == "cfg":
        composed = compose(overrides, "train")
        to_typed(composed, real_time=True)
        print(annotated(composed))
        return 0
    if dry:
        return dry_run(*prepare_dry_run(overrides))
    if multirun:
        return multirun_of(overrides, _run, lambda words: to_typed(compose(words, "train"), real_time=True))
    return _run(overrides)


def _run(overrides: list[str]) -> int:
    try:
        config, _, directory = prepare(overrides)
    except RunIsOver as over:
        print(over)
        return 0
    if config.problem.name == "nanochat":
        prepare_data(config)
    budget, console = config.budget, Console(file=sys.stdout)
    table = LiveTable(directory.path, console, budget.updates or math.inf, budget.seconds or math.inf)
    watcher = open_watcher(directory.path) if config.watch else None
    if watcher is not None:
        print(f"the run is shown at {watcher.url}", flush=True)
    try:
        code = supervise(config, directory, table.update)
    finally:
        table.close()
    if code == 0:
        code = show_summary(directory, report=config.run.report)
        if config.problem.name == "nanochat" and code == 0:
            show_sample(directory)
    return code


def show_sample(directory: RunDirectory) -> None:
    from ringmaster_dist.cli import sample

    print("  a sample (ringmaster sample writes more):\n", flush=True)
    sample.main([str(directory.path), "--prompt", "def ", "--tokens", "80"])
