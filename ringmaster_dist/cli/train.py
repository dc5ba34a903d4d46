"""``ringmaster train``: a server and workers on this machine, each its own process and failure domain."""

from __future__ import annotations

import logging
import math
import secrets
import sys
from pathlib import Path

from rich.console import Console

from ringmaster_dist.cli.dry_run import dry_run
from ringmaster_dist.cli.initial import chosen_weights, write_initial
from ringmaster_dist.cli.multirun import multirun_of
from ringmaster_dist.cli.options import parse
from ringmaster_dist.cli.rehearsal import rehearse
from ringmaster_dist.cli.supervisor import local_workers, supervise
from ringmaster_dist.cli.watch import open_watcher
from ringmaster_dist.config.compose import begun_from, compose, continued, same_run, to_typed
from ringmaster_dist.config.describe import annotated, keys_and_choices
from ringmaster_dist.config.errors import UserError
from ringmaster_dist.config.profile_file import measured_times
from ringmaster_dist.config.schema import Config
from ringmaster_dist.config.secret import servers_token
from ringmaster_dist.observe.console import ProgressLine, print_summary
from ringmaster_dist.observe.live import View
from ringmaster_dist.observe.run_directory import RunDirectory, RunDirectoryError
from ringmaster_dist.transport.addresses import elsewhere, is_loopback
from ringmaster_dist.worker.job import device_of

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
        config = to_typed(compose(overrides, "train"), real_time=True)
        if config.problem.name == "nanochat":
            prepare_data(config)
        return dry_run(config)
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
    view = View(directory.path, console, budget.updates or math.inf, budget.seconds or math.inf)
    watcher = open_watcher(directory.path) if config.watch else None
    if watcher is not None:
        print(f"the run is shown at {watcher.url}", flush=True)
    try:
        code = supervise(config, directory, view.update)
    finally:
        view.close()
    if code == 0:
        code = show_summary(directory, report=config.run.report)
        if config.problem.name == "nanochat" and code == 0:
            show_sample(directory)
    return code


def prepare_data(config: Config) -> None:
    """Before the processes start, so that they find it and its progress can be seen."""
    from ringmaster_dist.config.build import build_rows

    line = ProgressLine(Console(file=sys.stderr))
    try:
        build_rows(config, line.show)
    finally:
        line.close()


def show_sample(directory: RunDirectory) -> None:
    from ringmaster_dist.cli import sample

    print("  a sample (ringmaster sample writes more):\n", flush=True)
    sample.main([str(directory.path), "--prompt", "def ", "--tokens", "80"])


class RunIsOver(Exception):
    """There is nothing to go on with, and that is as it should be."""


def prepare(overrides: list[str]) -> tuple[Config, str, RunDirectory]:
    """Checks everything, claims or reopens the run directory, writes the configuration and the token.

    Raises `RunIsOver` with resume=auto where the run in the directory has ended by its budget.
    """
    resumed = next((word.partition("=")[2] for word in overrides if word.startswith("resume=")), "")
    if resumed == "auto":
        composed = compose(overrides, "train")
        resumed = _begun(composed.run.dir)
        composed.resume = None
        if resumed:
            same_run(Path(resumed), composed)
            composed.init = begun_from(Path(resumed))  # init counts only for the beginning
    else:
        resumed = "" if resumed == "null" else resumed
        composed = continued(Path(resumed), overrides) if resumed else compose(overrides, "train")
    config = to_typed(composed, real_time=True)
    _refuse_loopback_for_others(config)
    _refuse_plain_text(config)
    token = servers_token()
    if not config.run.trace:
        raise UserError("run.trace=false is for simulations: a real run without its trace could not be replayed")
    if config.cluster.phases:
        raise UserError("cluster.phases changes speeds in simulations only: real workers keep their pace")
    if resumed:
        directory = RunDirectory.opened(Path(resumed))
        try:
            directory.refuse_if_in_use()
        except RunDirectoryError as error:
            raise UserError(str(error)) from error
        _refuse_if_used_up(config, directory, asked="resume=auto" not in overrides)
        rehearse(config, device_of(0))
        if token:
            directory.write_secret("token", token)
        for name in ("summary.json", "final.safetensors"):  # of the part before
            (directory.path / name).unlink(missing_ok=True)
    else:
        rehearse(config, device_of(0))
        if config.init and config.problem.name == "nanochat":
            prepare_data(config)  # to know the names of its parameters
        initial = chosen_weights(config)
        name = f"{config.problem.name}-{config.method.name}"
        try:
            directory = RunDirectory(config.run.dir, name=name, overwrite=config.run.overwrite)
        except RunDirectoryError as error:
            raise UserError(str(error)) from error
        write_initial(directory.path, initial)
        directory.write_secret("token", token or secrets.token_hex(16))
    composed.run.dir = str(directory.path)
    if config.cluster.profile == "file":  # which workers on other machines do not have
        composed.cluster.times = measured_times(config.cluster)
    text = annotated(composed) + "\n"
    directory.write_config(text)
    return config, text, directory


