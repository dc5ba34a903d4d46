"""A small picture of a gradient, from which the agreement of two gradients can be estimated.

A sketch has the numbers of a fixed sample of coordinates. Every block of the layout has an equal share of the sample.
Each block's numbers are divided by their root mean square, because an oracle sees only the direction of a block. Then
they are rounded to whole numbers of 16 bits. Inner products of such numbers are exact in float64, whatever the order of
the additions, so every machine computes the same agreement.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from ringmaster_dist import quantized
from ringmaster_dist.algorithm.layout import Layout

Sketch = NDArray[np.float64]  # (num_sampled,), whole numbers

_COORDINATES = 2048  # in a sketch, at most
_UNIT = 256  # the root mean square of a block's numbers
_MOST = 2**15 - 1


class Sketcher:
    """Takes the same coordinates of every gradient of one layout. The seed chooses the coordinates."""

    def __init__(self, layout: Layout, seed: int) -> None:
        self._size = layout.size
        generator = np.random.default_rng(seed)
        share = max(1, _COORDINATES // len(layout.blocks))
        chosen = []
        for block in layout.blocks:
            if block.size <= share:
                chosen.append(np.arange(block.start, block.stop))
            else:
                chosen.append(np.unique(generator.integers(block.start, block.stop, share)))
        self._counts = np.array([len(indices) for indices in chosen])  # (num_blocks,)
        self._starts = np.concatenate([[0], np.cumsum(self._counts)[:-1]])  # (num_blocks,)
        self._indices = torch.from_numpy(np.concatenate(chosen))  # (num_sampled,)

    def sketch(self, gradient: torch.Tensor) -> Sketch:
        """(size,) or its packed form, in host memory -> (num_sampled,)"""
        numbers = quantized.at(gradient, self._size, self._indices).to(torch.float64).numpy()
        squares = np.add.reduceat(numbers * numbers, self._starts)  # (num_blocks,)
        scale = np.sqrt(squares / self._counts)
        scale[~(scale > 0)] = np.inf  # a block of zeros stays zero
        sketch: Sketch = np.rint(numbers * np.repeat(_UNIT / scale, self._counts))
        return sketch.clip(-_MOST, _MOST)


def difference(one: Sketch, other: Sketch) -> float:
    """One minus the cosine of the angle between two gradients: 0 if they agree, 1 if they have nothing in common."""
    return 1.0 - float(one @ other) / (_UNIT * _UNIT * len(one))
