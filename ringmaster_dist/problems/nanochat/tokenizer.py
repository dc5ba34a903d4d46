"""Byte-level BPE, which encodes any text without loss. Hugging Face's tokenizers trains it and saves it as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIALS = tuple(f"<|reserved_{i}|>" for i in range(4))
BOS = 0  # the id of the first special token, with which every document begins
_LEAST_VOCABULARY = len(SPECIALS) + 256  # a token for each byte
# How GPT splits text before merging, but with runs of at most two digits.
_SPLIT = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"


class BytePairs:
    """The tokenizer of a run."""

    bos = BOS
    identity = ""  # rows keep the file of the tokenizer instead

    def __init__(self, tokenizer: Tokenizer) -> None:
        tokenizer.encode_special_tokens = True  # the name of a special token in a text is ordinary text
        self.own = tokenizer
        self.vocab_size = int(tokenizer.get_vocab_size())

    @classmethod
    def train(cls, documents: Iterable[str], vocab_size: int) -> BytePairs:
        """Raises ValueError if the corpus does not support a vocabulary of that size."""
        if vocab_size < _LEAST_VOCABULARY:
            raise ValueError(f"a vocabulary of {vocab_size} is too small: it needs at least {_LEAST_VOCABULARY}")
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_SPLIT), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=list(SPECIALS),
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        tokenizer.train_from_iterator(documents, trainer)
        found = tokenizer.get_vocab_size()
        if found < vocab_size:
            raise ValueError(f"the corpus supports a vocabulary of {found} only, not of {vocab_size}")
        return cls(tokenizer)

    @classmethod
    def load(cls, path: Path) -> BytePairs:
        return cls(Tokenizer.from_file(str(path)))

    def save(self, path: Path) -> None:
        self.own.save(str(path))

    def encode(self, text: str) -> list[int]:
        return list(self.own.encode(text, add_special_tokens=False).ids)

    def encode_documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The tokens of each text after a BOS. All cores work on it."""
        encodings = self.own.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array([BOS, *encoding.ids], dtype=np.uint16) for encoding in encodings]

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self.own.decode(list(tokens), skip_special_tokens=True))

    def token_bytes(self) -> np.ndarray:
        """The bytes of text that each token stands for, (vocab_size,). A special token stands for none."""
        alphabet = pre_tokenizers.ByteLevel.alphabet()  # one character for each byte
        sizes = np.zeros(self.vocab_size, dtype=np.int64)
        for token, index in self.own.get_vocab().items():
            if token not in SPECIALS:
                assert set(token) <= set(alphabet)
                sizes[index] = len(token)
        return sizes
