"""Linear minimization oracles: ``lmo(m) = argmin over |u| <= 1 of <m, u>`` for the norms of the paper.

A *block* is a batch of matrices of one shape, ``(count, rows, cols)``, in one flat buffer. Each oracle overwrites the
block with a direction ``D`` and returns a scale, so that ``lmo = -scale * D``. The caller folds the scale into its
step, which saves a pass over the memory. ``lmo(0) = 0`` for every geometry.

The spectral oracle approximates ``U V^T`` by five quintic iterations. Three paths compute the same polynomial:

- `_iterate_matrix` does the usual iteration on the matrix itself.
- `_iterate_gram` accumulates the polynomial on the small Gram matrix. For an aspect ratio of 1.5 or more that needs
  about half of the arithmetic. In a shorter type it computes a new Gram matrix halfway.
- `_iterate_vector` is for a single row, whose Gram matrix is one number.

`reference_lmo` is the readable definition by an exact SVD. Tests compare all paths with it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ringmaster_dist.algorithm.names import GEOMETRIES as GEOMETRIES
from ringmaster_dist.algorithm.names import ORTHOGONALIZATIONS as ORTHOGONALIZATIONS

Coefficients = Sequence[tuple[float, float, float]]

POLAR_EXPRESS: Coefficients = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
JORDAN: Coefficients = ((3.4445, -4.7750, 2.0315),) * 5

COEFFICIENTS: dict[str, Coefficients] = {"polar_express": POLAR_EXPRESS, "jordan": JORDAN}

_NORM_FLOOR = 1e-7  # it is added to the Frobenius norm before the iterations, as in Muon
_GRAM_ASPECT = 1.5  # the Gram path needs less arithmetic from c = cols / rows = 1.5 on: 10 c + 5 > 17 + 2 c


def spectral_scale(rows: int, cols: int) -> float:
    """Muon's factor for tall matrices, ``sqrt(max(1, rows / cols))``."""
    return math.sqrt(max(1.0, rows / cols))


def reference_lmo(matrix: torch.Tensor, geometry: str) -> torch.Tensor:
    """The definition for one matrix, (rows, cols). It is slow and exact."""
    if not matrix.any():
        return torch.zeros_like(matrix)
    if geometry == "spectral":
        left, singular, right = torch.linalg.svd(matrix, full_matrices=False)
        rank = int((singular > singular[0] * 1e-12).sum())
        rows, cols = matrix.shape
        polar: torch.Tensor = left[:, :rank] @ right[:rank]
        return polar.mul(-spectral_scale(rows, cols))
    if geometry == "euclidean":
        return matrix.neg().div(torch.linalg.vector_norm(matrix))
    if geometry == "sign":
        return -matrix.sign()
    if geometry in ("column", "row"):
        norms = torch.linalg.vector_norm(matrix, dim=0 if geometry == "column" else 1, keepdim=True)
        return torch.where(norms > 0, -matrix / norms, 0.0)
    return -matrix


def uses_gram(rows: int, cols: int) -> bool:
    """Whether a matrix is iterated on its Gram matrix."""
    return max(rows, cols) >= _GRAM_ASPECT * min(rows, cols)