def _begun(directory: str | None) -> str:
    """The directory, if it holds a run that can go on; empty if not."""
    if directory is None:
        raise UserError("resume=auto needs run.dir, the directory to look into")
    return directory if all((Path(directory) / name).exists() for name in ("config.yaml", "token")) else ""


def _refuse_loopback_for_others(config: Config) -> None:
    others = config.cluster.workers - local_workers(config)
    if others and is_loopback(config.server.host):
        raise UserError(
            f"server.host={config.server.host} is loopback, which only this machine can reach, but {others} of "
            f"cluster.workers={config.cluster.workers} are to come from elsewhere (cluster.local_workers="
            f"{local_workers(config)}): set server.host to an address they can reach, of {elsewhere()}"
        )


def _refuse_plain_text(config: Config) -> None:
    server = config.server
    if server.tls or is_loopback(server.host):
        return
    if not server.insecure:
        raise UserError(
            f"server.tls=false with server.host={server.host}: whoever is on the network between could read the token "
            "and take part; leave server.tls at true, or say server.insecure=true if that network is yours alone"
        )
    log.warning("server.tls=false: the token and all training data cross the network at %s unencrypted", server.host)


def _refuse_if_used_up(config: Config, directory: RunDirectory, *, asked: bool) -> None:
    import json

    summary = json.loads(directory.read("summary.json") or "{}")
    for unit in ("updates", "seconds"):
        limit, used = getattr(config.budget, unit), summary.get(unit, 0)
        if limit is not None and used >= limit and not asked:
            raise RunIsOver(f"the run in {directory.path} is over: {used:g} {unit}; budget.{unit} may be raised")
        if limit is not None and used >= limit:
            raise UserError(
                f"resume={directory.path}: the run has used up its budget ({used:g} {unit}): raise budget.{unit}"
            )


def show_summary(directory: RunDirectory, *, report: bool) -> int:
    """The end in words; and drawn, if wanted. Returns the exit code: 1 for a run that has diverged."""
    import json

    summary = json.loads((directory.path / "summary.json").read_text())
    first = directory.read_rows("metrics.jsonl")[0]
    initial = first.get("gap", first.get("loss"))
    print_summary(Console(file=sys.stdout), summary, initial, directory.path)
    if report:
        show_report(directory.path)
    return 1 if summary["diverged"] else 0


def show_report(directory: Path) -> None:
    """Draws the report and says where it is. Whatever goes wrong with it, the run was done."""
    from ringmaster_dist.observe.report import FOLDER, write_report

    try:
        print(f"  report: {write_report([directory], directory / FOLDER)[0]}", flush=True)
    except Exception as error:
        log.debug("the report could not be drawn", exc_info=True)
        print(
            f"ringmaster: the report could not be drawn ({error}): see ringmaster report {directory}", file=sys.stderr
        )
