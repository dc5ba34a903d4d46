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
from typing import Any, NamedTuple, Protocol

import numpy as np

from ringmaster_dist import randomness
from ringmaster_dist.files import to_disk
from ringmaster_dist.problems.nanochat.corpus import CorpusError, Progress, Source, documents
from ringmaster_dist.problems.nanochat.digests import Digests
from ringmaster_dist.problems.nanochat.tokenizer import BytePairs

_FORMAT = 1
_BUFFERED_DOCUMENTS = 1000
_DOCUMENTS_PER_BATCH = 512
_CHARACTERS_PER_BATCH = 1 << 24
_VALIDATION_EVERY = 20  # a corpus without validation files validates on one document in this many
_PARTS = ("train", "validation")
_TOKENIZER = "tokenizer.json"  # in the folder of rows whose tokenizer was trained for them
_CHUNK_BYTES = 1 << 22
_STREAM_BITS = 40  # a stream has this many draws, as a power of two
_TRAINING_CHARACTERS = 16_000_000  # the tokenizer is trained on the first so many


class Encoder(Protocol):
    """What `prepare` needs of a tokenizer."""

    identity: str  # equal for two tokenizers if and only if they give the same tokens; empty if the folder has its file
    vocab_size: int

    def encode_documents(self, texts: Sequence[str]) -> list[np.ndarray]: ...

    def token_bytes(self) -> np.ndarray: ...


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
            np.memmap(folder / f"{name}.bin", dtype=np.uint16, mode="r").reshape(-1, length) for name in _PARTS
        )
        self.token_bytes = np.array(self.manifest["token_bytes"])  # (vocab_size,)

    @property
    def fingerprint(self) -> str:
        return str(self.manifest["fingerprint"])

    def tokenizer(self) -> BytePairs:
        return BytePairs.load(self.folder / _TOKENIZER)

    def is_whole(self) -> bool:
        """Whether the rows on disk are those that were written. It reads them all."""
        digest = _started_digest(self.folder, self.manifest.get("tokenizer", ""))
        for name in _PARTS:
            with (self.folder / f"{name}.bin").open("rb") as file:
                while chunk := file.read(_CHUNK_BYTES):
                    digest.update(chunk)
        return digest.hexdigest()[:16] == self.fingerprint

    def sample(self, seed: int, worker_id: int, sequence: int, count: int, stream: int = 0) -> np.ndarray:
        """Training rows, (count, context + 1). They are a function of the arguments alone."""
        key = randomness.worker_key(seed, randomness.STREAM_BATCH, worker_id)
        first = (stream << _STREAM_BITS) + sequence * count
        indices = [(randomness.bits(key, first + i) * len(self.train)) >> 64 for i in range(count)]
        return self.train[indices]


class Recipe(NamedTuple):
    """What rows are made from. The folder of prepared rows has its name from this.

    ``tokenizer`` is given, or None to train one with ``vocab_size`` entries. A document longer than a row is cut into
    several. With ``crop`` only its beginning is used, as in the paper and in nanochat.
    """

    sources: Sequence[Source]
    context: int
    cache: Path
    vocab_size: int = 0
    crop: bool = False
    tokenizer: Encoder | None = None

    def folder(self) -> Path:
        digests = Digests(self.cache)
        unknown = iter(digests.of_all([source.path for source in self.sources if not source.sha256]))
        contents = [(source.name, source.validation, source.sha256 or next(unknown)) for source in self.sources]
        vocabulary = self.vocab_size if self.tokenizer is None else self.tokenizer.identity
        recipe = json.dumps([_FORMAT, vocabulary, self.context, self.crop, contents])
        return self.cache / hashlib.sha256(recipe.encode()).hexdigest()[:16]

    def verify(self) -> list[str]:
        """Reads every source and every prepared row. Returns what is wrong, in sentences."""
        paths = [source.path for source in self.sources]
        wrong = [f"{path} has changed, but not its size or its date" for path in Digests(self.cache).verify(paths)]
        folder = self.folder()
        if not (folder / "manifest.json").exists():
            return [*wrong, "no rows are prepared for these sources: run ringmaster data prepare"]
        return wrong if Rows(folder).is_whole() else [*wrong, f"the rows in {folder} are damaged: remove the folder"]


def prepare(recipe: Recipe, progress: Progress = lambda fraction, text: None) -> Rows:
    """Tokenizes and packs, unless that was done before. It may be interrupted, and several processes may call it."""
    folder, cache = recipe.folder(), recipe.cache
    if (folder / "manifest.json").exists():
        return Rows(folder)
    cache.mkdir(0o700, parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=cache, prefix=f".{folder.name}-"))
    try:
        temporary.chmod(0o755)  # if the cache is shared, other users may read the prepared corpus
        _write(temporary, recipe, progress)
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


def _write(folder: Path, recipe: Recipe, progress: Progress) -> None:
    parts, length = _Parts(recipe.sources), recipe.context + 1
    if not parts.counts["train"]:
        raise CorpusError("the corpus is empty")
    tokenizer = recipe.tokenizer or _trained(folder, parts, recipe.vocab_size, progress)
    digest, counts = _started_digest(folder, tokenizer.identity), {}
    for name in _PARTS:
        count = 0
        with (folder / f"{name}.bin").open("wb") as file:
            tokens = _tokens(parts, name, tokenizer, progress)
            for row in pack(tokens if recipe.crop else _cut(tokens, length), length):
                file.write(row.tobytes())
                digest.update(row.tobytes())
                count += 1
        if count == 0:
            raise CorpusError(f"the corpus is too small: its {name} part does not fill one row of {length} tokens")
        counts[name] = count
    manifest = {
        "fingerprint": digest.hexdigest()[:16],
        "context": recipe.context,
        "vocab_size": tokenizer.vocab_size,
        "rows": counts,
        "tokenizer": tokenizer.identity,
        "token_bytes": tokenizer.token_bytes().tolist(),
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))


def _trained(folder: Path, parts: _Parts, vocab_size: int, progress: Progress) -> BytePairs:
    """A tokenizer of these texts, which is saved in the folder."""
    progress(0.05, "training the tokenizer")
    try:
        tokenizer = BytePairs.train(_first(parts.texts("train"), _TRAINING_CHARACTERS), vocab_size)
    except ValueError as error:
        raise CorpusError(f"model.vocab_size={vocab_size}: {error}") from error
    tokenizer.save(folder / _TOKENIZER)
    return tokenizer


def _started_digest(folder: Path, identity: str) -> hashlib._Hash:
    """The fingerprint of rows begins with that of the tokenizer: its file in the folder, else its identity."""
    path = folder / _TOKENIZER
    return hashlib.sha256(path.read_bytes() if path.exists() else identity.encode())


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


def _tokens(parts: _Parts, name: str, tokenizer: Encoder, progress: Progress) -> Iterator[np.ndarray]:
    done = 0
    for batch in _batches(parts.texts(name)):
        progress(0.3 + 0.7 * done / parts.counts[name], f"tokenizing and packing the {name} part")
        yield from tokenizer.encode_documents(batch)
        done += len(batch)


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    """Texts to tokenize together: not too many, and of long ones fewer, because all are in memory at once."""
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if len(batch) == _DOCUMENTS_PER_BATCH or size >= _CHARACTERS_PER_BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


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