class Workspace:
    """Scratch memory for blocks of one shape, up to transposition. It is allocated once and used by every update.

    With short = min(rows, cols), ``squares`` are (count, short, short) each, and ``full`` have count * rows * cols
    numbers each. ``precision`` is the type of the iterations: the block's own type, or a shorter one.
    """

    def __init__(
        self, count: int, rows: int, cols: int, dtype: torch.dtype, device: torch.device,
        precision: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        short = min(rows, cols)
        is_short = precision is not None and precision != dtype
        dtype = precision or dtype
        self.uses_gram = uses_gram(rows, cols)
        self.is_vector = count == 1 and short == 1
        num_squares = 0 if self.is_vector else 4 if self.uses_gram else 2
        self.squares = [torch.empty(count, short, short, dtype=dtype, device=device) for _ in range(num_squares)]
        num_full = 0 if self.is_vector else 2 if is_short else 1
        self.full = [torch.empty(count * rows * cols, dtype=dtype, device=device) for _ in range(num_full)]
        # Small singular values are lost in the rounding of the Gram matrix, and the next steps amplify that error. In
        # a shorter type, a new Gram matrix every two steps keeps the error small.
        self.gram_steps = 2 if is_short else len(POLAR_EXPRESS)


def orthogonalize_(block: torch.Tensor, coefficients: Coefficients, workspace: Workspace) -> float:
    """Overwrites each matrix ``U S V^T`` of ``(count, rows, cols)`` by about ``U V^T``, and returns the scale."""
    if workspace.is_vector:
        return _iterate_vector(block, coefficients)
    block.div_(torch.linalg.vector_norm(block, dim=(1, 2), keepdim=True).add_(_NORM_FLOOR))  # by (count, 1, 1)
    spare, *narrow = (memory.view(block.shape) for memory in workspace.full)
    current = narrow[0].copy_(block) if narrow else block  # the copy rounds to the shorter type
    iterate = _iterate_gram if workspace.uses_gram else _iterate_matrix
    result = iterate(current, spare, coefficients, workspace)
    if result is not block:
        block.copy_(result)
    return 1.0


def _iterate_vector(block: torch.Tensor, coefficients: Coefficients) -> float:
    """Every iteration multiplies a single row by a number. So only its length is computed, and the row is kept."""
    flat = block.view(-1)  # (long,)
    norm = math.sqrt(float(flat.dot(flat)))
    if norm == 0.0 or not math.isfinite(norm):  # the square has underflown or overflown
        norm = float(torch.linalg.vector_norm(flat))
    return vector_scale(norm, coefficients)


def vector_scale(norm: float, coefficients: Coefficients) -> float:
    """The number by which all iterations together multiply a single row of this norm."""
    length = norm / (norm + _NORM_FLOOR)
    for a, b, c in coefficients:
        square = length * length
        length *= a + square * (b + c * square)
    return length / norm if norm > 0.0 else 0.0


# Below, Y stands for a matrix or its transpose, whichever is not tall, and the arithmetic on a tall matrix is that on Y
# transposed. Nothing is copied to transpose it, because such a copy costs as much as a product.


def _is_tall(block: torch.Tensor) -> bool:
    return block.shape[1] > block.shape[2]


def _gram(block: torch.Tensor, out: torch.Tensor) -> None:
    """Writes ``Y Y^T``, (count, short, short)."""
    wide = block.mT if _is_tall(block) else block
    torch.bmm(wide, wide.mT, out=out)


def _iterate_matrix(
    current: torch.Tensor, spare: torch.Tensor, coefficients: Coefficients, workspace: Workspace
) -> torch.Tensor:
    """``A = Y Y^T;  Y <- a Y + (b A + c A A) Y``. The arguments are like the block. Returns one of the first two."""
    gram, polynomial = workspace.squares
    tall = _is_tall(current)
    for a, b, c in coefficients:
        _gram(current, gram)  # (count, short, short)
        torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=polynomial)
        left, right = (current, polynomial.mT) if tall else (polynomial, current)
        torch.baddbmm(current, left, right, beta=a, out=spare)
        current, spare = spare, current
    return current


def _iterate_gram(
    current: torch.Tensor, spare: torch.Tensor, coefficients: Coefficients, workspace: Workspace
) -> torch.Tensor:
    """The same iteration, ``gram_steps`` steps at a time on the Gram matrix."""
    tall = _is_tall(current)
    for first in range(0, len(coefficients), workspace.gram_steps):
        total = _gram_polynomial(current, coefficients[first : first + workspace.gram_steps], workspace)
        left, right = (current, total.mT) if tall else (total, current)
        torch.bmm(left, right, out=spare)
        current, spare = spare, current
    return current


def _gram_polynomial(block: torch.Tensor, coefficients: Coefficients, workspace: Workspace) -> torch.Tensor:
    """The Q of ``Y <- Q Y``, (count, short, short).

    It begins with ``A = Y Y^T``. Each step is ``P = a I + b A + c A A;  Q <- P Q;  A <- P A P``.
    """
    gram, polynomial, product, total = workspace.squares
    _gram(block, gram)
    last = len(coefficients) - 1
    for index, (a, b, c) in enumerate(coefficients):
        torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=polynomial)
        polynomial.diagonal(dim1=1, dim2=2).add_(a)
        if index == 0:
            total.copy_(polynomial)
        else:
            torch.bmm(polynomial, total, out=product)
            total, product = product, total
        if index < last:
            torch.bmm(polynomial, gram, out=product)
            torch.bmm(product, polynomial, out=gram)
    return total


def orthogonalize_exactly_(block: torch.Tensor) -> float:
    """The spectral direction by a batched SVD. Singular values become one, but a zero stays zero."""
    # (count, rows, short), (count, short), (count, short, cols)
    left, singular, right = torch.linalg.svd(block, full_matrices=False)
    cut = singular[:, :1] * (torch.finfo(block.dtype).eps * max(block.shape[1:]))
    left.mul_((singular > cut).unsqueeze(1))
    torch.bmm(left, right, out=block)
    return 1.0


def normalize_(block: torch.Tensor, geometry: str) -> float:
    """The other oracles. Overwrites the block, (count, rows, cols), by its direction and returns the scale."""
    if geometry == "sign":
        block.sign_()
        return 1.0
    dims = {"euclidean": (1, 2), "column": (1,), "row": (2,)}[geometry]
    norms = torch.linalg.vector_norm(block, dim=dims, keepdim=True)  # it broadcasts to the block
    norms.masked_fill_(norms == 0, 1.0)  # a zero vector stays zero
    block.div_(norms)
    return 1.0
