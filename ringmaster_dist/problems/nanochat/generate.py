"""Text from a model: one token after the other, with keys and values kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ringmaster_dist.problems.nanochat.model import Cache, NanoChat


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
    weight = model.lm_head.weight
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    cache = Cache(model.config, 1, weight) if cached else None
    pending = tokens  # what the model has not seen yet
    for _ in range(min(count, model.config.sequence_len - len(tokens))):
        logits = model(torch.tensor([pending], device=weight.device), cache=cache)[0, -1]
        token = _choose(logits.float().cpu(), temperature, top_k, generator)
        yield token
        tokens.append(token)
        pending = [token] if cached else tokens


def _choose(logits: torch.Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    if temperature == 0.0:
        return int(logits.argmax())
    kept, tokens = torch.topk(logits, min(top_k or len(logits), len(logits)))
    return int(tokens[torch.multinomial(torch.softmax(kept / temperature, dim=-1), 1, generator=generator)])
