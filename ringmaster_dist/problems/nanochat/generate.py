"""Text from a model, one token after the other.

`Decoder` keeps the keys and values of all tokens so far (a KV cache). For a single token, calls cost more than
arithmetic, and the arithmetic is reading weights. So there are few calls: queries, keys and values come from one
product, and a product adds its result in place. The weights are stored transposed, which is the order in which a
product with a single row reads them.

Shapes in comments are those of `model`, for one row (B = 1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F

from ringmaster_dist.problems.nanochat.model import (
    GATE_CHANNELS,
    NanoChat,
    attend,
    norm,
    rotate,
    soft_cap,
    window_mask,
)
from ringmaster_dist.problems.nanochat.problem import TextProblem

# Takes the next tokens of a text, and gives the logits, (V,), after the last of them.
NextLogits = Callable[[Sequence[int]], torch.Tensor]


class Reader:
    """Reads a text of any length, token by token, with a model whose context is limited.

    When the context is full, the newer half of it is read again from its beginning, and the older half is forgotten.
    """

    def __init__(self, make: Callable[[], NextLogits], context: int) -> None:
        """``make`` gives a function that has read nothing yet."""
        self._make, self._context = make, context
        self._read, self._seen = make(), list[int]()

    def __call__(self, tokens: Sequence[int]) -> torch.Tensor:
        """The logits, (V,), after the last of these tokens and all tokens of earlier calls."""
        self._seen.extend(tokens)
        if len(self._seen) <= self._context:
            return self._read(tokens)
        self._seen = self._seen[-max(1, self._context // 2) :]
        self._read = self._make()
        return self._read(self._seen)


def reader_of(problem: TextProblem, *, cached: bool = True) -> Reader:
    """A reader with the weights that the problem has now. Only the paper's model has a cache."""
    problem.module.eval()
    if cached and isinstance(problem.module, NanoChat):
        return Reader(partial(Decoder, problem.module), problem.context)
    return Reader(partial(_without_cache, problem.logits, problem.device), problem.context)


def reader_of_model(model: NanoChat, *, cached: bool = True) -> Reader:
    model.eval()
    make: Callable[[], NextLogits] = partial(Decoder, model)
    if not cached:
        make = partial(_without_cache, model, model.lm_head.weight.device)
    return Reader(make, model.config.sequence_len)


@torch.inference_mode()
def generate(
    reader: NextLogits,
    prompt: Sequence[int],
    count: int,
    *,
    temperature: float = 0.8,
    top_k: int | None = 50,
    seed: int = 0,
) -> Iterator[int]:
    """``count`` tokens after the prompt. Temperature 0 takes the likeliest."""
    generator = torch.Generator().manual_seed(seed)
    pending = list(prompt)  # what the model has not seen yet
    for _ in range(count):
        token = _choose(reader(pending).cpu(), temperature, top_k, generator)
        yield token
        pending = [token]


def _without_cache(logits: Callable[[torch.Tensor], torch.Tensor], device: torch.device) -> NextLogits:
    """The same as a decoder, but it computes all tokens again at each call."""
    seen: list[int] = []

    def logits_after(tokens: Sequence[int]) -> torch.Tensor:
        seen.extend(tokens)
        return logits(torch.tensor([seen], device=device))[0, -1].float()  # (V,)

    return logits_after


