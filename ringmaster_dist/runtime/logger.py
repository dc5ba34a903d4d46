"""Opens the logger that the configuration names, and tells it the end of a run."""

from __future__ import annotations

import logging
from typing import Any

import yaml

from ringmaster_dist.config.schema import Config
from ringmaster_dist.observe.logger import Logger
from ringmaster_dist.observe.run_directory import RunDirectory
from ringmaster_dist.problems import Problem
from ringmaster_dist.server.core import ServerCore

log = logging.getLogger(__name__)

_SAMPLE_TOKENS = 80


def open_logger(config: Config, directory: RunDirectory, config_text: str) -> Logger:
    given = config.logger
    if given.name == "none":
        return Logger()
    from ringmaster_dist.observe.wandb_logger import WandbLogger, WandbSettings

    settings = WandbSettings(
        offline=given.name == "wandb_offline", project=given.project, entity=given.entity, group=given.group,
        run_name=given.run_name, tags=given.tags, artifacts=given.artifacts, init_seconds=given.init_seconds,
        finish_seconds=given.finish_seconds,
    )  # fmt: skip
    return WandbLogger(directory.path, settings, yaml.safe_load(config_text))


def tell_the_end(
    logger: Logger, config: Config, problem: Problem, core: ServerCore, directory: RunDirectory, summary: dict[str, Any]
) -> None:
    """The final weights, a sample, the summary. Nothing that goes wrong here changes how the run ended."""
    if config.logger.name == "none":
        return
    try:
        logger.file(directory.path / "final.safetensors", "model")
        if config.logger.text and config.problem.name == "nanochat":
            logger.text(_sample(problem, core))
    except Exception as error:
        log.warning("the logger was not told everything: %s", error)
    logger.close(summary)


def _sample(problem: Problem, core: ServerCore) -> str:
    from ringmaster_dist.problems.nanochat.generate import generate
    from ringmaster_dist.problems.nanochat.problem import NanoChatProblem
    from ringmaster_dist.problems.nanochat.tokenizer import BOS

    assert isinstance(problem, NanoChatProblem)
    tokenizer = problem.rows.tokenizer()
    problem.load(core.snapshot.iterate)
    return tokenizer.decode(list(generate(problem.model, [BOS], _SAMPLE_TOKENS)))
