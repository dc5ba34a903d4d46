"""Fetches files over HTTP: goes on where it broke off, tries again, and keeps only what is whole.

A file is written under a temporary name and renamed when its length and its checksum (where the server names one) are
right and ``check`` has nothing to object; the checksum is then kept beside it and compared before it is used again.
"""

from __future__ import annotations

import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path

from ringmaster_dist.files import locked, sha256_of

_CHUNK_BYTES = 1 << 20
_FIRST_PAUSE_SECONDS = 1.0
_GONE = (400, 401, 403, 404, 410)  # asking again will not help
_SHA256 = re.compile(r'"?([0-9a-f]{64})"?$')

Progress = Callable[[float, str], None]


class DownloadError(Exception):
    """The file cannot be had; the message says why."""


def fetch(
    url: str,
    path: Path,
    *,
    check: Callable[[Path], str] = lambda path: "",
    attempts: int = 5,
    timeout_seconds: float = 30.0,
    pause_seconds: float = _FIRST_PAUSE_SECONDS,
    progress: Progress = lambda fraction, text: None,
) -> Path:
    """The file, from the disk if it is there whole. ``check`` says what is wrong with it, if anything.

    Several processes of a machine may ask for it at once: one fetches it, the others wait for that.
    """
    if _is_whole(path):
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path.with_name(f".{path.name}.lock")):
        if _is_whole(path):
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
            if error.code == 416:  # there is nothing after what we have, so what we have is wrong
                part.unlink(missing_ok=True)
            problem = f"the server answers {error.code} {error.reason}"
            if error.code in _GONE:
                break
            continue
        except (OSError, HTTPException) as error:  # no network, broken off, too slow
            problem = str(getattr(error, "reason", error)) or type(error).__name__
            continue
        digest = sha256_of(part)
        wrong = check(part)
        if promised not in ("", digest):
            wrong = f"its checksum is {digest[:12]}..., not {promised[:12]}..."
        if not wrong:
            part.replace(path)
            _sidecar(path).write_text(digest)
            return path
        part.unlink()
        problem = f"what arrived is not the file: {wrong}"
    raise DownloadError(f"{url} cannot be had: {problem}")


def _transfer(url: str, part: Path, timeout_seconds: float, progress: Progress) -> str:
    """Appends what is missing. Returns the checksum the server names, if any."""
    have = part.stat().st_size if part.exists() else 0
    headers = {"User-Agent": "ringmaster-dist"} | ({"Range": f"bytes={have}-"} if have else {})
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=timeout_seconds) as answer:
        if have and answer.status != 206:  # it sends all of it again
            have = 0
        length = answer.headers.get("Content-Length")
        total = have + int(length) if length else None
        with part.open("ab" if have else "wb") as file:
            while chunk := answer.read(_CHUNK_BYTES):
                file.write(chunk)
                have += len(chunk)
                progress(have / total if total else 0.0, f"{part.name[1:-5]}: {have / 1e6:,.0f} MB")
        if total is not None and have < total:
            raise OSError(f"broken off after {have:,} of {total:,} bytes")
        match = _SHA256.match(answer.headers.get("X-Linked-ETag") or answer.headers.get("ETag") or "")
        return match[1] if match else ""


def _is_whole(path: Path) -> bool:
    return path.exists() and _sidecar(path).exists() and _sidecar(path).read_text() == sha256_of(path)


def _sidecar(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")
