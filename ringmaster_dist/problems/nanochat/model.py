"""The NanoChat transformer, as the paper trains it.

It is a decoder without biases and learnable norms. It has rotary positions, normalised queries and keys, sliding
windows, value embeddings on every second layer, squared-ReLU MLPs, learnable residual weights and soft-capped logits.
The parameter names are those of an earlier nanochat. Today's has other parts, so weights cannot be exchanged with it.
`checkout_problem` trains today's.

Shapes in comments: B rows of a batch, T tokens of a row, C channels (n_embd), H heads, K key-value heads, D channels of
a head, V tokens of the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

Mask = torch.Tensor | BlockMask | None

GATE_CHANNELS = 32
_SOFT_CAP = 15.0
_ROTARY_BASE = 10000.0
IGNORED = -1  # a target that does not count


@dataclass(frozen=True)
class NanoChatConfig:
    n_layer: int = 6
    n_head: int = 3
    n_kv_head: int = 3
    n_embd: int = 192
    vocab_size: int = 8192
    sequence_len: int = 2048
    window_pattern: str = "SSSL"  # S: half the context, L: all of it; tiled over the layers, the last is always L

    def __post_init__(self) -> None:
        if self.n_embd % self.n_head or self.n_head % self.n_kv_head:
            raise ValueError(
                f"n_embd={self.n_embd} must be a multiple of n_head={self.n_head}, "
                f"and that of n_kv_head={self.n_kv_head}"
            )
        if (self.n_embd // self.n_head) % 2:
            raise ValueError(f"n_embd/n_head={self.n_embd // self.n_head} must be even: rotary positions turn pairs")
        if self.n_embd < GATE_CHANNELS:
            raise ValueError(f"n_embd={self.n_embd} must be at least {GATE_CHANNELS}")
        if not self.window_pattern or set(self.window_pattern) - set("SL"):
            raise ValueError(f"window_pattern={self.window_pattern!r} must be made of S and L")

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    def window(self, layer: int) -> int:
        """The number of tokens that a position of this layer sees, including its own."""
        if layer == self.n_layer - 1 or self.window_pattern[layer % len(self.window_pattern)] == "L":
            return self.sequence_len
        return max(1, self.sequence_len // 2)

    def has_value_embedding(self, layer: int) -> bool:
        return layer % 2 == (self.n_layer - 1) % 2


def norm(x: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, (x.shape[-1],))


def soft_cap(logits: torch.Tensor) -> torch.Tensor:
    return _SOFT_CAP * torch.tanh(logits / _SOFT_CAP)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates the pairs (first half, second half) of each head. x is (..., T, D); cos and sin are (T, D/2)."""
    first, second = x.chunk(2, dim=-1)  # (..., T, D/2) each
    return torch.cat((first * cos + second * sin, second * cos - first * sin), dim=-1)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask) -> torch.Tensor:
    """Causal attention, (B, H, T, D). q is (B, H, T, D); k and v are (B, K, S, D) with S >= T tokens.

    Without a mask a position sees everything before it, and SDPA takes its flash kernel where the device has one. A
    block mask goes through flex attention, which skips the blocks that no position sees.
    """
    grouped = q.shape[1] != k.shape[1]
    if isinstance(mask, BlockMask):
        y: torch.Tensor = _flex(q.is_cuda)(q.to(v.dtype), k.to(v.dtype), v, block_mask=mask, enable_gqa=grouped)
        return y
    causal = mask is None and q.shape[2] > 1
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped)


@lru_cache(maxsize=2)
def _flex(compiled: bool) -> Callable[..., Any]:
    """Without compilation it computes all scores, seen or not. That is good enough for a test on a CPU."""
    plain: Any = flex_attention
    return torch.compile(plain) if compiled else plain


# Masks are built once for each window and length. Inference mode is off: a cached mask is used for training too.


@lru_cache(maxsize=32)
@torch.inference_mode(mode=False)
def window_mask(time: int, window: int, device: torch.device) -> torch.Tensor:
    """(T, T), True where the row's position may look: at itself and at the ``window - 1`` tokens before it."""
    ages = torch.arange(time, device=device).unsqueeze(1) - torch.arange(time, device=device).unsqueeze(0)  # (T, T)
    return (ages >= 0) & (ages < window)


@lru_cache(maxsize=32)
@torch.inference_mode(mode=False)
def window_blocks(time: int, window: int, device: torch.device) -> BlockMask:
    """The same as a block mask, for flex attention."""

    def seen(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (query >= key) & (query - key < window)

    return create_block_mask(seen, None, None, time, time, device=str(device))


class Attention(nn.Module):
    def __init__(self, config: NanoChatConfig, layer: int) -> None:
        super().__init__()
        self.config = config
        width, kv_width = config.n_embd, config.n_kv_head * config.head_dim
        self.c_q = nn.Linear(width, width, bias=False)
        self.c_k = nn.Linear(width, kv_width, bias=False)
        self.c_v = nn.Linear(width, kv_width, bias=False)
        self.c_proj = nn.Linear(width, width, bias=False)
        if config.has_value_embedding(layer):
            self.ve_gate = nn.Linear(GATE_CHANNELS, config.n_kv_head, bias=False)

    def forward(
        self,
        x: torch.Tensor,
        value_embedding: torch.Tensor | None,
        rotary: tuple[torch.Tensor, torch.Tensor],
        mask: Mask,
    ) -> torch.Tensor:
        """x is (B, T, C), the value embedding (B, T, K * D). Returns (B, T, C)."""
        batch, time, _ = x.shape
        heads, kv_heads, head_dim = self.config.n_head, self.config.n_kv_head, self.config.head_dim
        q = self.c_q(x).view(batch, time, heads, head_dim)  # (B, T, H, D)
        k = self.c_k(x).view(batch, time, kv_heads, head_dim)  # (B, T, K, D)
        v = self.c_v(x).view(batch, time, kv_heads, head_dim)  # (B, T, K, D)
        if value_embedding is not None:
            gate = 2.0 * torch.sigmoid(self.ve_gate(x[..., :GATE_CHANNELS]))  # (B, T, K)
            v = v + gate.unsqueeze(-1) * value_embedding.view(batch, time, kv_heads, head_dim)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (B, H, T, D), and (B, K, T, D) for k and v
        q, k = norm(rotate(q, *rotary)), norm(rotate(k, *rotary))
        y = attend(q, k, v, mask)  # (B, H, T, D)
        return self.c_proj(y.transpose(1, 2).reshape(batch, time, -1))


class MLP(nn.Module):
    def __init__(self, config: NanoChatConfig) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=False)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c_proj(F.relu(self.c_fc(x)).square())  # (B, T, C) -> (B, T, 4 C) -> (B, T, C)


