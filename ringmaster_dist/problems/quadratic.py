"""The paper's stochastic quadratic: Nesterov's worst-case tridiagonal function.

    f(x) = x'Ax/2 - b'x,   A = tridiag(-1, 2, -1)/4,   b = -e_1/4,   x_0 = sqrt(d) e_1

The stochastic gradient adds the same Gaussian number to every coordinate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from ringmaster_dist import randomness
from ringmaster_dist.algorithm.layout import Layout, Parameter
from ringmaster_dist.problems import Stop, clip_factor, never

_STENCIL = np.array([-0.25, 0.5, -0.25])


class Quadratic:
    objective = "gap"
    quick_to_evaluate = True
    dtype = torch.float64

    def __init__(self, dim: int = 1729, noise: float = 0.01, clip: float | None = None) -> None:
        self.dim = dim
        self.clip = clip  # the largest norm of a gradient
        self.noise = noise
        self.parameters: Sequence[Parameter] = [Parameter("x", (dim,), "matrix")]
        # A x = b is solved by the straight line from -1 at index -1 to 0 at index d.
        self._minimizer = np.arange(1, dim + 1) / (dim + 1) - 1.0  # (dim,)

    def bind(self, layout: Layout) -> None:
        """There is nothing to bind: one parameter has only one layout."""

    def initial(self, seed: int) -> torch.Tensor:
        start = torch.zeros(self.dim, dtype=self.dtype)
        start[0] = math.sqrt(self.dim)
        return start

    def gradient(
        self, iterate: torch.Tensor, seed: int, worker_id: int, sequence: int, stop: Stop = never
    ) -> tuple[torch.Tensor, float]:
        x = iterate.numpy()  # (dim,)
        slope = np.convolve(x, _STENCIL, "same") if self.dim > 2 else self._short(x)
        slope[0] += 0.25
        # numpy sums this without BLAS, because the bits of a BLAS dot product depend on the number of threads.
        loss = 0.5 * float(np.add.reduce(x * slope)) + 0.125 * float(x[0])
        if self.noise:
            key = randomness.worker_key(seed, randomness.STREAM_NOISE, worker_id)
            slope += self.noise * randomness.normal(key, sequence)
        if self.clip is not None:
            slope *= clip_factor(math.sqrt(float(np.add.reduce(slope * slope))), self.clip)
        return torch.from_numpy(slope), loss

    @staticmethod
    def _short(x: np.ndarray) -> np.ndarray:
        """``A x`` for vectors that are shorter than the stencil."""
        return np.asarray(0.5 * x - 0.25 * x[::-1] if len(x) == 2 else 0.5 * x)

    def evaluate(self, iterate: torch.Tensor) -> dict[str, float]:
        """``f(x) - f*`` as ``e'Ae/2`` of the error e. That is a sum of squares, so rounding never makes it negative."""
        error = iterate.numpy() - self._minimizer
        steps = np.diff(error, prepend=0.0, append=0.0)
        return {"gap": 0.125 * float(steps.dot(steps))}
