"""The NanoChat model, its tokenizer and its data."""

from ringmaster_dist.problems.nanochat.model import NanoChat, NanoChatConfig

__all__ = ["NanoChat", "NanoChatConfig"]
