"""Rows of tokens on disk. They are made once from a corpus, and memory-mapped afterwards.

Documents are packed best-fit into rows of ``context + 1`` tokens without padding. A row takes the longest buffered
document that fits. If none fits, the shortest is cropped to fill the row exactly. A prepared corpus is a folder, which
is renamed into its place when it is complete. The folder's name is a fingerprint of the sources, and its manifest has a
fingerprint of the rows. The texts are streamed, so a corpus may be larger than the memory.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import math
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from ringmaster_dist import randomness
from ringmaster_dist.files import sha256_of, to_disk
from ringmaster_dist.problems.nanochat.corpus import CorpusError, Progress, Source, documents
from ringmaster_dist.problems.nanochat.tokenizer import BytePairs

_FORMAT = 1
_BUFFERED_DOCUMENTS = 1000
_DOCUMENTS_PER_BATCH = 512
_VALIDATION_EVERY = 20  # a corpus without validation files validates on one document in this many
_STREAM_BITS = 40  # a stream has this many draws, as a power of two
_TRAINING_CHARACTERS = 16_000_000  # the tokenizer is trained on the first so many


def pack(stream: Iterable[np.ndarray], length: int) -> Iterator[np.ndarray]:
    """Rows of exactly ``length`` tokens, uint16. Documents that fill no row at the end are dropped."""
    source = iter(stream)
    sizes: list[int] = []  # sorted
    buffered: list[np.ndarray] = []  # the documents in the same order

    def refill() -> None:
        for document in islice(source, _BUFFERED_DOCUMENTS - len(buffered)):
            place = bisect.bisect_left(sizes, len(document))
            sizes.insert(place, len(document))
            buffered.insert(place, document)

    refill()
    while buffered:
        row = np.empty(length, dtype=np.uint16)
        filled = 0
        while filled < length:
            place = bisect.bisect_right(sizes, length - filled) - 1  # the longest that fits
            if place >= 0:
                document = buffered.pop(place)
                sizes.pop(place)
            elif buffered:
                document = buffered.pop(0)[: length - filled]
                sizes.pop(0)
            else:
                return
            row[filled : filled + len(document)] = document
            filled += len(document)
            if len(buffered) < _BUFFERED_DOCUMENTS // 2:
                refill()
        yield row


class Rows:
    """A prepared corpus. Rows are drawn with replacement, and a draw needs no state."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
        length = self.manifest["context"] + 1
        self.train, self.validation = (  # (rows, context + 1) each
            np.memmap(folder / f"{name}.bin", dtype=np.uint16, mode="r").reshape(-1, length)
            for name in ("train", "validation")
        )
        self.token_bytes = np.array(self.manifest["token_bytes"])  # (vocab_size,)

    @property
    def fingerprint(self) -> str:
        return str(self.manifest["fingerprint"])

    def tokenizer(self) -> BytePairs:
        return BytePairs.load(self.folder / "tokenizer.json")

    def sample(self, seed: int, worker_id: int, sequence: int, count: int, stream: int = 0) -> np.ndarray:
        """Training rows, (count, context + 1). They are a function of the arguments alone."""
        key = randomness.worker_key(seed, randomness.STREAM_BATCH, worker_id)
        first = (stream << _STREAM_BITS) + sequence * count
        indices = [(randomness.bits(key, first + i) * len(self.train)) >> 64 for i in range(count)]
        return self.train[indices]


