"""Computes one gradient and one evaluation of the user's own problem before any process is started.

So a mistake in the user's code is reported once, and not by every worker.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping

import torch

from ringmaster_dist import devices
from ringmaster_dist.config.build import build_layout, build_problem, build_rows_by_speed
from ringmaster_dist.config.errors import UserError, warn
from ringmaster_dist.config.own_code import reported_once, source_of
from ringmaster_dist.config.schema import OWN_CODE, Config
from ringmaster_dist.problems import Problem, gradient_of, never, unwrapped
from ringmaster_dist.problems.module import ModuleProblem
from ringmaster_dist.server import weights

_ROUNDING = 1e-3  # relative to the largest entry; an accelerator does not always sum in the same order


def rehearse(config: Config, device: str = "cpu") -> None:
    """Raises UserError at a mistake in the user's code. Only warns if the gradient is not reproducible."""
    if config.problem.name not in OWN_CODE:
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(config.cluster.threads)
    try:
        _rehearse(config, device)
    finally:
        torch.set_num_threads(threads)
        gc.collect()
        devices.empty_cache(device)


def _rehearse(config: Config, device: str) -> None:
    source, seed = source_of(config), config.run.seed
    problem = build_problem(config, device)
    with reported_once(source, "the problem could not be set up"):
        layout = build_layout(config, problem)
        problem = unwrapped(problem)  # the user's code computes single gradients
        size = layout.size
        iterate = problem.initial(seed)
        _check_tensor(source, "the initial iterate", iterate, size, problem)
    rows = build_rows_by_speed(config, problem)
    kept, names = iterate.clone(), _names(problem)
    with reported_once(source, "the gradient could not be computed"):
        first, first_loss = problem.gradient(iterate, seed, 0, 0)
        _check_tensor(source, "the gradient", first, size, problem)
        first = first.detach().clone()
        float(first_loss)
        second, second_loss = problem.gradient(iterate, seed, 0, 0)
        second = second.detach().clone()
        for count in (rows.least, rows.most) if rows is not None else ():
            gradient_of(problem, iterate, seed, 0, 0, never, count)
    if not torch.equal(iterate, kept):
        raise UserError(
            f"{source}: the gradient has changed the weights in place: only the server may change "
            "them; compute the loss from a copy"
        )
    if _names(problem) != names:
        (new, *_) = sorted(_names(problem) ^ names)
        raise UserError(f"{source}: {new!r} was made or removed while a gradient was computed: make it in the factory")
    if not bool(torch.isfinite(first).all()):
        raise UserError(
            f"{source}: the gradient of worker 0 at the initial iterate is not finite: the server does "
            "not accept such gradients"
        )
    if float(first_loss) != float(second_loss) or not _is_same(first, second, exact=devices.is_cpu(device)):
        warn(
            f"{source}: the gradient is not a function of its arguments: computed twice with the same "
            "arguments it differs, so ringmaster replay will not give the same bits"
        )
    with reported_once(source, "the evaluation failed"):
        figures = problem.evaluate(iterate)
    _check_figures(source, figures)
    with reported_once(source, "the state for an export could not be made"):
        weights.by_name(problem, layout, iterate)
    if isinstance(problem, ModuleProblem) and problem.unusual_buffers:
        warn(
            f"{source}: {', '.join(problem.unusual_buffers)} changes its buffers while it trains: they "
            "begin every gradient as the factory makes them, so nothing is learnt in them (docs/extending.md, a model)"
        )


def _names(problem: Problem) -> set[str]:
    """The names of all parameters and buffers of a module."""
    return set(problem.module.state_dict()) if isinstance(problem, ModuleProblem) else set()


def _check_tensor(source: str, what: str, tensor: object, size: int, problem: Problem) -> None:
    expected = f"it has to be a tensor of shape ({size},) and {problem.dtype}"
    if not isinstance(tensor, torch.Tensor):
        raise UserError(f"{source}: {what} is of type {type(tensor).__name__}: {expected}")
    if tuple(tensor.shape) != (size,) or tensor.dtype != problem.dtype:
        raise UserError(f"{source}: {what} is {tuple(tensor.shape)} {tensor.dtype}: {expected}")
    if not devices.is_cpu(tensor.device):
        raise UserError(f"{source}: {what} is on {tensor.device}: it has to be in host memory, such as tensor.cpu()")


def _is_same(first: torch.Tensor, second: torch.Tensor, *, exact: bool) -> bool:
    if exact:
        return torch.equal(first, second)
    return float((first - second).abs().max()) <= _ROUNDING * float(first.abs().max())


def _check_figures(source: str, figures: object) -> None:
    expected = "evaluate has to give a mapping of names to numbers"
    if not isinstance(figures, Mapping):
        raise UserError(f"{source}: evaluate gave {type(figures).__name__}: {expected}")
    for name, value in figures.items():
        if not isinstance(name, str) or not isinstance(value, int | float):
            raise UserError(f"{source}: evaluate gave {name!r}: {type(value).__name__}: {expected}")
