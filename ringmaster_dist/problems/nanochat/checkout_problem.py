"""The pretraining of the user's own nanochat as a problem.

The server has no Adam. So each parameter that nanochat moves by Adam gets a norm whose step has about the same size,
and a radius that follows from nanochat's learning rates. The radius of a Muon matrix is one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
from torch import nn

from ringmaster_dist.problems.nanochat.checkout import Checkout, CheckoutTokenizer, Rate
from ringmaster_dist.problems.nanochat.problem import TextProblem
from ringmaster_dist.problems.nanochat.rows import Rows
from ringmaster_dist.problems.nanochat.sizes import Sizes
from ringmaster_dist.problems.seeding import seeded

# A step of Adam moves a coordinate by about this part of the learning rate, because most of a gradient is noise. The
# step of a sign moves it by all of it. The radii of embeddings and output that were measured for the paper's model are
# about this part of nanochat's rates.
ADAM_SHARE = 0.2


class Movement(NamedTuple):
    """How the server moves a parameter."""

    role: str
    radius: float


def movements(model: nn.Module, rates: Mapping[str, Rate]) -> dict[str, Movement]:
    """The movement of each parameter that nanochat trains, by name. The step size is the rate of Muon's matrices."""
    matrix_rate = max(rate.learning_rate for rate in rates.values() if rate.is_muon)
    found = {}
    for name, rate in rates.items():
        role = _role(name, model.get_submodule(name.rpartition(".")[0]), rate)
        ratio = rate.learning_rate / matrix_rate
        if role != "matrix":
            ratio *= ADAM_SHARE
        if role == "embedding":  # a row has the Euclidean norm, which grows with the root of its length
            ratio *= math.sqrt(model.get_parameter(name).shape[-1])
        found[name] = Movement(role, ratio)
    return found


def _role(name: str, owner: nn.Module, rate: Rate) -> str:
    """Muon's parameters are matrices. Of Adam's, a table is an embedding, and the head is the output."""
    if rate.is_muon:
        return "matrix"
    if isinstance(owner, nn.Embedding):
        return "embedding"
    return "output" if name.startswith("lm_head.") else "scalar"


class CheckoutProblem(TextProblem):
    """The model of a checkout on rows of its own shards."""

    def __init__(
        self, checkout: Checkout, sizes: Sizes, rows: Rows, *, seed: int, precision: str, **given: Any
    ) -> None:
        """``given`` are further arguments of `TextProblem`."""
        self.checkout, self.sizes = checkout, sizes
        with seeded(seed):
            model = checkout.model(sizes, rows.manifest["vocab_size"])
        moved = movements(model, checkout.rates(model))
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in moved)  # what nanochat does not train is frozen
        dtype = checkout.compute_dtype
        super().__init__(
            model,
            rows,
            context=sizes.sequence_len,
            role=lambda name, parameter: moved[name].role,
            watched=list(getattr(getattr(model, "transformer", None), "h", ())),
            seed=seed,
            precision=precision if dtype is None else "float32",  # without autocast: the model chooses its own types
            scaled=dtype == torch.float16,
            **given,
        )
        self.parameters = [p._replace(radius=moved[p.name].radius) for p in self.parameters]
        self.data_fingerprint = f"{rows.fingerprint}-{checkout.source_digest}"

    def tokenizer(self) -> CheckoutTokenizer:
        return self.checkout.tokenizer

    @property
    def model_config(self) -> dict[str, Any]:
        """The fields of nanochat's GPTConfig."""
        found: dict[str, Any] = asdict(self.module.config)  # type: ignore[call-overload]
        return found

    def _mean_loss(self, module: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        with self._autocast():
            loss: torch.Tensor = self._forward(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        return loss

    def _summed_loss(self, module: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = module(tokens.contiguous(), targets.contiguous(), loss_reduction="sum")
        return loss

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        if tokens.shape[1] == 1:  # newer models need two tokens; a model is causal, so what follows changes nothing
            return super().logits(tokens.expand(-1, 2).contiguous())[:, :1]
        return super().logits(tokens)