def _choose(logits: torch.Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    """Draws a token. The logits are (V,)."""
    if temperature == 0.0:
        return int(logits.argmax())
    kept, tokens = torch.topk(logits, min(top_k or len(logits), len(logits)))
    return int(tokens[torch.multinomial(torch.softmax(kept / temperature, dim=-1), 1, generator=generator)])


class Decoder:
    """``decoder(tokens)`` gives the logits, (V,), after the last of these tokens and all tokens of earlier calls."""

    def __init__(self, model: NanoChat) -> None:
        self._config = config = model.config
        weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
        self._layers = [_Layer(weights, i) for i in range(config.n_layer)]
        self._embedding = weights["transformer.wte.weight"]  # (V, C)
        self._output = _transposed(weights["lm_head.weight"])  # (C, V)
        self._lambdas = list(zip(model.resid_lambdas.tolist(), model.x0_lambdas.tolist(), strict=True))
        self._rotary = model.cos, model.sin
        # (layers, keys and values, 1, K, sequence_len, D)
        kept = self._output.new_zeros(config.n_layer, 2, 1, config.n_kv_head, config.sequence_len, config.head_dim)
        self._kept = [(keys, values) for keys, values in kept]
        self._length = 0

    def __call__(self, tokens: Sequence[int]) -> torch.Tensor:
        config, start = self._config, self._length
        stop = self._length = start + len(tokens)
        if stop > config.sequence_len:
            raise ValueError(f"{stop} tokens do not fit the model's context of {config.sequence_len}")
        heads, kv_heads, time = config.n_head, config.n_kv_head, len(tokens)
        rows = torch.tensor(tokens, device=self._output.device)  # (T,)
        cos, sin = (table[start:stop] for table in self._rotary)  # (T, D/2) each
        x0 = x = norm(F.embedding(rows, self._embedding))  # (T, C)
        for index, layer in enumerate(self._layers):
            keep, again = self._lambdas[index]
            x = torch.add(x * keep, x0, alpha=again)
            h = norm(x)  # (T, C)
            # (1, H + 2 K, T, D)
            joined = (h @ layer.qkv).view(1, time, heads + 2 * kv_heads, config.head_dim).transpose(1, 2)
            turned, v = norm(rotate(joined[:, :-kv_heads], cos, sin)), joined[:, -kv_heads:]
            if layer.gate is not None and layer.values is not None:
                gate = torch.sigmoid(h[:, :GATE_CHANNELS] @ layer.gate).mul_(2.0)  # (T, K)
                embedding = F.embedding(rows, layer.values).view(1, time, kv_heads, -1).transpose(1, 2)  # (1, K, T, D)
                v = torch.addcmul(v, gate.t().unsqueeze(-1), embedding)
            keys, values = self._kept[index]  # (1, K, sequence_len, D) each
            keys[:, :, start:stop], values[:, :, start:stop] = turned[:, heads:], v
            y = attend(turned[:, :heads], keys[:, :, :stop], values[:, :, :stop], self._mask(index, start, stop))
            x = torch.addmm(x, y.transpose(1, 2).reshape(time, -1), layer.projection)
            x = torch.addmm(x, torch.relu_(norm(x) @ layer.up).square_(), layer.down)
        return soft_cap((norm(x[-1:]) @ self._output)[0].float())

    def _mask(self, layer: int, start: int, stop: int) -> torch.Tensor | None:
        """What the new positions may look at, (T, stop), or None for everything before them."""
        window = self._config.window(layer)
        if stop <= window and (start == 0 or stop - start == 1):
            return None
        return window_mask(self._config.sequence_len, window, self._output.device)[start:stop, :stop]


class _Layer:
    """The weights of a block, transposed."""

    def __init__(self, weights: dict[str, torch.Tensor], layer: int) -> None:
        attention, mlp = (f"transformer.h.{layer}.{part}" for part in ("attn", "mlp"))
        # (C, (H + 2 K) D)
        self.qkv = _transposed(torch.cat([weights[f"{attention}.c_{part}.weight"] for part in "qkv"]))
        self.projection = _transposed(weights[f"{attention}.c_proj.weight"])  # (C, C)
        self.up, self.down = (_transposed(weights[f"{mlp}.{part}.weight"]) for part in ("c_fc", "c_proj"))
        gate = weights.get(f"{attention}.ve_gate.weight")
        self.gate = None if gate is None else _transposed(gate)  # (GATE_CHANNELS, K)
        self.values = weights.get(f"value_embeds.{layer}.weight")  # (V, K D)


def _transposed(weight: torch.Tensor) -> torch.Tensor:
    return weight.t().contiguous()
