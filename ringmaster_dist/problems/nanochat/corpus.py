"""The documents of a corpus: Python's standard library, a folder of text, or public shards, which are downloaded.

A corpus is a list of source files, each either for training or for validation. The choice depends on names alone, so
every machine that has the files makes the same choice.
"""

from __future__ import annotations

import hashlib
import json
import re
import sysconfig
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from http.client import HTTPException
from pathlib import Path

from ringmaster_dist.files import locked, sha256_of
from ringmaster_dist.problems.nanochat.digests import Digests

_LAST_SHARD = 6542
_SUFFIXES = (".txt", ".md", ".py", ".jsonl", ".parquet")
_VALIDATION_SHARE = 20  # one file in this many
_PIECE_BYTES = 2000  # long texts are cut at lines into pieces of about this size
# Some installations of Python have no tests, and each machine has other installed packages.
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests"}
_CHUNK_BYTES = 1 << 20
_PARQUET_ROWS = 1024  # so many documents are read at once
_MOST_GROUP_BYTES = 4 << 30  # of the texts in one group of rows of a parquet file
_MOST_DOWNLOAD_BYTES = 16 << 30
_GONE = (400, 401, 403, 404, 410)  # HTTP codes after which a retry does not help
_SHA256 = re.compile(r'"?([0-9a-f]{64})"?$')

Progress = Callable[[float, str], None]


class CorpusError(ValueError):
    """The corpus cannot be used; the message says why."""


@dataclass(frozen=True)
class Source:
    path: Path
    name: str  # the same on every machine
    validation: bool
    sha256: str = ""  # of the content, if it is known already


