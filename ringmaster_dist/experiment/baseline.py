"""What people use instead: ``torch.optim.Muon`` for matrices and AdamW for the rest, with a rate for every role.

It takes the place of `Update`, so that the simulator runs it under the same delays, thresholds and schedule.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ringmaster_dist.algorithm.layout import Layout
from ringmaster_dist.algorithm.update import Update

_MOMENTUM = 0.95
_BETAS, _EPSILON = (0.8, 0.95), 1e-10  # of AdamW, as in nanochat


class MuonAdamW(Update):
    """An `Update` whose arithmetic torch's optimizers do. They keep their own momentum."""

    def __init__(self, layout: Layout, rates: Mapping[str, float]) -> None:
        """``rates`` are the learning rates of each role at eta = 1. The eta of the schedule multiplies them."""
        super().__init__(layout)
        self._variable, self._slope = torch.zeros(layout.size), torch.zeros(layout.size)  # (size,) each
        by_role: dict[str, list[torch.nn.Parameter]] = {role: [] for role in rates}
        values, slopes = layout.views(self._variable), layout.views(self._slope)
        for parameter in layout.parameters:
            tensor = torch.nn.Parameter(values[parameter.name])
            tensor.grad = slopes[parameter.name]
            by_role[parameter.role].append(tensor)
        matrices = by_role.pop("matrix")
        groups = [{"params": tensors, "rate": rates[role]} for role, tensors in by_role.items() if tensors]
        self._optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon([{"params": matrices, "rate": rates["matrix"]}], momentum=_MOMENTUM, weight_decay=0.0),
            torch.optim.AdamW(groups, betas=_BETAS, eps=_EPSILON, weight_decay=0.0),
        ]

    def apply(
        self, iterate: torch.Tensor, momentum: torch.Tensor, gradient: torch.Tensor, *, eta: float, alpha: float,
        out: torch.Tensor, rounded: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        self._variable.copy_(iterate)
        self._slope.copy_(gradient)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = eta * group["rate"]
            optimizer.step()
        out.copy_(self._variable)
