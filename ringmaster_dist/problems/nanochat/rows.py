"""Rows of tokens on disk, made once and memory-mapped.

Documents are packed best-fit into rows of ``context + 1`` tokens without padding: a row takes the longest buffered
document that fits; when none fits, the shortest is cropped to fill it exactly. A prepared corpus is a folder that
appears whole or not at all; its name is a fingerprint of what it was made from, its manifest has one of what is in it.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from ringmaster_dist import randomness
from ringmaster_dist.files import sha256_of, to_disk
from ringmaster_dist.problems.nanochat.corpus import CorpusError, Source, documents
from ringmaster_dist.problems.nanochat.tokenizer import BytePairs

_FORMAT = 1
_BUFFERED_DOCUMENTS = 1000
_DOCUMENTS_PER_BATCH = 512
_TRAINING_BYTES = 16_000_000  # of text the tokenizer learns from

Progress = Callable[[float, str], None]


def pack(stream: Iterable[np.ndarray], length: int) -> Iterator[np.ndarray]:
    """Rows of exactly ``length`` tokens; what is left in the end and fills no row is dropped."""
    source = iter(stream)
    sizes: list[int] = []  # sorted, with the documents beside
    buffered: list[np.ndarray] = []

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
    """A prepared corpus. Rows are drawn, with replacement, by a generator that needs no state."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
        length = self.manifest["context"] + 1
        self.train, self.validation = (
            np.memmap(folder / f"{name}.bin", dtype=np.uint16, mode="r").reshape(-1, length)
            for name in ("train", "validation")
        )
        self.token_bytes = np.array(self.manifest["token_bytes"])

    @property
    def fingerprint(self) -> str:
        return str(self.manifest["fingerprint"])

    def tokenizer(self) -> BytePairs:
        return BytePairs.load(self.folder / "tokenizer.json")

    def sample(self, seed: int, worker_id: int, sequence: int, count: int) -> np.ndarray:
        """``count`` training rows: a function of the arguments alone."""
        key = randomness.worker_key(seed, randomness.STREAM_BATCH, worker_id)
        first = sequence * count
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
    """Tokenizes and packs, unless that has been done before. Safe to interrupt; several processes may try at once.

    A document longer than a row is cut into several; with ``crop`` only its beginning is used, as with the paper's.
    """
    contents = [(source.name, source.validation, sha256_of(source.path)) for source in sources]
    recipe = json.dumps([_FORMAT, vocab_size, context, crop, contents])
    folder = cache / hashlib.sha256(recipe.encode()).hexdigest()[:16]
    if (folder / "manifest.json").exists():
        return Rows(folder)
    cache.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=cache, prefix=f".{folder.name}-"))
    try:
        temporary.chmod(0o755)  # others may use what is prepared here
        _write(temporary, sources, vocab_size, context, crop, progress)
        for path in (*temporary.iterdir(), temporary):
            to_disk(path)
        try:
            temporary.rename(folder)
        except OSError:
            if not (folder / "manifest.json").exists():  # else another process was quicker: its rows are the same
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Rows(folder)


def _write(
    folder: Path, sources: Sequence[Source], vocab_size: int, context: int, crop: bool, progress: Progress
) -> None:
    texts: dict[bool, list[str]] = {False: [], True: []}
    for source in sources:
        texts[source.validation].extend(documents(source))
    if not texts[True] and len(texts[False]) > 1:  # a single file: every twentieth document validates
        texts[True] = texts[False][::20]
        texts[False] = [text for i, text in enumerate(texts[False]) if i % 20]
    if not texts[False]:
        raise CorpusError("the corpus is empty")
    progress(0.05, "training the tokenizer")
    try:
        tokenizer = BytePairs.train(_first(texts[False], _TRAINING_BYTES), vocab_size)
    except ValueError as error:
        raise CorpusError(f"model.vocab_size={vocab_size}: {error}") from error
    tokenizer.save(folder / "tokenizer.json")
    digest, counts = hashlib.sha256((folder / "tokenizer.json").read_bytes()), {}
    for validation, name in ((False, "train"), (True, "validation")):
        count = 0
        with (folder / f"{name}.bin").open("wb") as file:
            tokens = _tokens(texts[validation], tokenizer, progress, name)
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


def _tokens(texts: Sequence[str], tokenizer: BytePairs, progress: Progress, name: str) -> Iterator[np.ndarray]:
    for start in range(0, len(texts), _DOCUMENTS_PER_BATCH):
        progress(0.3 + 0.7 * start / len(texts), f"tokenizing and packing the {name} part")
        yield from tokenizer.encode_documents(texts[start : start + _DOCUMENTS_PER_BATCH])


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