@cache  # a process that makes many runs would spend much of its time on this
def standard_library() -> list[Source]:
    """The source text of the Python that runs this program."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = [p for p in root.rglob("*.py") if not _NOT_LIBRARY & set(p.relative_to(root).parts) and _is_text(p)]
    if not paths:
        raise CorpusError(f"the standard library's source is not in {root}: use data=text data.path=...")
    return _split(root, paths)


def climbmix(url: str, num_shards: int, folder: Path, progress: Progress = lambda fraction, text: None) -> list[Source]:
    """The first public shards, and the last one for validation. Missing shards are downloaded."""
    sources, digests = [], Digests(folder)
    for index in (*range(num_shards), _LAST_SHARD):
        name = f"shard_{index:05d}.parquet"
        try:
            path = fetch(f"{url}/{name}", folder / name, check=_not_parquet, progress=progress, digest=digests.of)
        except DownloadError as error:
            raise CorpusError(f"{error}. Without a network use data=stdlib, or data=text data.path=...") from error
        # `fetch` has just compared the file with its checksum, so it is not hashed again.
        sources.append(Source(path, name, index == _LAST_SHARD, _checksum_file(path).read_text()))
    return sources


def _not_parquet(path: Path) -> str:
    """What is wrong with a shard, or an empty string."""
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
    """A file, or all files below a folder: .txt, .md, .py, .jsonl (objects with a "text") or .parquet (with "text")."""
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
    """The texts in a file. Raises CorpusError if the file cannot be read as its type."""
    if source.path.suffix == ".parquet":
        yield from _parquet(source.path)
    elif source.path.suffix == ".jsonl":
        yield from _json_lines(source.path)
    else:
        yield from _pieces(_lines(source.path))


def _blocks(path: Path) -> Iterator[str]:
    """The text of a file in blocks of whole lines, so that a file may be larger than the memory."""
    before, pending = 0, list[bytes]()  # the bytes of earlier blocks, and what has been read since

    def block() -> str:
        nonlocal before
        joined = b"".join(pending)
        pending.clear()
        text = _decoded(joined, path, before)
        before += len(joined)
        return text

    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            head, newline, tail = chunk.rpartition(b"\n")
            if newline:
                pending += head, newline
                yield block()
            pending.append(tail)
    if any(pending):
        yield block()


def _decoded(block: bytes, path: Path, before: int) -> str:
    """``before`` is the number of bytes before the block."""
    try:
        return block.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CorpusError(f"{path} is not UTF-8 text ({error.reason} at byte {before + error.start})") from error


def _lines(path: Path) -> Iterator[str]:
    for block in _blocks(path):
        yield from block.splitlines(keepends=True)


def _json_lines(path: Path) -> Iterator[str]:
    lines = (line for block in _blocks(path) for line in block.removesuffix("\n").split("\n"))
    for number, line in enumerate(lines, 1):
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
        file = pyarrow.parquet.ParquetFile(path, read_dictionary=["text"])  # many rows may share one long text
        if "text" not in file.schema_arrow.names:
            raise CorpusError(f"{path} has no column 'text', but {', '.join(file.schema_arrow.names)}")
        groups = (file.metadata.row_group(index) for index in range(file.metadata.num_row_groups))
        column = file.schema_arrow.names.index("text")
        size = max((group.column(column).total_uncompressed_size for group in groups), default=0)
        if size > _MOST_GROUP_BYTES:
            raise CorpusError(f"{path} has {size / 1e9:,.0f} GB of texts in one group of rows, which is too much")
        for batch in file.iter_batches(_PARQUET_ROWS, columns=["text"]):
            yield from filter(None, (text.as_py() for text in batch.column(0)))
    except (pyarrow.ArrowException, OSError) as error:
        raise CorpusError(f"{path} cannot be read as parquet: {str(error).splitlines()[0]}") from error


def _pieces(lines: Iterable[str]) -> Iterator[str]:
    """Cuts a text at a blank line if one is near, else at any line, because a row crops what is too long for it."""
    piece: list[str] = []
    size = 0
    for line in lines:
        piece.append(line)
        size += len(line)
        if size >= _PIECE_BYTES and (not line.strip() or size >= 2 * _PIECE_BYTES):
            yield "".join(piece)
            piece, size = [], 0
    if size:
        yield "".join(piece)


class DownloadError(Exception):
    """The file cannot be downloaded; the message says why."""


def fetch(
    url: str,
    path: Path,
    *,
    check: Callable[[Path], str] = lambda path: "",
    attempts: int = 5,
    timeout_seconds: float = 30.0,
    pause_seconds: float = 1.0,
    progress: Progress = lambda fraction, text: None,
    digest: Callable[[Path], str] = sha256_of,
) -> Path:
    """Downloads a file unless it is on disk already. Resumes a partial download and retries with growing pauses.

    The file is written under a temporary name. It is renamed when its length and its checksum (if the server names one)
    are right and ``check`` finds nothing wrong. The checksum is kept next to the file. Each later call compares it with
    what ``digest`` gives. Several processes may call this at once: one downloads, and the others wait.
    """
    if _is_whole(path, digest):
        return path
    path.parent.mkdir(0o700, parents=True, exist_ok=True)
    with locked(path.with_name(f".{path.name}.lock")):
        if _is_whole(path, digest):
            return path
        return _fetch(url, path, check, attempts, timeout_seconds, pause_seconds, progress)


def _fetch(
    url: str, path: Path, check: Callable[[Path], str], attempts: int, timeout_seconds: float, pause_seconds: float,
    progress: Progress,
) -> Path:  # fmt: skip
    part = path.with_name(f".{path.name}.part")
    problem = ""
    for attempt in range(attempts):
        if attempt:
            time.sleep(pause_seconds * 2 ** (attempt - 1))
        try:
            promised = _transfer(url, part, timeout_seconds, progress)
        except urllib.error.HTTPError as error:
            if error.code == 416:  # the range is beyond the end, so the partial file is wrong
                part.unlink(missing_ok=True)
            problem = f"the server answers {error.code} {error.reason}"
            if error.code in _GONE:
                break
            continue
        except (OSError, HTTPException) as error:  # no network, a broken connection, or a timeout
            problem = str(getattr(error, "reason", error)) or type(error).__name__
            continue
        digest = sha256_of(part)
        wrong = check(part)
        if promised not in ("", digest):
            wrong = f"its checksum is {digest[:12]}..., not {promised[:12]}..."
        if not wrong:
            part.replace(path)
            _checksum_file(path).write_text(digest)
            return path
        part.unlink()
        problem = f"what arrived is not the file: {wrong}"
    raise DownloadError(f"{url} cannot be downloaded: {problem}")


def _transfer(url: str, part: Path, timeout_seconds: float, progress: Progress) -> str:
    """Appends the missing bytes. Returns the checksum that the server names, or an empty string."""
    have = part.stat().st_size if part.exists() else 0
    headers = {"User-Agent": "ringmaster-dist"} | ({"Range": f"bytes={have}-"} if have else {})
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=timeout_seconds) as answer:
        if have and answer.status != 206:  # the server ignores ranges and sends the whole file
            have = 0
        length = answer.headers.get("Content-Length")
        total = have + int(length) if length else None
        with part.open("ab" if have else "wb") as file:
            while chunk := answer.read(_CHUNK_BYTES):
                file.write(chunk)
                have += len(chunk)
                if have > _MOST_DOWNLOAD_BYTES:
                    raise OSError(f"it has more than {_MOST_DOWNLOAD_BYTES:,} bytes")
                progress(have / total if total else 0.0, f"{part.name[1:-5]}: {have / 1e6:,.0f} MB")
        if total is not None and have < total:
            raise OSError(f"broken off after {have:,} of {total:,} bytes")
        match = _SHA256.match(answer.headers.get("X-Linked-ETag") or answer.headers.get("ETag") or "")
        return match[1] if match else ""


def _is_whole(path: Path, digest: Callable[[Path], str]) -> bool:
    return path.exists() and _checksum_file(path).exists() and _checksum_file(path).read_text() == digest(path)


def _checksum_file(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")
