"""Finds the weights a command was pointed at: a run's directory, one of its checkpoints, or exported weights."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError

from ringmaster_dist.algorithm.layout import Layout
from ringmaster_dist.config.build import build_layout, build_problem
from ringmaster_dist.config.compose import from_yaml
from ringmaster_dist.config.errors import UserError
from ringmaster_dist.config.schema import Config
from ringmaster_dist.problems import Problem
from ringmaster_dist.server import weights as by_name
from ringmaster_dist.server.checkpoints import Checkpoints, is_checkpoint, read


class Weights(NamedTuple):
    config: Config
    problem: Problem
    layout: Layout
    iterate: torch.Tensor
    version: int
    path: Path  # where they were found
    config_file: Path


def find_weights(path: Path) -> Weights:
    """Raises UserError with one line where there is nothing, or something else."""
    if path.is_dir():
        found = Checkpoints(path / "checkpoints").newest(rename=False)
        if found is None:
            raise UserError(f"{path} has no good checkpoint: is it the directory of a ringmaster train?")
        file, config_file = found[0], path / "config.yaml"
    elif path.is_file():
        file = path
        beside, within = path.with_suffix(".yaml"), path.parent / "config.yaml"
        found_beside = next((place for place in (beside, within) if place.exists()), None)
        config_file = found_beside or path.parent.parent / "config.yaml"
    else:
        raise UserError(f"{path} does not exist: give a run's directory, a checkpoint or exported weights")
    if not config_file.is_file():
        raise UserError(f"{path}: its configuration is missing ({config_file})")
    config = from_yaml(config_file.read_text())
    problem = build_problem(config)
    layout = build_layout(config, problem)
    try:
        iterate, version = _load(file, layout, problem.dtype)
    except (ValueError, KeyError, SafetensorError) as error:
        raise UserError(f"{file} cannot be used: {error}") from error
    return Weights(config, problem, layout, iterate, version, file, config_file)


def _load(file: Path, layout: Layout, dtype: torch.dtype) -> tuple[torch.Tensor, int]:
    if not is_checkpoint(file):
        tensors, version = by_name.read(file)
        if version is None:
            raise ValueError("it is neither a checkpoint nor exported weights")
        return by_name.flat(tensors, layout, dtype), version
    state = read(file).core
    if state.iterate.numel() != layout.size:
        raise ValueError(f"it is of another model ({state.iterate.numel():,} parameters, not {layout.size:,})")
    return state.iterate, state.version
