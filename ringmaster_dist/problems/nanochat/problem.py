"""The pretraining of a language model on rows of tokens as a problem, and that of NanoChat."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from ringmaster_dist.problems.module import ModuleProblem, role_by_shape
from ringmaster_dist.problems.nanochat.model import IGNORED, NanoChat, NanoChatConfig
from ringmaster_dist.problems.nanochat.rows import Rows
from ringmaster_dist.problems.seeding import seeded

DTYPES = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}  # of autocast
_FP16_SCALES = (2.0**16, 2.0**12, 2.0**8, 2.0**4, 1.0)


def spread(count: int, total: int) -> np.ndarray:
    """Evenly spaced indices below ``total``: ``count`` of them, or all if there are fewer."""
    count = min(count, total)
    return np.arange(count) * total // count


class Tokenizer(Protocol):
    """What a problem and its commands need of a tokenizer."""

    bos: int  # every document begins with this token

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...


class TextProblem(ModuleProblem):
    """``batch`` rows per gradient, in micro-batches of at most ``micro_batch``.

    ``model(tokens, targets)`` is the mean loss, in which the targets `IGNORED` do not count.

    Workers may take different numbers of rows. If the configuration says how many, ``weight`` makes each row count the
    same: it is the number of rows over the usual number, and multiplies the mean over the rows. If the server says it
    (``gradient(..., rows=)``), the server gives each row the same weight.
    """

    def __init__(
        self,
        model: nn.Module,
        rows: Rows,
        *,
        context: int,
        batch: int,
        micro_batch: int | None = None,
        weight: float = 1.0,
        validation_rows: int = 32,
        final_tokens: int | None = None,
        seed: int = 0,
        device: torch.device | str = "cpu",
        precision: str = "auto",
        compiled: bool = False,
        clip: float | None = None,
        watched: Sequence[nn.Module] = (),
        role: Callable[[str, nn.Parameter], str] = role_by_shape,
        scaled: bool = False,
    ) -> None:
        """``scaled`` says that the model itself computes in fp16, so its loss has to be scaled."""
        self.rows, self.context = rows, context
        self._usual, self._micro_batch = batch, micro_batch
        self.validation_rows, self._final_tokens = validation_rows, final_tokens
        self.on_scored: Callable[[int, int], None] = lambda done, rows: None  # called while an evaluation continues
        self._precision = _precision(precision, torch.device(device).type == "cuda")
        super().__init__(
            model,
            self._draw,
            self._mean_loss,
            evaluate=lambda module: self.score(module, self.validation_rows),
            role=role,
            watched=() if compiled else watched,
            device=device,
            clip=clip,
            batch=batch,
            weight=weight,
            loss_scales=_FP16_SCALES if scaled or self._precision == "float16" else (1.0,),
            seed=seed,
        )
        self.data_fingerprint = rows.fingerprint
        self._forward = torch.compile(model) if compiled else model

    def tokenizer(self) -> Tokenizer:
        return self.rows.tokenizer()

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """The logits of every token, (rows, T, V). The tokens are (rows, T)."""
        with self._autocast():
            found: torch.Tensor = self.module(tokens)
        return found.float()

    def _summed_loss(self, module: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = module(tokens, targets, reduction="sum")
        return loss

    def _draw(self, seed: int, worker_id: int, sequence: int, count: int) -> Sequence[torch.Tensor]:
        # Different numbers of rows draw from different streams, so that no draw repeats an earlier one.
        rows = self.rows.sample(seed, worker_id, sequence, count, 0 if count == self._usual else count)
        # (micro_batch, context + 1) each; the last one may have fewer rows
        return torch.split(self._on_device(rows), self._micro_batch or count)

    def _parts(self, batch: torch.Tensor, batches: Sequence[torch.Tensor]) -> float:
        return sum(len(each) for each in batches) / len(batch)

    def _mean_loss(self, module: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        with self._autocast():
            loss: torch.Tensor = self._forward(tokens[:, :-1], tokens[:, 1:])
        return loss

    def _on_device(self, rows: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(rows.astype(np.int64)).to(self.device)

    def _autocast(self) -> AbstractContextManager[Any]:
        dtype = DTYPES[self._precision]
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype=dtype)

    @property
    def final_rows(self) -> int:
        """The number of validation rows of the closing evaluation."""
        whole = len(self.rows.validation)
        if self._final_tokens is None:
            return whole
        return min(whole, max(1, self._final_tokens // self.context))

    def evaluated_on(self, *, at_the_end: bool) -> str:
        whole = len(self.rows.validation)
        rows = self.final_rows if at_the_end else min(self.validation_rows, whole)
        return f"{f'all {whole:,}' if rows == whole else f'{rows:,} of {whole:,}'} validation rows"

    def evaluate_at_the_end(self, iterate: torch.Tensor) -> dict[str, float]:
        usual, self.validation_rows = self.validation_rows, self.final_rows
        try:
            return self.evaluate(iterate)
        finally:
            self.validation_rows = usual

    def score(self, module: nn.Module, num_rows: int) -> dict[str, float]:
        """Loss per token and bits per byte on rows spread over the validation part.

        Special tokens have no bytes and do not count. nanochat computes its bits per byte in the same way.
        """
        sizes = torch.from_numpy(self.rows.token_bytes).to(self.device)  # (vocab_size,)
        nats, num_tokens, num_bytes = 0.0, 0, 0
        chosen = spread(num_rows, len(self.rows.validation))
        at_once = self._micro_batch or self._usual
        for start in range(0, len(chosen), at_once):
            tokens = self._on_device(self.rows.validation[chosen[start : start + at_once]])  # (rows, context + 1)
            targets = tokens[:, 1:].clone()
            targets[sizes[targets] == 0] = IGNORED
            with self._autocast():
                nats += float(self._summed_loss(module, tokens[:, :-1], targets))
            counted = targets[targets != IGNORED]  # (tokens that count,)
            num_tokens += counted.numel()
            num_bytes += int(sizes[counted].sum())
            self.on_scored(min(start + at_once, len(chosen)), len(chosen))
        loss = nats / max(1, num_tokens)
        return {"loss": loss, "bits_per_byte": nats / (math.log(2.0) * max(1, num_bytes))}


class NanoChatProblem(TextProblem):
    """The paper's model."""

    def __init__(
        self, config: NanoChatConfig, rows: Rows, *, attention: str = "auto", seed: int = 0,
        device: torch.device | str = "cpu", **given: Any,
    ) -> None:  # fmt: skip
        """``given`` are further arguments of `TextProblem`."""
        with seeded(seed):
            model = NanoChat(config)
        # Flex attention computes gradients on CUDA devices only.
        model.flex = torch.device(device).type == "cuda" and attention == "auto"
        self.config, self.model, self.model_config = config, model, asdict(config)
        super().__init__(
            model, rows, context=config.sequence_len, watched=model.blocks, seed=seed, device=device, **given
        )


def _precision(wish: str, on_cuda: bool) -> str:
    """``auto`` is bf16 on a CUDA device that has it, fp16 with loss scaling on another one, and fp32 elsewhere."""
    if wish != "auto":
        return wish
    if not on_cuda:
        return "float32"
    return "bfloat16" if torch.cuda.is_bf16_supported() else "float16"
