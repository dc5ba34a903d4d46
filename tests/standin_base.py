"""Makes the data folder of the stand-in for nanochat: shards of text, and a tokenizer that was trained on them."""

import json
import re
from collections import Counter
from pathlib import Path

import pyarrow
import pyarrow.parquet
import torch

CHECKOUT = Path(__file__).parent / "standin"
PATTERN = r"\s?\w+|\s+|[^\w\s]+"
_NUM_MERGES, _NUM_SPECIALS = 61, 3
TEXTS = [f"def function_{i}(value):\n    return value + {i} * {i * 7919 % 1000}\n" * (1 + i % 5) for i in range(600)]


def merged_tokens(texts, count):
    """Returns the 256 bytes and ``count`` tokens that the most frequent pairs make, in the order of their ranks."""
    words = Counter(word for text in texts for word in re.findall(PATTERN, text))
    split = {word: [bytes([b]) for b in word.encode()] for word in words}
    tokens = [bytes([b]) for b in range(256)]
    for _ in range(count):
        pairs = Counter()
        for word, number in words.items():
            for pair in zip(split[word], split[word][1:], strict=False):
                pairs[pair] += number
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        tokens.append(best[0] + best[1])
        for parts in split.values():
            at = 0
            while at < len(parts) - 1:
                if (parts[at], parts[at + 1]) == best:
                    parts[at : at + 2] = [best[0] + best[1]]
                at += 1
    return tokens


def make_base(folder, num_shards=3, texts=TEXTS):
    """Writes shards and tokenizer, and returns the folder."""
    (folder / "base_data").mkdir(parents=True)
    (folder / "tokenizer").mkdir()
    for i in range(num_shards):
        table = pyarrow.table({"text": texts[i::num_shards]})
        pyarrow.parquet.write_table(table, folder / "base_data" / f"shard_{i:05d}.parquet")
    tokens = merged_tokens(texts[:50], _NUM_MERGES)
    saved = {"pattern": PATTERN, "tokens": [token.hex() for token in tokens]}
    (folder / "tokenizer" / "ranks.json").write_text(json.dumps(saved))
    sizes = [*map(len, tokens), *([0] * _NUM_SPECIALS)]
    torch.save(torch.tensor(sizes, dtype=torch.int32), folder / "tokenizer" / "token_bytes.pt")
    return folder
