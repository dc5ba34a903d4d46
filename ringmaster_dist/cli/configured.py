"""What train and simulate share: ``--cfg job`` shows the configuration, ``-m`` runs every combination of values."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable

from ringmaster_dist.cli.parser import Parser
from ringmaster_dist.config.errors import UserError


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

    ``config_name`` is the primary configuration, ``train`` or ``config``.
    """
    from ringmaster_dist.config.compose import compose, to_typed
    from ringmaster_dist.config.describe import annotated

    if arguments.cfg:
        if arguments.multirun:
            raise UserError("--cfg job prints one configuration: leave out -m, and give one value for each key")
        composed = compose(overrides, config_name)
        to_typed(composed, real_time=config_name == "train")
        print(annotated(composed))
        return 0
    if not arguments.multirun:
        return run(overrides)
    from ringmaster_dist.cli.sweep import sweep

    return sweep(overrides, run, config_name)
