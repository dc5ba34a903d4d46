"""What train and simulate share: ``--cfg job`` shows the configuration, ``-m`` runs every combination of values."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

from ringmaster_dist.cli.parser import Parser


def _job(text: str) -> str:
    if text != "job":
        raise ValueError("only --cfg job is there")
    return text


def configuration_options(parser: Parser) -> None:
    parser.option("--cfg job", "print the composed configuration and stop", _job, short="-c")
    parser.switch(
        "--multirun", "-m", help="run every combination of comma-separated values, such as method.eta=0.1,0.2"
    )


def run_configured(
    arguments: Namespace, overrides: list[str], run: Callable[[list[str]], int], config_name: str
) -> int:
    """Calls ``run`` with the overrides, once for each combination with ``--multirun``, unless ``--cfg`` is given.

    ``config_name`` is the primary configuration, ``train`` or ``config``. Each run of a multirun gets a directory of
    its own, <run.dir>/0 and so on, and they are one group for a logger. The first one that fails ends the multirun.
    """
    from ringmaster_dist.config.compose import compose, expand, to_typed
    from ringmaster_dist.config.describe import annotated

    if arguments.cfg:
        composed = compose(overrides, config_name)
        to_typed(composed, real_time=config_name == "train")
        print(annotated(composed))
        return 0
    if not arguments.multirun:
        return run(overrides)
    parent = next((o.partition("=")[2] for o in overrides if o.startswith("run.dir=")), "")
    group = Path(parent).name or time.strftime("multirun-%Y-%m-%d_%H-%M-%S")
    combinations = []
    for index, combination in enumerate(expand(overrides)):
        words = [o for o in combination if not o.startswith("run.dir=")]
        if parent:
            words.append(f"run.dir={parent}/{index}")
        logs = any(o.startswith("logger=") and o != "logger=none" for o in words)
        if logs and not any(o.startswith("logger.group=") for o in words):
            words.append(f"logger.group={group}")
        to_typed(compose(words, config_name), real_time=config_name == "train")  # no run begins before all are checked
        combinations.append(words)
    for words in combinations:
        if code := run(words):
            return code
    return 0
