"""The sizes of a model that follow from one number, its depth, as nanochat derives them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """The shape of a model, as nanochat derives it from a depth."""

    n_layer: int
    n_head: int
    n_embd: int
    sequence_len: int
    window_pattern: str

    @classmethod
    def of_depth(cls, depth: int, *, aspect_ratio: int, head_dim: int, sequence_len: int, window_pattern: str) -> Sizes:
        """The width is ``depth * aspect_ratio``, rounded up to whole heads. Each head has its own keys and values."""
        heads = -(-depth * aspect_ratio // head_dim)
        return cls(depth, heads, heads * head_dim, sequence_len, window_pattern)
