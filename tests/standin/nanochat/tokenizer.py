"""A byte-pair tokenizer by ranks. Its ``enc`` has the attributes of a tiktoken encoding."""

import json
import os
import re
from types import SimpleNamespace

import torch

from nanochat.common import get_base_dir

SPECIALS = ("<|bos|>", "<|user_start|>", "<|user_end|>")


class Tokenizer:
    def __init__(self, ranks, pattern):
        """``ranks`` gives the rank of each token, which is its number; it begins with the 256 bytes."""
        specials = {name: len(ranks) + i for i, name in enumerate(SPECIALS)}
        self.enc = SimpleNamespace(_mergeable_ranks=ranks, _pat_str=pattern, _special_tokens=specials)
        self._texts = {rank: token for token, rank in ranks.items()}

    def get_vocab_size(self):
        return len(self.enc._mergeable_ranks) + len(SPECIALS)

    def get_bos_token_id(self):
        return self.enc._special_tokens["<|bos|>"]

    def encode(self, text, prepend=None):
        if isinstance(text, list):
            return [self.encode(one, prepend) for one in text]
        words = re.findall(self.enc._pat_str, text)
        return [] if not text and prepend is None else [
            *([] if prepend is None else [prepend]), *(t for word in words for t in self._merged(word.encode()))
        ]  # fmt: skip

    def _merged(self, word):
        parts, ranks = [word[i : i + 1] for i in range(len(word))], self.enc._mergeable_ranks
        while len(parts) > 1:
            rank, at = min((ranks.get(parts[i] + parts[i + 1], 1 << 30), i) for i in range(len(parts) - 1))
            if rank == 1 << 30:
                break
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        return [ranks[part] for part in parts]

    def decode(self, ids):
        return b"".join(self._texts.get(i, b"") for i in ids).decode(errors="replace")


def _folder():
    return os.path.join(get_base_dir(), "tokenizer")


def get_tokenizer():
    with open(os.path.join(_folder(), "ranks.json")) as file:
        saved = json.load(file)
    return Tokenizer({bytes.fromhex(token): i for i, token in enumerate(saved["tokens"])}, saved["pattern"])


def get_token_bytes(device="cpu"):
    return torch.load(os.path.join(_folder(), "token_bytes.pt"), map_location=device)
