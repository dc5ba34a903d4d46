"""Weights by name in a safetensors file. ``ringmaster export`` writes such a file, and a run can begin from one.

The number of updates is in the file's metadata, so that the tensors are exactly the state of the module. Files of
version 0.2 and before have it as a tensor ``version``; they are read too.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ringmaster_dist.algorithm.layout import Layout
from ringmaster_dist.files import to_disk
from ringmaster_dist.problems import Problem, unwrapped
from ringmaster_dist.problems.module import ModuleProblem

INITIAL = "initial.safetensors"  # in a run directory: the weights that the run began from, with init=


def by_name(problem: Problem, layout: Layout, iterate: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns the whole state of a module at the iterate. Another problem has only its parameters."""
    problem = unwrapped(problem)
    if isinstance(problem, ModuleProblem):
        return problem.state_dict(iterate)
    return {name: view.clone() for name, view in layout.views(iterate).items()}


def flat(tensors: Mapping[str, torch.Tensor], layout: Layout, dtype: torch.dtype) -> torch.Tensor:
    """Returns the iterate with these parameters. Raises ValueError that names the first missing or wrong one."""
    iterate = torch.empty(layout.size, dtype=dtype)
    for name, view in layout.views(iterate).items():
        if name not in tensors:
            raise ValueError(f"it is of another model: it has no {name!r}")
        if tensors[name].shape != view.shape:
            shapes = f"the shape {tuple(tensors[name].shape)}, not {tuple(view.shape)}"
            raise ValueError(f"it is of another model: {name!r} has {shapes}")
        view.copy_(tensors[name])
    return iterate


def write(
    path: Path, tensors: Mapping[str, torch.Tensor], version: int, noted: Mapping[str, str] | None = None
) -> None:
    """Writes the file whole or not at all. ``noted`` is further metadata. Raises OSError."""
    temporary = path.with_name(f".{path.name}")
    metadata = {"format": "pt", "version": str(version), **(noted or {})}
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary, metadata=metadata)
        temporary.chmod(0o600)  # some versions of the library write files that everybody may read
        to_disk(temporary)
        temporary.replace(path)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    finally:
        temporary.unlink(missing_ok=True)


def metadata(path: Path) -> dict[str, str]:
    """The notes in a file. Raises SafetensorError and OSError."""
    with safe_open(path, framework="pt") as file:
        return dict(file.metadata() or {})


def read(path: Path) -> tuple[dict[str, torch.Tensor], int | None]:
    """Returns the tensors and the number of updates, which is None if another program wrote the file."""
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        version = (file.metadata() or {}).get("version")
    if version is None and "version" in tensors and tensors["version"].numel() == 1:  # of 0.2 and before
        version = tensors.pop("version").item()
    return tensors, int(version) if version is not None and str(version).isdigit() else None
