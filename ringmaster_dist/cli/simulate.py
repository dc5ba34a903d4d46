"""``ringmaster simulate``."""

from __future__ import annotations

from argparse import Namespace

from ringmaster_dist.cli.configured import configuration_options, run_configured
from ringmaster_dist.cli.parser import Parser


def simulate_options(parser: Parser) -> None:
    configuration_options(parser)


def run_simulate(arguments: Namespace, overrides: list[str]) -> int:
    """ringmaster simulate [key=value ...]

    Simulates a run in virtual time. The server core is the real one, the workers are simulated, and the gradients are
    really computed. It writes config.yaml, trace.jsonl, metrics.jsonl and summary.json to run.dir and prints a summary.

      init=RUN_DIR|FILE  begin from the weights of a run, of a checkpoint or of a safetensors file

    Exit code 0: the budget is used up. 1: the loss has diverged. 130 or 143: stopped by Ctrl+C or SIGTERM; the results
    so far were written. 2: a mistake.

    Examples
      ringmaster simulate
      ringmaster simulate method=rennala method.batch=16 cluster.profile=sublinear
      ringmaster simulate experiment=paper_quadratic method.threshold=8 run.dir=runs/paper
      ringmaster simulate -m method=ringmaster,rennala,synchronous run.dir=runs/compare
    """
    return run_configured(arguments, overrides, _simulate, "config")


def _simulate(overrides: list[str]) -> int:
    from ringmaster_dist.config.compose import compose, to_typed
    from ringmaster_dist.config.sizes import refuse_too_many_simulated

    composed = compose(overrides)
    config = to_typed(composed)
    refuse_too_many_simulated(config)

    from ringmaster_dist.config.describe import annotated
    from ringmaster_dist.config.profile_file import warn_about_times
    from ringmaster_dist.observe.closing import Stdout
    from ringmaster_dist.observe.console import ProgressLine
    from ringmaster_dist.observe.loggers import open_logger
    from ringmaster_dist.observe.report import show_summary
    from ringmaster_dist.observe.run_directory import RunDirectory
    from ringmaster_dist.runtime.rehearsal import rehearse
    from ringmaster_dist.runtime.saved_weights import chosen_weights, write_initial
    from ringmaster_dist.signals import stop_signals
    from ringmaster_dist.simulation.session import simulate

    warn_about_times(config)
    rehearse(config)
    initial = chosen_weights(config)
    name = f"{config.problem.name}-{config.method.name}"
    directory = RunDirectory(config.run.dir, name=name, overwrite=config.run.overwrite)
    directory.lock()
    write_initial(directory.path, initial)
    composed.run.dir = str(directory.path)
    directory.write_config(annotated(composed) + "\n")
    directory.add_command("ringmaster simulate", overrides)
    line = ProgressLine(Stdout())
    try:
        with stop_signals() as stopping:
            logger = open_logger(config.logger, directory.path, annotated(composed))
            summary = simulate(config, directory, line.show, stopping, logger)
    finally:
        line.close()
    logger.close(summary)
    code = show_summary(directory, report=config.run.report and not stopping())
    return stopping.exit_code or code
