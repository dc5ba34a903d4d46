"""Finds saved weights: those that a command was pointed at, and those that a run begins from (``init=``)."""

from __future__ import annotations

from pathlib import Path
from pickle import UnpicklingError
from typing import NamedTuple
from zipfile import ZIP_STORED, BadZipFile, ZipFile

import torch
from safetensors import SafetensorError

from ringmaster_dist.algorithm.layout import Layout
from ringmaster_dist.config.build import build_layout, build_problem
from ringmaster_dist.config.compose import config_text, from_yaml
from ringmaster_dist.config.errors import UserError
from ringmaster_dist.config.own_code import allow
from ringmaster_dist.config.schema import Config
from ringmaster_dist.observe.run_files import BEST, CONFIG
from ringmaster_dist.problems import Problem, unwrapped
from ringmaster_dist.problems.module import ModuleProblem
from ringmaster_dist.server import weights
from ringmaster_dist.server.checkpoints import Checkpoints, Unusable, is_checkpoint, read

Tensors = dict[str, torch.Tensor]


class Weights(NamedTuple):
    """Weights with the problem that they belong to."""

    config: Config
    problem: Problem
    layout: Layout
    iterate: torch.Tensor  # (layout.size,)
    version: int
    path: Path  # the file that they were read from
    config_file: Path


def find_weights(path: Path, *, best: bool = False, target: str = "") -> Weights:
    """Reads a run's newest checkpoint, one checkpoint, or exported weights. Raises UserError if there are none.

    With ``best`` it reads the weights of the lowest evaluation of a run. ``target`` is the code that may be imported.
    """
    if best:
        path = _best_of(path)
    if path.is_dir():
        try:
            found = Checkpoints(path / "checkpoints").newest(rename=False)
        except Unusable as error:
            raise UserError(str(error)) from error
        if found is None:
            raise UserError(f"{path} has no good checkpoint: is it the directory of a ringmaster train?")
        file, config_file = found[0], path / "config.yaml"
    elif path.is_file():
        file = path
        exported, in_folder = path.with_suffix(".yaml"), path.parent / "config.yaml"
        of_checkpoint = path.parent.parent / "config.yaml"
        config_file = next((place for place in (exported, in_folder) if place.exists()), of_checkpoint)
    else:
        raise UserError(f"{path} does not exist: give a run's directory, a checkpoint or exported weights")
    if not config_file.is_file():
        raise UserError(f"{path}: its configuration is missing ({config_file})")
    text = config_text(config_file) if config_file.name == CONFIG else config_file.read_text(errors="replace")
    config = from_yaml(text, str(config_file))
    allow(config, target)
    problem = build_problem(config)
    layout = build_layout(config, problem)
    try:
        iterate, version = _load(file, layout, problem.dtype)
    except (ValueError, KeyError, SafetensorError) as error:
        raise UserError(f"{file} cannot be used: {error}") from error
    return Weights(config, unwrapped(problem), layout, iterate, version, file, config_file)


def _best_of(directory: Path) -> Path:
    if not directory.is_dir():
        raise UserError(f"checkpoint=best is for the directory of a run, and {directory} is none")
    if not (directory / BEST).is_file():
        raise UserError(
            f"{directory} has no {BEST}: the run has not evaluated yet, its problem does not evaluate, or it was begun "
            "with checkpoint.best=false"
        )
    return directory / BEST


def _load(file: Path, layout: Layout, dtype: torch.dtype) -> tuple[torch.Tensor, int]:
    """The flat iterate, (layout.size,), and its version."""
    if not is_checkpoint(file):
        tensors, version = weights.read(file)
        if version is None:
            raise ValueError("it is neither a checkpoint nor exported weights")
        return weights.flat(tensors, layout, dtype), version
    state = read(file).core
    if state.iterate.numel() != layout.size:
        raise ValueError(f"it is of another model ({state.iterate.numel():,} parameters, not {layout.size:,})")
    return state.iterate, state.version


def chosen_weights(config: Config) -> Tensors | None:
    """The trained parameters of ``init=`` by name, or None without it. Raises UserError if they do not fit the problem.

    Nothing is written, so that a mistake leaves no trace.
    """
    if config.init is None:
        return None
    tensors = _tensors_by_name(Path(config.init).expanduser(), config.problem.target or config.problem.path or "")
    problem = build_problem(config)
    layout = build_layout(config, problem)
    try:
        iterate = weights.flat(tensors, layout, problem.dtype)
        _refuse_other_frozen(unwrapped(problem), iterate, tensors)
        if not bool(torch.isfinite(iterate).all()):
            raise ValueError("it has numbers that are not finite")
    except ValueError as error:
        raise UserError(f"init={config.init}: {error}") from error
    return {name: view.clone() for name, view in layout.views(iterate).items()}


def write_initial(directory: Path, chosen: Tensors | None) -> None:
    if chosen is not None:
        weights.write(directory / weights.INITIAL, chosen, 0)


def _tensors_by_name(path: Path, target: str) -> Tensors:
    """A checkpoint is one flat tensor, whose order is that of its own run's problem. So that problem is built.

    Of code, only ``target`` is imported.

    A checkpoint of nanochat has its tensors by name.
    """
    try:
        if (saved := _of_nanochat(path)) is not None:
            return _read_nanochat(saved)
        if path.is_file() and not is_checkpoint(path):
            return weights.read(path)[0]
    except (SafetensorError, OSError) as error:
        raise UserError(f"init={path} cannot be read: {error}") from error
    try:
        found = find_weights(path, target=target)
    except UserError as error:
        raise UserError(f"init: {error}") from error
    return weights.by_name(found.problem, found.layout, found.iterate)


def _of_nanochat(path: Path) -> Path | None:
    """The file of a nanochat checkpoint: the path itself, or the last model_NNNNNN.pt in the folder; else None."""
    if path.is_file():
        return path if path.suffix == ".pt" else None
    return max(path.glob("model_[0-9]*.pt"), default=None)


def _read_nanochat(path: Path) -> Tensors:
    """Nothing but tensors is unpickled. A compiled model has saved its names with a prefix."""
    try:
        _refuse_expanding(path)
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, ValueError, EOFError, UnpicklingError) as error:
        (reason, *_) = str(error).splitlines() or [type(error).__name__]
        raise UserError(f"init={path} is not a checkpoint of nanochat: {reason}") from error
    if not isinstance(state, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in state.values()):
        raise UserError(f"init={path} is not a checkpoint of nanochat: it has to hold tensors by name")
    return {str(name).removeprefix("_orig_mod."): tensor for name, tensor in state.items()}


def _refuse_expanding(path: Path) -> None:
    """Raises ValueError if a file of torch.save stands for more bytes than it has."""
    try:
        with ZipFile(path) as archive:
            for part in archive.infolist():
                if part.compress_type != ZIP_STORED:
                    raise ValueError(f"{part.filename} in it is compressed")
                if part.filename.endswith("data.pkl") and b"bytearray" in archive.read(part):
                    raise ValueError("it holds other things than tensors")
    except BadZipFile as error:
        raise ValueError("it is not a file of torch.save") from error


def _refuse_other_frozen(problem: Problem, iterate: torch.Tensor, tensors: Tensors) -> None:
    """Raises ValueError if frozen parameters differ: workers make them with the factory and do not receive them."""
    if not isinstance(problem, ModuleProblem):
        return
    for name, tensor in problem.fixed_state(iterate).items():
        if name in tensors and not torch.equal(tensor, tensors[name].to(tensor.dtype)):
            raise ValueError(f"{name!r}, which is not trained, differs from the module's: load it in the factory")
