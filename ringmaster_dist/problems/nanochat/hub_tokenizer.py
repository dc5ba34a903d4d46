"""A tokenizer as the file tokenizer.json, which Hugging Face's tokenizers loads.

Our own tokenizer is one already. nanochat's is an encoding of tiktoken: tokens with ranks, a pattern that splits text
into words, and special tokens. Both merge the pair with the lowest rank first, so the merges follow from the ranks.
"""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from ringmaster_dist.errors import Mistake
from ringmaster_dist.problems.nanochat.checkout import CheckoutTokenizer
from ringmaster_dist.problems.nanochat.tokenizer import BytePairs

_NOT_WRITTEN = "the checkout's tokenizer cannot be written as tokenizer.json"
_ENCODING = ("_mergeable_ranks", "_pat_str", "_special_tokens")  # attributes of a tiktoken encoding


def hub_tokenizer(tokenizer: Any) -> Tokenizer:
    """Raises Mistake if the checkout's tokenizer is of a kind that is not known here."""
    if isinstance(tokenizer, BytePairs):
        return tokenizer.own
    assert isinstance(tokenizer, CheckoutTokenizer)
    if isinstance(found := getattr(tokenizer.own, "tokenizer", None), Tokenizer):
        return found
    encoding = getattr(tokenizer.own, "enc", None)
    missing = [name for name in _ENCODING if not hasattr(encoding, name)]
    if missing:
        raise Mistake(
            f"the checkout's tokenizer cannot be written as tokenizer.json: its encoding has no {missing[0]!r}"
        )
    return _from_ranks(*(getattr(encoding, name) for name in _ENCODING))


def _from_ranks(ranks: dict[bytes, int], pattern: str, specials: dict[str, int]) -> Tokenizer:
    letters = _letters()
    spelled = {token: "".join(letters[byte] for byte in token) for token in ranks}
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        if len(token) > 1:
            first, second = _halves(token, ranks)
            merges.append((spelled[first], spelled[second]))
    vocabulary = {spelled[token]: rank for token, rank in ranks.items()}
    tokenizer = Tokenizer(models.BPE(vocab={**vocabulary, **specials}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(name, special=True) for name in sorted(specials, key=specials.__getitem__)]
    )
    return tokenizer


def _halves(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    """The two tokens whose merge made this one: what is left when only merges of lower rank are applied to it."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        pairs = [(ranks.get(parts[i] + parts[i + 1], len(ranks)), i) for i in range(len(parts) - 1)]
        rank, at = min(pairs)
        if rank >= ranks[token]:
            raise Mistake(f"{_NOT_WRITTEN}: no merges make {token!r}")
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts[0], parts[1]


def _letters() -> list[str]:
    """The printable character that stands for each byte in tokenizer.json, as GPT-2 chose them.

    A printable byte of Latin-1 stands for itself. The others get the characters from 256 on, in their order.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
