"""Where each parameter lives in the one flat buffer that is the optimisation variable.

Parameters of the same geometry and shape lie next to each other, so a *block* of them is a batch of matrices
that one oracle call handles in place. Parameters that need no oracle are one block whatever their shapes.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from ringmaster_dist.algorithm.geometry import GEOMETRIES

# What a parameter is for; a geometry map says which norm each role gets.
ROLES = ("matrix", "embedding", "output", "scalar")

GEOMETRY_MAPS: dict[str, dict[str, str]] = {
    "muon": {"matrix": "spectral", "embedding": "none", "output": "none", "scalar": "none"},
    "euclidean": dict.fromkeys(ROLES, "euclidean"),
    "sign": dict.fromkeys(ROLES, "sign"),
    # An embedding table stores one token per row, so its input-side norm is the largest row.
    "scion": {"matrix": "spectral", "embedding": "row", "output": "sign", "scalar": "sign"},
}


class Parameter(NamedTuple):
    """A named tensor of the problem."""

    name: str
    shape: tuple[int, ...]
    role: str = "matrix"

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """As rows and columns: a vector is one row, trailing dimensions of a larger tensor are columns."""
        if len(self.shape) < 2:
            return 1, self.size
        return self.shape[0], math.prod(self.shape[1:])


class Block(NamedTuple):
    """``num_matrices`` matrices ``rows x cols`` at ``start`` that share a geometry."""

    geometry: str
    num_matrices: int
    rows: int
    cols: int
    start: int

    @property
    def size(self) -> int:
        return self.num_matrices * self.rows * self.cols

    @property
    def stop(self) -> int:
        return self.start + self.size


class Layout:
    """The flat order of the parameters, and their blocks."""

    def __init__(self, parameters: Sequence[Parameter], geometry: Mapping[str, str]) -> None:
        names = [parameter.name for parameter in parameters]
        if len(set(names)) != len(names):
            raise ValueError(f"parameter names repeat: {sorted({n for n in names if names.count(n) > 1})}")
        for parameter in parameters:
            if parameter.size == 0:
                raise ValueError(f"parameter {parameter.name!r} of shape {parameter.shape} is empty")
            if parameter.role not in geometry:
                raise ValueError(f"parameter {parameter.name!r} has role {parameter.role!r}; known: {ROLES}")
        for role, name in geometry.items():
            if name not in GEOMETRIES:
                raise ValueError(f"geometry of {role} is {name!r}; known: {', '.join(GEOMETRIES)}")

        groups: dict[tuple[str, int, int], list[Parameter]] = {}
        for parameter in parameters:
            name = geometry[parameter.role]
            shape = (0, 0) if name == "none" else parameter.matrix_shape
            groups.setdefault((name, *shape), []).append(parameter)

        self.parameters: tuple[Parameter, ...] = tuple(p for group in groups.values() for p in group)
        self.offsets: dict[str, int] = {}
        self.blocks: list[Block] = []
        offset = 0
        for (name, rows, cols), group in groups.items():
            if name == "none":
                self.blocks.append(Block(name, 1, 1, sum(p.size for p in group), offset))
            else:
                self.blocks.append(Block(name, len(group), rows, cols, offset))
            for parameter in group:
                self.offsets[parameter.name] = offset
                offset += parameter.size
        self.size = offset

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Each parameter as a view of the flat buffer."""
        return {
            p.name: flat[self.offsets[p.name] : self.offsets[p.name] + p.size].view(p.shape) for p in self.parameters
        }

    @property
    def fingerprint(self) -> str:
        """Equal for two programs exactly if they mean the same thing by the same flat buffer."""
        table = [(p.name, list(p.shape), self.offsets[p.name]) for p in self.parameters]
        return hashlib.sha256(json.dumps(table).encode()).hexdigest()[:16]
