"""Text from a model: one token after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from ringmaster_dist.problems.nanochat.decoder import Decoder
from ringmaster_dist.problems.nanochat.model import NanoChat


@torch.inference_mode()
def generate(
    model: NanoChat,
    prompt: Sequence[int],
    count: int,
    *,
    temperature: float = 0.8,
    top_k: int | None = 50,
    seed: int = 0,
    cached: bool = True,
) -> Iterator[int]:
    """Up to ``count`` tokens after the prompt; fewer where the context is full. Temperature 0 takes the likeliest."""
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    after = Decoder(model) if cached else _from_the_start(model)
    pending = list(prompt)  # what the model has not seen yet
    for _ in range(min(count, model.config.sequence_len - len(prompt))):
        token = _choose(after(pending).cpu(), temperature, top_k, generator)
        yield token
        pending = [token]


def _from_the_start(model: NanoChat) -> Callable[[Sequence[int]], torch.Tensor]:
    """As a decoder, with nothing kept but the tokens."""
    seen: list[int] = []

    def after(tokens: Sequence[int]) -> torch.Tensor:
        seen.extend(tokens)
        logits: torch.Tensor = model(torch.tensor([seen], device=model.lm_head.weight.device))[0, -1]
        return logits.float()

    return after


def _choose(logits: torch.Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    if temperature == 0.0:
        return int(logits.argmax())
    kept, tokens = torch.topk(logits, min(top_k or len(logits), len(logits)))
    return int(tokens[torch.multinomial(torch.softmax(kept / temperature, dim=-1), 1, generator=generator)])