class Block(nn.Module):
    def __init__(self, config: NanoChatConfig, layer: int) -> None:
        super().__init__()
        self.attn = Attention(config, layer)
        self.mlp = MLP(config)

    def forward(
        self,
        x: torch.Tensor,
        value_embedding: torch.Tensor | None,
        rotary: tuple[torch.Tensor, torch.Tensor],
        mask: Mask,
    ) -> torch.Tensor:
        x = x + self.attn(norm(x), value_embedding, rotary, mask)
        return x + self.mlp(norm(x))


class NanoChat(nn.Module):
    """``model(tokens)`` gives logits (B, T, V), ``model(tokens, targets)`` the mean loss. Both arguments are (B, T)."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, config: NanoChatConfig) -> None:
        super().__init__()
        self.config = config
        width, layers = config.n_embd, range(config.n_layer)
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.vocab_size, width),
                "h": nn.ModuleList(Block(config, layer) for layer in layers),
            }
        )
        self.lm_head = nn.Linear(width, config.vocab_size, bias=False)
        kv_width = config.n_kv_head * config.head_dim
        self.value_embeds = nn.ModuleDict(
            {str(i): nn.Embedding(config.vocab_size, kv_width) for i in layers if config.has_value_embedding(i)}
        )
        self.resid_lambdas = nn.Parameter(torch.ones(config.n_layer))  # (layers,)
        self.x0_lambdas = nn.Parameter(torch.full((config.n_layer,), 0.1))
        cos, sin = _rotary_table(config)  # (sequence_len, D/2) each
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.flex = False  # whether windowed layers go through flex attention
        self.reset_parameters()

    @property
    def blocks(self) -> list[nn.Module]:
        return list(self.get_submodule("transformer.h").children())

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """All initialisation is here."""
        bound = math.sqrt(3.0) / math.sqrt(self.config.n_embd)
        nn.init.normal_(self.transformer["wte"].weight, std=1.0)
        nn.init.normal_(self.lm_head.weight, std=0.001)
        for block in self.transformer["h"]:
            for matrix in (block.attn.c_q, block.attn.c_k, block.attn.c_v, block.mlp.c_fc):
                nn.init.uniform_(matrix.weight, -bound, bound)
            nn.init.zeros_(block.attn.c_proj.weight)
            nn.init.zeros_(block.mlp.c_proj.weight)
            if hasattr(block.attn, "ve_gate"):
                nn.init.zeros_(block.attn.ve_gate.weight)
        for embedding in self.value_embeds.values():
            nn.init.uniform_(embedding.weight, -bound, bound)
        nn.init.ones_(self.resid_lambdas)
        nn.init.constant_(self.x0_lambdas, 0.1)

    def forward(
        self, tokens: torch.Tensor, targets: torch.Tensor | None = None, reduction: str = "mean"
    ) -> torch.Tensor:
        logits = self.lm_head(self._hidden(tokens))  # (B, T, V)
        if logits.dtype != torch.float64:
            logits = logits.float()
        logits = soft_cap(logits)
        if targets is None:
            return logits
        return F.cross_entropy(
            logits.view(-1, logits.shape[-1]), targets.reshape(-1), ignore_index=IGNORED, reduction=reduction
        )

    def _hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        """(B, T, C)"""
        time = tokens.shape[1]
        if time > self.config.sequence_len:
            raise ValueError(f"{time} tokens do not fit the model's context of {self.config.sequence_len}")
        rotary = self.cos[:time], self.sin[:time]  # (T, D/2) each
        x0 = x = norm(self.transformer["wte"](tokens))  # (B, T, C)
        keep, again = self.resid_lambdas.unbind(), self.x0_lambdas.unbind()
        for i, block in enumerate(self.blocks):
            x = keep[i] * x + again[i] * x0
            embedding = self.value_embeds[str(i)](tokens) if self.config.has_value_embedding(i) else None
            x = block(x, embedding, rotary, self._mask(i, time))
        return norm(x)

    def _mask(self, layer: int, time: int) -> Mask:
        """What each position may look at, (T, T), or None for everything before it."""
        window = self.config.window(layer)
        if time <= window:
            return None
        if self.flex:
            return window_blocks(time, window, self.cos.device)
        return window_mask(self.config.sequence_len, window, self.cos.device)[:time, :time]


def _rotary_table(config: NanoChatConfig) -> tuple[torch.Tensor, torch.Tensor]:
    channels = torch.arange(0, config.head_dim, 2, dtype=torch.float64)
    frequencies = _ROTARY_BASE ** (-channels / config.head_dim)
    angles = torch.outer(torch.arange(config.sequence_len, dtype=torch.float64), frequencies)
    return angles.cos().float(), angles.sin().float()
