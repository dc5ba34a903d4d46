"""``init=``: the weights that a run begins from, found and checked before anything is written."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError

from ringmaster_dist.config.build import build_layout, build_problem
from ringmaster_dist.config.errors import UserError
from ringmaster_dist.config.schema import Config
from ringmaster_dist.problems import Problem
from ringmaster_dist.problems.module import ModuleProblem
from ringmaster_dist.runtime.weights import find_weights
from ringmaster_dist.server import weights
from ringmaster_dist.server.checkpoints import is_checkpoint

Tensors = dict[str, torch.Tensor]


def chosen_weights(config: Config) -> Tensors | None:
    """The trained parameters by name; None without init. Raises `UserError` if they do not fit the problem."""
    if config.init is None:
        return None
    tensors = _tensors(Path(config.init).expanduser())
    problem = build_problem(config)
    layout = build_layout(config, problem)
    try:
        iterate = weights.flat(tensors, layout, problem.dtype)
        _refuse_other_frozen(problem, iterate, tensors)
        if not bool(torch.isfinite(iterate).all()):
            raise ValueError("it has numbers that are not finite")
    except ValueError as error:
        raise UserError(f"init={config.init}: {error}") from error
    return {name: view.clone() for name, view in layout.views(iterate).items()}


def write_initial(directory: Path, chosen: Tensors | None) -> None:
    if chosen is not None:
        weights.write(directory / weights.INITIAL, chosen, 0)


def _tensors(path: Path) -> Tensors:
    """By name. A checkpoint is one flat tensor: the order in it is that of its own run's problem."""
    try:
        if path.is_file() and not is_checkpoint(path):
            return weights.read(path)[0]
    except (SafetensorError, OSError) as error:
        raise UserError(f"init={path} cannot be read: {error}") from error
    try:
        found = find_weights(path)
    except UserError as error:
        raise UserError(f"init: {error}") from error
    return weights.by_name(found.problem, found.layout, found.iterate)


def _refuse_other_frozen(problem: Problem, iterate: torch.Tensor, tensors: Tensors) -> None:
    """Only what is trained travels to the workers: frozen parameters are as the factory makes them, everywhere."""
    if not isinstance(problem, ModuleProblem):
        return
    for name, tensor in problem.fixed_state(iterate).items():
        if name in tensors and not torch.equal(tensor, tensors[name].to(tensor.dtype)):
            raise ValueError(f"{name!r}, which is not trained, differs from the module's: load it in the factory")
