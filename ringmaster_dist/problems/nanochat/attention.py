"""Causal attention through a sliding window, two ways: SDPA with a mask, and flex attention with a block mask.

A window of w sees the current and the w - 1 previous tokens. A layer whose window is the whole context needs no mask:
SDPA takes its flash kernel then, where the device has one. A windowed layer on a GPU goes through flex attention, which
skips the blocks that nobody sees. Masks are built once for each window and length.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | BlockMask | None) -> torch.Tensor:
    """q: (batch, heads, time, head_dim), k and v with as many heads or fewer. No mask: everything before."""
    grouped = q.shape[1] != k.shape[1]
    if isinstance(mask, BlockMask):
        y: torch.Tensor = _flex(q.is_cuda)(q.to(v.dtype), k.to(v.dtype), v, block_mask=mask, enable_gqa=grouped)
        return y
    causal = mask is None and q.shape[2] > 1
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped)


@lru_cache(maxsize=2)
def _flex(compiled: bool) -> Callable[..., Any]:
    """Without compilation it computes all scores, seen or not: good for a test on a CPU."""
    plain: Any = flex_attention
    return torch.compile(plain) if compiled else plain


@lru_cache(maxsize=32)
@torch.inference_mode(mode=False)  # kept, and used for training too, whoever asks first
def window_mask(time: int, window: int, device: torch.device) -> torch.Tensor:
    """True where the row's position may look."""
    ages = torch.arange(time, device=device).unsqueeze(1) - torch.arange(time, device=device).unsqueeze(0)
    return (ages >= 0) & (ages < window)


@lru_cache(maxsize=32)
@torch.inference_mode(mode=False)
def window_blocks(time: int, window: int, device: torch.device) -> BlockMask:
    def seen(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (query >= key) & (query - key < window)

    return create_block_mask(seen, None, None, time, time, device=str(device))
