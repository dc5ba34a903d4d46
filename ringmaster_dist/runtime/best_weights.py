"""Keeps the weights with the lowest objective, such as the validation loss, whatever becomes of the run later."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError

from ringmaster_dist.algorithm.layout import Layout
from ringmaster_dist.server import weights

log = logging.getLogger(__name__)

_OBJECTIVE, _VALUE = "objective", "value"  # in the metadata of the file


class BestWeights:
    """The trained parameters with the lowest objective so far, in one file. Only the server's main thread enters.

    The file holds the objective too, so that a server that resumes compares with it. The file is written whole or not
    at all, from the iterate that was evaluated. Workers and updates do not wait for it.
    """

    def __init__(self, path: Path, layout: Layout, objective: str) -> None:
        self._path, self._layout, self._objective = path, layout, objective
        self.value: float | None = None
        self.version: int | None = None
        if path.exists():
            self._read()

    def _read(self) -> None:
        try:
            metadata = weights.metadata(self._path)
            self.value, self.version = float(metadata[_VALUE]), int(metadata["version"])
        except (SafetensorError, OSError, KeyError, ValueError) as error:
            log.warning("server: %s cannot be read (%s), so it is written again", self._path, error)

    def offer(self, iterate: torch.Tensor, version: int, evaluation: Mapping[str, float]) -> None:
        """Writes the iterate, (size,), if its objective is lower. If the disk refuses it, the run continues."""
        value = evaluation.get(self._objective, math.nan)
        if not math.isfinite(value) or (self.value is not None and value >= self.value):
            return
        try:
            noted = {_OBJECTIVE: self._objective, _VALUE: repr(float(value))}
            weights.write(self._path, self._layout.views(iterate), version, noted)
        except OSError as error:
            log.warning("server v=%d: %s was not written: %s; training continues", version, self._path.name, error)
            return
        self.value, self.version = float(value), version
