"""``ringmaster bench update``: one server update of the paper's model beside what people would use instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ringmaster_dist.algorithm.geometry import POLAR_EXPRESS, spectral_scale
from ringmaster_dist.algorithm.layout import GEOMETRY_MAPS, Layout, Parameter
from ringmaster_dist.algorithm.update import Update
from ringmaster_dist.bench import by_turns, compared, show

_ETA, _ALPHA = 0.02, 0.05
_COLUMNS = ["update", "relative", "ms", "worst ms"]


def paper_parameters() -> list[Parameter]:
    """The 10,518,828 parameters of the paper's NanoChat model."""
    width, vocabulary, blocks = 192, 8192, 6
    parameters = [Parameter("transformer.wte.weight", (vocabulary, width), "embedding")]
    for i in range(blocks):
        prefix = f"transformer.h.{i}"
        parameters += [Parameter(f"{prefix}.attn.{n}.weight", (width, width)) for n in ("c_q", "c_k", "c_v", "c_proj")]
        if i % 2 == (blocks - 1) % 2:
            parameters.append(Parameter(f"{prefix}.attn.ve_gate.weight", (3, 32)))
            parameters.append(Parameter(f"value_embeds.{i}.weight", (vocabulary, width), "embedding"))
        parameters.append(Parameter(f"{prefix}.mlp.c_fc.weight", (4 * width, width)))
        parameters.append(Parameter(f"{prefix}.mlp.c_proj.weight", (width, 4 * width)))
    parameters.append(Parameter("lm_head.weight", (vocabulary, width), "output"))
    parameters += [Parameter(name, (blocks,), "scalar") for name in ("resid_lambdas", "x0_lambdas")]
    return parameters


def run(quick: bool, as_json: bool) -> None:
    show("update", _COLUMNS, measure(repeats=3 if quick else 15), as_json)


def measure(repeats: int) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    layout = Layout(paper_parameters(), GEOMETRY_MAPS["muon"])
    candidates: dict[str, Callable[[], None]] = {
        "ringmaster": _ours(layout),
        "ringmaster, iterations in bfloat16": _ours(layout, torch.bfloat16),
        "plain loop in float32, matrix by matrix": _plain_loop(layout),
    }
    if hasattr(torch.optim, "Muon"):
        candidates["torch.optim.Muon (in bfloat16) + SGD"] = _torch_optim(layout)
    return compared("update", by_turns(candidates, repeats), "ringmaster")


def _ours(layout: Layout, precision: torch.dtype | None = None) -> Callable[[], None]:
    """What the server does: the next iterate goes to the other of two buffers."""
    update = Update(layout, precision=precision)
    buffers = [torch.randn(layout.size), torch.empty(layout.size)]
    momentum, gradient = torch.zeros(layout.size), torch.randn(layout.size)

    def step() -> None:
        update.apply(buffers[0], momentum, gradient, eta=_ETA, alpha=_ALPHA, out=buffers[1])
        buffers.reverse()

    return step


def _split(layout: Layout) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]]:
    """The same tensors as separate parameters with gradients: those with an oracle, and the rest."""
    with_oracle: list[torch.nn.Parameter] = []
    rest: list[torch.nn.Parameter] = []
    for parameter in layout.parameters:
        tensor = torch.nn.Parameter(torch.randn(parameter.shape))
        tensor.grad = torch.randn(parameter.shape)
        (with_oracle if parameter.role == "matrix" else rest).append(tensor)
    return with_oracle, rest


def _torch_optim(layout: Layout) -> Callable[[], None]:
    with_oracle, rest = _split(layout)
    muon = torch.optim.Muon(with_oracle, lr=_ETA, momentum=1 - _ALPHA, nesterov=True, weight_decay=0.0)
    sgd = torch.optim.SGD(rest, lr=_ETA, momentum=1 - _ALPHA, nesterov=True)

    def step() -> None:
        muon.step()  # type: ignore[no-untyped-call]
        sgd.step()

    return step


def _plain_loop(layout: Layout) -> Callable[[], None]:
    """Muon as it is usually written, in fp32: torch.optim.Muon computes in bf16, which some processors emulate."""
    with_oracle, rest = _split(layout)
    momenta = {id(p): torch.zeros_like(p) for p in (*with_oracle, *rest)}

    @torch.no_grad()
    def step() -> None:
        for parameter in with_oracle:
            direction = _look_ahead(parameter, momenta[id(parameter)])
            y = direction / (direction.norm() + 1e-7)
            tall = y.shape[0] > y.shape[1]
            y = y.T if tall else y
            for a, b, c in POLAR_EXPRESS:
                gram = y @ y.T
                y = a * y + (b * gram + c * gram @ gram) @ y
            parameter.add_(y.T if tall else y, alpha=-_ETA * spectral_scale(*parameter.shape))
        for parameter in rest:
            parameter.add_(_look_ahead(parameter, momenta[id(parameter)]), alpha=-_ETA)

    return step


def _look_ahead(parameter: torch.nn.Parameter, momentum: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None
    momentum.lerp_(parameter.grad, _ALPHA)
    return torch.lerp(momentum, parameter.grad, _ALPHA)
