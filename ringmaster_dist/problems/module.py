"""An ordinary ``nn.Module`` with its data as a problem.

Its parameters are views of one flat buffer: on a GPU of its own, on the CPU of the snapshot itself. Handing a gradient
out is one copy, into another flat buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import nn

from ringmaster_dist.algorithm.layout import Layout, Parameter
from ringmaster_dist.problems import Interrupted, Stop, never

Batch = Any


def role_by_shape(name: str, parameter: nn.Parameter) -> str:
    """Matrices are matrices, vectors are scalars' kin; what is called an embedding or a head is one."""
    if parameter.ndim < 2:
        return "scalar"
    if "embed" in name or "wte" in name:
        return "embedding"
    return "output" if "head" in name else "matrix"


class ModuleProblem:
    """``batches`` gives the micro-batches of a gradient; ``loss`` the mean loss of one.

    The gradient is the mean over the micro-batches. Between them, and after each of the modules ``watched`` in the
    forward and in the backward pass, it is asked whether the gradient is still wanted.
    """

    objective = "loss"
    quick_to_evaluate = False
    dtype = torch.float32

    def __init__(
        self,
        module: nn.Module,
        batches: Callable[[int, int, int], Sequence[Batch]],
        loss: Callable[[nn.Module, Batch], torch.Tensor],
        *,
        evaluate: Callable[[nn.Module], Mapping[str, float]] = lambda module: {},
        role: Callable[[str, nn.Parameter], str] = role_by_shape,
        watched: Sequence[nn.Module] = (),
        device: torch.device | str = "cpu",
        clip: float | None = None,
        weight: float = 1.0,
        loss_scales: Sequence[float] = (1.0,),
    ) -> None:
        """``loss_scales`` are tried in turn until the gradient is finite, for arithmetic of a narrow range (fp16)."""
        self.module, self.device = module.to(device), torch.device(device)
        self.parameters: Sequence[Parameter] = [
            Parameter(name, tuple(p.shape), role(name, p)) for name, p in module.named_parameters()
        ]
        self._batches, self._loss, self._evaluate = batches, loss, evaluate
        self._clip, self._weight, self._loss_scales = clip, weight, loss_scales
        self._stop: Stop = never
        for part in watched:
            part.register_forward_hook(self._look)

    def bind(self, layout: Layout) -> None:
        named = dict(self.module.named_parameters())
        self._tensors = [named[p.name] for p in layout.parameters]  # in the order of the layout
        self._layout = layout
        self._flat = torch.empty(layout.size, device=self.device)
        with torch.no_grad():
            for view, tensor in zip(layout.views(self._flat).values(), self._tensors, strict=True):
                view.copy_(tensor)
        self._point_at(self._flat)

    @cached_property
    def _gradient(self) -> torch.Tensor:
        """Made when the first gradient is: a server only evaluates."""
        return torch.zeros(self._layout.size, device=self.device)

    @cached_property
    def _gradient_views(self) -> list[torch.Tensor]:
        return list(self._layout.views(self._gradient).values())

    @cached_property
    def _handed(self) -> torch.Tensor:
        """What is handed over is in host memory; a copy from a GPU is quicker into pinned pages."""
        pinned = self.device.type == "cuda"
        return torch.empty(self._layout.size, pin_memory=True) if pinned else self._gradient

    def _point_at(self, flat: torch.Tensor) -> None:
        for view, tensor in zip(self._layout.views(flat).values(), self._tensors, strict=True):
            tensor.data = view

    def initial(self, seed: int) -> torch.Tensor:
        """The weights the module was made with."""
        return self._flat.detach().cpu().clone()

    def gradient(
        self, iterate: torch.Tensor, seed: int, worker_id: int, sequence: int, stop: Stop = never
    ) -> tuple[torch.Tensor, float]:
        self._stop = stop
        self.load(iterate)
        self.module.train()
        batches = self._batches(seed, worker_id, sequence)
        # Always from the largest scale on: a gradient is a function of the arguments alone, not of those before it.
        for scale in self._loss_scales:
            loss = self._accumulate(batches, scale)
            if scale == self._loss_scales[-1] or bool(torch.isfinite(self._gradient.sum())):
                break
        factor = self._weight / scale
        if self._clip is not None:
            factor *= min(1.0, self._clip * scale / (float(self._gradient.norm()) + 1e-6 * scale))
        if factor != 1.0:
            self._gradient.mul_(factor)
        if self._handed is not self._gradient:
            self._handed.copy_(self._gradient)
        return self._handed, loss

    def _accumulate(self, batches: Sequence[Batch], scale: float) -> float:
        """Puts the gradient, times the scale, into its buffer; gives the loss."""
        for tensor in self._tensors:
            tensor.grad = None
        total = 0.0
        for batch in batches:
            self._check()
            loss = self._loss(self.module, batch) / len(batches)
            torch.autograd.backward(loss if scale == 1.0 else loss * scale)
            total += float(loss.detach())
        for tensor, view in zip(self._tensors, self._gradient_views, strict=True):
            if tensor.grad is None:  # it had no part in the loss
                view.zero_()
            else:
                view.copy_(tensor.grad)
        return total

    def load(self, iterate: torch.Tensor) -> None:
        """Puts the weights into the module, which only reads them."""
        if self.device.type == "cpu" and iterate.dtype == self.dtype:
            self._point_at(iterate)
        else:
            self._flat.copy_(iterate)

    def evaluate(self, iterate: torch.Tensor) -> dict[str, float]:
        self.load(iterate)
        self.module.eval()
        with torch.no_grad():
            return dict(self._evaluate(self.module))

    def _look(self, module: nn.Module, arguments: Any, output: torch.Tensor) -> None:
        self._check()
        if output.requires_grad:
            output.register_hook(self._check)

    def _check(self, gradient: torch.Tensor | None = None) -> None:
        if self._stop():
            raise Interrupted
