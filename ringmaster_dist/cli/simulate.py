"""``ringmaster simulate``: a run in virtual time."""

from __future__ import annotations

import sys

from ringmaster_dist.cli.multirun import multirun_of
from ringmaster_dist.cli.options import parse
from ringmaster_dist.config.compose import compose, to_typed
from ringmaster_dist.config.describe import annotated, keys_and_choices

_HELP = """ringmaster simulate [key=value ...]

Plays a run in virtual time: the real server core, simulated workers, gradients that are really computed.
Writes config.yaml, trace.jsonl, metrics.jsonl and summary.json to run.dir and prints a summary.

  init=RUN_DIR|FILE  begin from the weights of a run, of a checkpoint or of a safetensors file

  --cfg job        print the composed configuration and stop
  --multirun, -m   run every combination of comma-separated values: method.eta=0.1,0.2
  --help           this text

Exit code 0: the budget is used up. 1: the loss has diverged. 130: stopped; what there is was written. 2: a mistake.

Examples
  ringmaster simulate
  ringmaster simulate method=rennala method.batch=16 cluster.profile=sublinear
  ringmaster simulate experiment=paper_quadratic cluster.profile=similar run.dir=runs/similar
  ringmaster simulate -m method=ringmaster,rennala,synchronous run.dir=runs/compare
"""


def main(argv: list[str]) -> int:
    multirun = any(word in ("-m", "--multirun") for word in argv)
    overrides, show = parse([word for word in argv if word not in ("-m", "--multirun")], "simulate")
    if show == "help":
        print(_HELP)
        print(keys_and_choices("config"))
        return 0
    if show == "cfg":
        composed = compose(overrides)
        to_typed(composed)
        print(annotated(composed))
        return 0
    if not multirun:
        return _run(overrides)
    return multirun_of(overrides, _run, lambda overrides: to_typed(compose(overrides)))


def _run(overrides: list[str]) -> int:
    composed = compose(overrides)
    config = to_typed(composed)

    from rich.console import Console

    from ringmaster_dist.observe.console import ProgressLine
    from ringmaster_dist.observe.loggers import open_logger
    from ringmaster_dist.observe.report import show_summary
    from ringmaster_dist.observe.run_directory import RunDirectory
    from ringmaster_dist.runtime.processes import stop_signals
    from ringmaster_dist.runtime.rehearsal import rehearse
    from ringmaster_dist.runtime.saved_weights import chosen_weights, write_initial
    from ringmaster_dist.simulation.session import simulate

    rehearse(config)
    initial = chosen_weights(config)
    name = f"{config.problem.name}-{config.method.name}"
    directory = RunDirectory(config.run.dir, name=name, overwrite=config.run.overwrite)
    write_initial(directory.path, initial)
    composed.run.dir = str(directory.path)
    directory.write_config(annotated(composed) + "\n")
    line = ProgressLine(Console(file=sys.stdout))
    try:
        with stop_signals() as stopping:
            logger = open_logger(config.logger, directory.path, annotated(composed))
            summary = simulate(config, directory, line.show, stopping, logger)
    finally:
        line.close()
    logger.close(summary)
    code = show_summary(directory, report=config.run.report)
    return code or (0 if summary.ended == "budget" else 130)
