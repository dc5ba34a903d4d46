"""Documents to learn from: Python's standard library, a folder of text, or public shards.

A corpus is a list of source files, each either for training or for validation. The choice depends on names alone, so
every machine that has the files makes the same one.
"""

from __future__ import annotations

import hashlib
import json
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ringmaster_dist.problems.nanochat.download import DownloadError, Progress, fetch

_LAST_SHARD = 6542
_SUFFIXES = (".txt", ".md", ".py", ".jsonl", ".parquet")
_VALIDATION_SHARE = 20  # one file in this many
_PIECE_BYTES = 2000  # long texts are cut at lines into pieces of about this size


# Not everybody's Python has its tests, and packages installed beside it are not the same everywhere.
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests"}


class CorpusError(ValueError):
    """The corpus cannot be used; the message says why."""


@dataclass(frozen=True)
class Source:
    path: Path
    name: str  # the same on every machine
    validation: bool


def standard_library() -> list[Source]:
    """The source text of the Python that runs this."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = [p for p in root.rglob("*.py") if not _NOT_LIBRARY & set(p.relative_to(root).parts) and _is_text(p)]
    if not paths:
        raise CorpusError(f"the standard library's source is not in {root}: use data=text data.path=...")
    return _split(root, paths)


def climbmix(url: str, num_shards: int, folder: Path, progress: Progress = lambda fraction, text: None) -> list[Source]:
    """The first public shards, and the last one for validation; downloaded if they are not there."""
    sources = []
    for index in (*range(num_shards), _LAST_SHARD):
        name = f"shard_{index:05d}.parquet"
        try:
            path = fetch(f"{url}/{name}", folder / name, check=_not_parquet, progress=progress)
        except DownloadError as error:
            raise CorpusError(f"{error}. Without a network use data=stdlib, or data=text data.path=...") from error
        sources.append(Source(path, name, index == _LAST_SHARD))
    return sources


def _not_parquet(path: Path) -> str:
    """What is wrong with a shard, if anything."""
    with path.open("rb") as file:
        head = file.read(4)
        file.seek(-4, 2) if path.stat().st_size > 8 else None
        return "" if head == file.read(4) == b"PAR1" else "it is not a parquet file"


def _is_text(path: Path) -> bool:
    try:
        path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def text_files(path: Path) -> list[Source]:
    """A file, or everything below a folder, of .txt, .md, .py, .jsonl (a "text" each) or .parquet (a text column)."""
    if not path.exists():
        raise CorpusError(f"data.path={path} does not exist")
    if path.is_file():
        if path.suffix not in _SUFFIXES:
            raise CorpusError(f"data.path={path}: known kinds are {', '.join(_SUFFIXES)}")
        return [Source(path, path.name, False)]
    paths = [p for p in path.rglob("*") if p.suffix in _SUFFIXES and p.is_file()]
    if not paths:
        raise CorpusError(f"data.path={path} holds no file of the kinds {', '.join(_SUFFIXES)}")
    return _split(path, paths)


def _split(root: Path, paths: list[Path]) -> list[Source]:
    names = sorted((str(path.relative_to(root)), path) for path in paths)
    return [Source(path, name, _is_validation(name)) for name, path in names]


def _is_validation(name: str) -> bool:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % _VALIDATION_SHARE == 0


def documents(source: Source) -> Iterator[str]:
    """The texts in a file. Raises CorpusError where it is not what it seems."""
    try:
        if source.path.suffix == ".parquet":
            yield from _parquet(source.path)
        elif source.path.suffix == ".jsonl":
            yield from _json_lines(source.path)
        else:
            yield from _pieces(source.path.read_bytes().decode("utf-8"))
    except UnicodeDecodeError as error:
        raise CorpusError(f"{source.path} is not UTF-8 text ({error.reason} at byte {error.start})") from error


def _json_lines(path: Path) -> Iterator[str]:
    for number, line in enumerate(path.read_bytes().decode("utf-8").split("\n"), 1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)["text"]
        except (json.JSONDecodeError, KeyError, TypeError):
            text = None
        if not isinstance(text, str):
            raise CorpusError(f'{path} line {number} is not a JSON object with a "text"')
        yield from _pieces(text)


def _parquet(path: Path) -> Iterator[str]:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        if "text" not in file.schema_arrow.names:
            raise CorpusError(f"{path} has no column 'text', but {', '.join(file.schema_arrow.names)}")
        for batch in file.iter_batches(columns=["text"]):
            yield from (text for text in batch.column(0).to_pylist() if text)
    except (pyarrow.ArrowException, OSError) as error:
        raise CorpusError(f"{path} cannot be read as parquet: {str(error).splitlines()[0]}") from error


def _pieces(text: str) -> Iterator[str]:
    """Cut where a blank line is near, else at any line: a row holds only so much, and what is cropped is lost."""
    piece: list[str] = []
    size = 0
    for line in text.splitlines(keepends=True):
        piece.append(line)
        size += len(line)
        if size >= _PIECE_BYTES and (not line.strip() or size >= 2 * _PIECE_BYTES):
            yield "".join(piece)
            piece, size = [], 0
    if size:
        yield "".join(piece)
