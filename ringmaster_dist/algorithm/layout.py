"""Where each parameter lies in the one flat tensor that is the optimisation variable, the iterate.

Parameters of the same norm and shape lie next to each other. So a *block* of them is a batch of matrices, which one
oracle call handles in place. Parameters that need no oracle are one block, whatever their shapes.

The norm of the iterate is the largest of its blocks' norms, each divided by the block's radius. So the oracle of the
iterate is the oracle of each block times its radius.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from ringmaster_dist.algorithm.geometry import GEOMETRIES

# The purpose of a parameter. A geometry map gives each role its norm.
ROLES = ("matrix", "embedding", "output", "scalar")

GEOMETRY_MAPS: dict[str, dict[str, str]] = {
    "muon": {"matrix": "spectral", "embedding": "none", "output": "none", "scalar": "none"},
    "euclidean": dict.fromkeys(ROLES, "euclidean"),
    "sign": dict.fromkeys(ROLES, "sign"),
    # An embedding table has one token per row, so its norm is that of the largest row.
    "scion": {"matrix": "spectral", "embedding": "row", "output": "sign", "scalar": "sign"},
    # The same norms. The radii come with the parameters of the problem.
    "nanochat": {"matrix": "spectral", "embedding": "row", "output": "sign", "scalar": "sign"},
}


class Parameter(NamedTuple):
    """A named tensor of the problem."""

    name: str
    shape: tuple[int, ...]
    role: str = "matrix"
    radius: float = 1.0  # multiplies the radius of its role

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """Rows and columns. A vector is one row. All but the first dimension of a larger tensor are columns."""
        if len(self.shape) < 2:
            return 1, self.size
        return self.shape[0], math.prod(self.shape[1:])


class Norm(NamedTuple):
    """How the parameters of a role are measured and moved."""

    geometry: str
    radius: float = 1.0  # a block moves by ``eta * radius * lmo``
    weight_decay: float = 0.0  # and shrinks by ``eta * weight_decay``, whatever its radius


class Block(NamedTuple):
    """Matrices that share a norm, (num_matrices, rows, cols), at ``start`` in the flat tensor."""

    geometry: str
    num_matrices: int
    rows: int
    cols: int
    start: int
    radius: float = 1.0
    weight_decay: float = 0.0

    @property
    def size(self) -> int:
        return self.num_matrices * self.rows * self.cols

    @property
    def stop(self) -> int:
        return self.start + self.size


class Layout:
    """The flat order of the parameters, and their blocks."""

    def __init__(self, parameters: Sequence[Parameter], norms: Mapping[str, Norm | str]) -> None:
        """``norms`` has a norm for each role. The name of a geometry stands for that geometry with radius 1."""
        names = [parameter.name for parameter in parameters]
        if not names:
            raise ValueError("there are no parameters to optimise")
        if len(set(names)) != len(names):
            raise ValueError(f"parameter names repeat: {sorted({n for n in names if names.count(n) > 1})}")
        by_role = {role: Norm(norm) if isinstance(norm, str) else norm for role, norm in norms.items()}
        for parameter in parameters:
            if parameter.size == 0:
                raise ValueError(f"parameter {parameter.name!r} of shape {parameter.shape} is empty")
            if parameter.role not in by_role:
                raise ValueError(f"parameter {parameter.name!r} has role {parameter.role!r}; known: {ROLES}")
        for role, norm in by_role.items():
            if norm.geometry not in GEOMETRIES:
                raise ValueError(f"geometry of {role} is {norm.geometry!r}; known: {', '.join(GEOMETRIES)}")

        groups: dict[tuple[Norm, int, int], list[Parameter]] = {}
        for parameter in parameters:
            norm = by_role[parameter.role]
            norm = norm._replace(radius=norm.radius * parameter.radius)
            shape = (0, 0) if norm.geometry == "none" else parameter.matrix_shape
            groups.setdefault((norm, *shape), []).append(parameter)

        self.parameters: tuple[Parameter, ...] = tuple(p for group in groups.values() for p in group)
        self.offsets: dict[str, int] = {}
        self.blocks: list[Block] = []
        offset = 0
        for (norm, rows, cols), group in groups.items():
            count = len(group)
            if norm.geometry == "none":
                count, rows, cols = 1, 1, sum(p.size for p in group)
            self.blocks.append(Block(norm.geometry, count, rows, cols, offset, norm.radius, norm.weight_decay))
            for parameter in group:
                self.offsets[parameter.name] = offset
                offset += parameter.size
        self.size = offset

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Each parameter as a view of the flat tensor, (size,)."""
        return {
            p.name: flat[self.offsets[p.name] : self.offsets[p.name] + p.size].view(p.shape) for p in self.parameters
        }

    @property
    def fingerprint(self) -> str:
        """A hash of names, shapes, offsets and blocks. It is equal if two programs read a flat tensor alike."""
        table = [[(p.name, list(p.shape), self.offsets[p.name]) for p in self.parameters], self.blocks]
        return hashlib.sha256(json.dumps(table).encode()).hexdigest()[:16]
