"""One update of Algorithm 1: momentum, oracle, step, on flat buffers.

    m <- (1 - alpha) m + alpha g
    u  = (1 - alpha) m + alpha g        with Nesterov, else u = m
    x' = (1 - eta * weight_decay) x + eta * radius * lmo(u)        with the block's own weight decay and radius

The momentum starts at zero, so the first line holds for ``k = 0`` too.

An update is a list of tasks. Without a crew, a task is a block, and torch uses its threads within each operation. The
part without an oracle is computed in pieces that fit the cache. With a crew, blocks are cut into tasks of a few
matrices, which the threads of the crew take in turn. The bits are the same.

Iterate, momentum and gradient are flat tensors ``(layout.size,)``. A gradient may also be packed (`quantized`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from ringmaster_dist import quantized
from ringmaster_dist.algorithm import geometry as oracles
from ringmaster_dist.algorithm.layout import Block, Layout
from ringmaster_dist.algorithm.names import MIXED
from ringmaster_dist.crew import Crew

_PIECE = 1 << 16  # elements; three fp32 pieces fit the second-level cache of a core
_TASK = 600_000  # elements of a crew's task, about: threads wait for each other at the end of large tasks
_MANY = 1 << 19  # elements of square matrices, from which on bfloat16 saves a large part of the time


def quick_precision(layout: Layout, dtype: torch.dtype, has_bfloat16: bool) -> str:
    """The quickest precision that reaches about the same loss, on a device that has bfloat16 or does not have it."""
    spectral = (block for block in layout.blocks if block.geometry == "spectral")
    size = sum(block.size for block in spectral if not oracles.uses_gram(block.rows, block.cols))
    return MIXED if has_bfloat16 and dtype == torch.float32 and size >= _MANY else _name(dtype)


class Update:
    """Applies updates to tensors of one layout. It owns scratch memory but no state. One thread uses it at a time."""

    def __init__(
        self,
        layout: Layout,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        nesterov: bool = True,
        orthogonalization: str = "polar_express",
        precision: str = "",
        crew: Crew | None = None,
    ) -> None:
        """``precision`` names the type of orthogonalisation by iteration, or is `MIXED`. Empty means ``dtype``."""
        if orthogonalization not in oracles.ORTHOGONALIZATIONS:
            known = ", ".join(oracles.ORTHOGONALIZATIONS)
            raise ValueError(f"orthogonalization is {orthogonalization!r}; known: {known}")
        self.layout = layout
        self.dtype = dtype
        self.nesterov = nesterov
        self.orthogonalization = orthogonalization
        self.precision = precision or _name(dtype)
        self.device = torch.device(device)
        shared = [block for block in layout.blocks if crew is not None and _can_be_shared(block, crew.size)]
        if sum(block.size for block in shared) < _TASK:
            shared = []
        self._desk = _Desk(self, [_Task(b, b.start, b.stop) for b in layout.blocks if b not in shared], _PIECE)
        # Tasks without an oracle are short. They are last, so that the threads end at about the same time.
        ordered = sorted(shared, key=lambda block: block.geometry == "none")
        tasks = [task for block in ordered for task in _cut(block, crew.size if crew else 1)]
        self._crew = crew if tasks else None
        # Threads may wait for Python's lock between operations, so theirs are long: a piece is a whole task.
        self._desks = [_Desk(self, tasks, _TASK) for _ in range(self._crew.size)] if self._crew else []

    def apply(
        self,
        iterate: torch.Tensor,
        momentum: torch.Tensor,
        gradient: torch.Tensor,
        *,
        eta: float,
        alpha: float,
        out: torch.Tensor,
        rounded: torch.Tensor | None = None,
    ) -> None:
        """Writes the next iterate to ``out`` (which may be ``iterate``) and the next momentum over ``momentum``.

        The gradient may be of a shorter type, or packed, and is widened piece by piece. ``rounded`` receives the next
        iterate too, in its own type, after each piece. All other tensors are ``(layout.size,)``.
        """
        for planned in self._desk.plan:
            self._desk.compute(planned, iterate, momentum, gradient, eta, alpha, out, rounded)
        if self._crew is None:
            return
        left = deque(range(len(self._desks[0].plan)))

        def work(thread: int) -> None:
            desk = self._desks[thread]
            while True:
                try:
                    planned = desk.plan[left.popleft()]
                except IndexError:  # nothing is left
                    return
                desk.compute(planned, iterate, momentum, gradient, eta, alpha, out, rounded)

        self._crew.run(work)

    def pieces(self, gradient: torch.Tensor) -> Iterator[tuple[int, int, torch.Tensor]]:
        """The numbers of a gradient, with the places at which each piece begins and ends. Only a packed one is cut.

        The next piece overwrites the memory of a piece.
        """
        size = self.layout.size
        if gradient.dtype != quantized.DTYPE:
            yield 0, size, gradient
            return
        for low in range(0, size, _PIECE):
            high = min(low + _PIECE, size)
            yield low, high, self._desk.widened(gradient, low, high)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _type(precision: str, block: Block, dtype: torch.dtype) -> torch.dtype:
    """The type in which a block is orthogonalised."""
    if precision == MIXED:
        return dtype if oracles.uses_gram(block.rows, block.cols) else torch.bfloat16
    found: torch.dtype = getattr(torch, precision)
    return found


class _Task(NamedTuple):
    """Some matrices of a block, or some numbers of a block without an oracle, from ``start`` to ``stop``."""

    block: Block
    start: int
    stop: int


def _can_be_shared(block: Block, threads: int) -> bool:
    """Whether there can be a task for every thread. If not, torch's own threads share each operation on the block."""
    if block.geometry == "none":
        return True
    return block.num_matrices >= threads and min(block.rows, block.cols) > 1  # one vector alone has another path