def prepare(
    sources: Sequence[Source],
    *,
    vocab_size: int,
    context: int,
    cache: Path,
    crop: bool = False,
    progress: Progress = lambda fraction, text: None,
) -> Rows:
    """Tokenizes and packs, unless that was done before. It may be interrupted, and several processes may call it.

    A document longer than a row is cut into several. With ``crop`` only its beginning is used, as in the paper.
    """
    contents = [(source.name, source.validation, source.sha256 or sha256_of(source.path)) for source in sources]
    recipe = json.dumps([_FORMAT, vocab_size, context, crop, contents])
    folder = cache / hashlib.sha256(recipe.encode()).hexdigest()[:16]
    if (folder / "manifest.json").exists():
        return Rows(folder)
    cache.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=cache, prefix=f".{folder.name}-"))
    try:
        temporary.chmod(0o755)  # other users may read the prepared corpus
        _write(temporary, sources, vocab_size, context, crop, progress)
        for path in (*temporary.iterdir(), temporary):
            to_disk(path)
        try:
            temporary.rename(folder)
        except OSError:
            if not (folder / "manifest.json").exists():  # otherwise another process was faster, with the same rows
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Rows(folder)


def _write(
    folder: Path, sources: Sequence[Source], vocab_size: int, context: int, crop: bool, progress: Progress
) -> None:
    parts = _Parts(sources)
    if not parts.counts["train"]:
        raise CorpusError("the corpus is empty")
    progress(0.05, "training the tokenizer")
    try:
        tokenizer = BytePairs.train(_first(parts.texts("train"), _TRAINING_CHARACTERS), vocab_size)
    except ValueError as error:
        raise CorpusError(f"model.vocab_size={vocab_size}: {error}") from error
    tokenizer.save(folder / "tokenizer.json")
    digest, counts = hashlib.sha256((folder / "tokenizer.json").read_bytes()), {}
    for name in ("train", "validation"):
        count = 0
        with (folder / f"{name}.bin").open("wb") as file:
            tokens = _tokens(parts, name, tokenizer, progress)
            for row in pack(tokens if crop else _cut(tokens, context + 1), context + 1):
                file.write(row.tobytes())
                digest.update(row.tobytes())
                count += 1
        if count == 0:
            raise CorpusError(f"the corpus is too small: its {name} part does not fill one row of {context + 1} tokens")
        counts[name] = count
    manifest = {
        "fingerprint": digest.hexdigest()[:16],
        "context": context,
        "vocab_size": vocab_size,
        "rows": counts,
        "token_bytes": tokenizer.token_bytes().tolist(),
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))


class _Parts:
    """The documents for training and for validation, read from the sources each time they are asked for."""

    def __init__(self, sources: Sequence[Source]) -> None:
        """Reads every source once, so that a bad one is reported before any work is done."""
        self._sources = sources
        counts = Counter(source.validation for source in sources for _ in documents(source))
        self.counts = {"train": counts[False], "validation": counts[True]}
        self._shares_sources = not counts[True] and counts[False] > 1
        if self._shares_sources:
            held_out = math.ceil(counts[False] / _VALIDATION_EVERY)
            self.counts = {"train": counts[False] - held_out, "validation": held_out}

    def texts(self, name: str) -> Iterator[str]:
        if not self._shares_sources:
            yield from self._documents(validation=name == "validation")
            return
        for i, text in enumerate(self._documents(validation=False)):
            if (i % _VALIDATION_EVERY == 0) == (name == "validation"):
                yield text

    def _documents(self, *, validation: bool) -> Iterator[str]:
        for source in self._sources:
            if source.validation == validation:
                yield from documents(source)


def _tokens(parts: _Parts, name: str, tokenizer: BytePairs, progress: Progress) -> Iterator[np.ndarray]:
    texts, done = parts.texts(name), 0
    while batch := list(islice(texts, _DOCUMENTS_PER_BATCH)):
        progress(0.3 + 0.7 * done / parts.counts[name], f"tokenizing and packing the {name} part")
        yield from tokenizer.encode_documents(batch)
        done += len(batch)


def _cut(stream: Iterable[np.ndarray], length: int) -> Iterator[np.ndarray]:
    for document in stream:
        for start in range(0, len(document), length):
            yield document[start : start + length]


def _first(texts: Iterable[str], size: int) -> Iterator[str]:
    for text in texts:
        if size <= 0:
            return
        size -= len(text)
        yield text
