"""The model for generation: a few tokens at a time, after those it has seen.

For a single token calls cost more than arithmetic, and the arithmetic is reading weights. So there are few calls: the
weights of queries, keys and values are joined, products add to what they are added to. And weights lie transposed, in
the order in which a product with a single row reads them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from ringmaster_dist.problems.nanochat.attention import attend, window_mask
from ringmaster_dist.problems.nanochat.model import GATE_CHANNELS, NanoChat, norm, rotate, soft_cap


class Decoder:
    """``decoder(tokens)`` gives the logits after the last of them. Keeps keys and values of all tokens so far."""

    def __init__(self, model: NanoChat) -> None:
        self._config = config = model.config
        weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
        self._layers = [_Layer(weights, i) for i in range(config.n_layer)]
        self._embedding, self._output = weights["transformer.wte.weight"], _transposed(weights["lm_head.weight"])
        self._lambdas = list(zip(model.resid_lambdas.tolist(), model.x0_lambdas.tolist(), strict=True))
        self._rotary = model.cos, model.sin
        kept = self._output.new_zeros(config.n_layer, 2, 1, config.n_kv_head, config.sequence_len, config.head_dim)
        self._kept = [(keys, values) for keys, values in kept]
        self._length = 0

    def __call__(self, tokens: Sequence[int]) -> torch.Tensor:
        config, start = self._config, self._length
        stop = self._length = start + len(tokens)
        if stop > config.sequence_len:
            raise ValueError(f"{stop} tokens do not fit the model's context of {config.sequence_len}")
        heads, kv_heads, time = config.n_head, config.n_kv_head, len(tokens)
        rows = torch.tensor(tokens, device=self._output.device)
        cos, sin = (table[start:stop] for table in self._rotary)
        x0 = x = norm(F.embedding(rows, self._embedding))  # (time, width)
        for index, layer in enumerate(self._layers):
            keep, again = self._lambdas[index]
            x = torch.add(x * keep, x0, alpha=again)
            h = norm(x)
            joined = (h @ layer.qkv).view(1, time, heads + 2 * kv_heads, config.head_dim).transpose(1, 2)
            turned, v = norm(rotate(joined[:, :-kv_heads], cos, sin)), joined[:, -kv_heads:]
            if layer.gate is not None and layer.values is not None:
                gate = torch.sigmoid(h[:, :GATE_CHANNELS] @ layer.gate).mul_(2.0)  # (time, kv_heads)
                embedding = F.embedding(rows, layer.values).view(1, time, kv_heads, -1).transpose(1, 2)
                v = torch.addcmul(v, gate.t().unsqueeze(-1), embedding)
            keys, values = self._kept[index]
            keys[:, :, start:stop], values[:, :, start:stop] = turned[:, heads:], v
            y = attend(turned[:, :heads], keys[:, :, :stop], values[:, :, :stop], self._mask(index, start, stop))
            x = torch.addmm(x, y.transpose(1, 2).reshape(time, -1), layer.projection)
            x = torch.addmm(x, torch.relu_(norm(x) @ layer.up).square_(), layer.down)
        return soft_cap((norm(x[-1:]) @ self._output)[0].float())

    def _mask(self, layer: int, start: int, stop: int) -> torch.Tensor | None:
        """What the new positions may look at; None: everything before them."""
        window = self._config.window(layer)
        if stop <= window and (start == 0 or stop - start == 1):
            return None
        return window_mask(self._config.sequence_len, window, self._output.device)[start:stop, :stop]


class _Layer:
    """The weights of a block as they are used."""

    def __init__(self, weights: dict[str, torch.Tensor], layer: int) -> None:
        attention, mlp = (f"transformer.h.{layer}.{part}" for part in ("attn", "mlp"))
        self.qkv = _transposed(torch.cat([weights[f"{attention}.c_{part}.weight"] for part in "qkv"]))
        self.projection = _transposed(weights[f"{attention}.c_proj.weight"])
        self.up, self.down = (_transposed(weights[f"{mlp}.{part}.weight"]) for part in ("c_fc", "c_proj"))
        gate = weights.get(f"{attention}.ve_gate.weight")
        self.gate = None if gate is None else _transposed(gate)
        self.values = weights.get(f"value_embeds.{layer}.weight")


def _transposed(weight: torch.Tensor) -> torch.Tensor:
    return weight.t().contiguous()