def _cut(block: Block, threads: int) -> Iterator[_Task]:
    """The tasks of a block, which have whole matrices. There is one for every thread, or more."""
    matrix = 1 if block.geometry == "none" else block.rows * block.cols
    length = max(1, min(_TASK, block.size // threads) // matrix) * matrix
    for start in range(block.start, block.stop, length):
        yield _Task(block, start, min(start + length, block.stop))


class _Planned(NamedTuple):
    """A task with the memory that its thread uses for it."""

    task: _Task
    scratch: torch.Tensor  # of the size of the task, or of a piece of it if it has no oracle
    matrices: torch.Tensor | None  # the scratch as (num_matrices, rows, cols); None without an oracle
    workspace: oracles.Workspace | None  # only for orthogonalisation by iteration


class _Desk:
    """The memory of one thread, and what it computes there. All tasks use one scratch buffer of the largest's size.

    Tasks without an oracle are computed in pieces of that many numbers.
    """

    def __init__(self, update: Update, tasks: Sequence[_Task], piece: int) -> None:
        self._dtype, self._nesterov, self._size = update.dtype, update.nesterov, update.layout.size
        self._coefficients = oracles.COEFFICIENTS.get(update.orthogonalization)
        self._piece = piece
        sizes = [_scratch_size(task, piece) for task in tasks]
        self._scratch = torch.empty(max(sizes, default=0), dtype=update.dtype, device=update.device)
        self._wide: torch.Tensor | None = None  # for gradients of a shorter type
        # Blocks whose shapes are equal up to transposition, such as c_fc and c_proj, share a workspace.
        workspaces: dict[tuple[int, int, int], oracles.Workspace] = {}
        self.plan: list[_Planned] = []
        for task, size in zip(tasks, sizes, strict=True):
            block, scratch = task.block, self._scratch[:size]
            matrices = None if block.geometry == "none" else scratch.view(-1, block.rows, block.cols)
            workspace = None
            if matrices is not None and block.geometry == "spectral" and self._coefficients is not None:
                key = (len(matrices), min(block.rows, block.cols), max(block.rows, block.cols))
                precision = _type(update.precision, block, update.dtype)
                workspace = workspaces.get(key) or oracles.Workspace(*key, update.dtype, update.device, precision)
                workspaces[key] = workspace
            self.plan.append(_Planned(task, scratch, matrices, workspace))

    def compute(
        self, planned: _Planned, iterate: torch.Tensor, momentum: torch.Tensor, gradient: torch.Tensor,
        eta: float, alpha: float, out: torch.Tensor, rounded: torch.Tensor | None,
    ) -> None:  # fmt: skip
        """Does one task. The tensors are those of `Update.apply`."""
        (block, start, stop), scratch, matrices, workspace = planned
        keep, step = 1.0 - eta * block.weight_decay, eta * block.radius
        if matrices is None:
            for low in range(start, stop, self._piece):
                high = min(low + self._piece, stop)
                x, m, x_next = (t[low:high] for t in (iterate, momentum, out))
                g = self.widened(gradient, low, high)
                self._direction(m, g, alpha, piece := scratch[: high - low])
                _step(x, piece, step, keep, x_next)
                if rounded is not None:
                    rounded[low:high].copy_(x_next)
            return
        if stop - start == self._size:  # for a small vector, slicing would cost as much as the arithmetic
            x, m, x_next = iterate, momentum, out
        else:
            x, m, x_next = (t[start:stop] for t in (iterate, momentum, out))
        self._direction(m, self.widened(gradient, start, stop), alpha, scratch)
        scale = self._oracle(matrices, block, workspace)
        _step(x, scratch, step * scale, keep, x_next)
        if rounded is not None:
            rounded[start:stop].copy_(x_next)

    def widened(self, gradient: torch.Tensor, low: int, high: int) -> torch.Tensor:
        """The numbers ``low`` to ``high`` of a gradient, (high - low,), in the type of the update."""
        if gradient.dtype == self._dtype:
            return gradient if high - low == len(gradient) else gradient[low:high]
        if self._wide is None or len(self._wide) < high - low:
            self._wide = self._scratch.new_empty(max(len(self._scratch), high - low))
        wide = self._wide[: high - low]
        if gradient.dtype == quantized.DTYPE:
            return quantized.unpack(gradient, self._size, low, high, wide)
        return wide.copy_(gradient[low:high])

    def _direction(self, momentum: torch.Tensor, gradient: torch.Tensor, alpha: float, out: torch.Tensor) -> None:
        """Updates the momentum, and writes the input of the oracle to ``out``. All are (n,)."""
        momentum.lerp_(gradient, alpha)
        if self._nesterov:
            torch.lerp(momentum, gradient, alpha, out=out)
        else:
            out.copy_(momentum)

    def _oracle(self, matrices: torch.Tensor, block: Block, workspace: oracles.Workspace | None) -> float:
        """Overwrites the matrices, (num_matrices, rows, cols), by D and returns s, with ``lmo = -s D``."""
        if block.geometry != "spectral":
            return oracles.normalize_(matrices, block.geometry)
        scale = oracles.spectral_scale(block.rows, block.cols)
        if workspace is None:
            return scale * oracles.orthogonalize_exactly_(matrices)
        assert self._coefficients is not None
        return scale * oracles.orthogonalize_(matrices, self._coefficients, workspace)


def _scratch_size(task: _Task, piece: int) -> int:
    size = task.stop - task.start
    return min(size, piece) if task.block.geometry == "none" else size


def _step(x: torch.Tensor, direction: torch.Tensor, eta: float, keep: float, out: torch.Tensor) -> None:
    """``out = keep * x - eta * direction``, all of (n,)."""
    if keep == 1.0:
        torch.add(x, direction, alpha=-eta, out=out)
    else:
        torch.add(torch.mul(x, keep, out=out), direction, alpha=-eta, out=out)
