"""Copies of a run's checkpoints at a URL, from which the run can be resumed on another machine.

fsspec reaches the URL. The folder there holds

    checkpoints/NAME    a checkpoint under its local name
    parts/SHA256        the other files that a run needs to resume, in parts that are named by their content
    NAME.json           the manifest of a checkpoint, which lists the parts of each file

The manifest is uploaded last, under another name, and then renamed. So a reader sees a checkpoint with all its files,
or does not see it. A file of lines grows, and only its last parts are uploaded again. The token is never uploaded.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ringmaster_dist.config.errors import UserError
from ringmaster_dist.config.overrides import first_line
from ringmaster_dist.errors import Mistake
from ringmaster_dist.files import open_private, sha256_of
from ringmaster_dist.observe.run_directory import RunDirectory
from ringmaster_dist.observe.run_files import CONFIG, FILES, TERMS
from ringmaster_dist.server.checkpoints import moment
from ringmaster_dist.server.weights import INITIAL

log = logging.getLogger(__name__)

_PART_BYTES = 4 << 20
_WHOLE_FILES = (CONFIG, TERMS, INITIAL, "wandb.id")  # the files whose size a checkpoint does not hold
_CHECKPOINTS, _PARTS = "checkpoints", "parts"
_PART_NAME = re.compile(r"[0-9a-f]{64}")
_COPYING = ".copying"


def is_url(text: str) -> bool:
    return "://" in text


@contextmanager
def one_line(key: str, url: str) -> Iterator[None]:
    """Turns an error of the storage at a URL into a UserError. Each kind of storage has exceptions of its own."""
    try:
        yield
    except (UserError, Mistake):
        raise
    except ImportError as error:
        install = "pip install 'ringmaster-dist[remote]'"
        raise UserError(f"{key}={url} needs a package: {install} ({first_line(error)})") from error
    except Exception as error:
        raise UserError(f"{key}={url} cannot be used: {first_line(error)}") from error


class Source:
    """A local checkpoint, and the sizes that the files of its run had then.

    The file is kept open. So it can be read until `close`, even if the run has removed it meanwhile.
    """

    def __init__(self, checkpoint: Path, sizes: Mapping[str, int]) -> None:
        """Raises OSError."""
        self.checkpoint, self.sizes = checkpoint, sizes
        self._file = checkpoint.open("rb")
        self.content = Path(f"/proc/self/fd/{self._file.fileno()}")

    def close(self) -> None:
        self._file.close()


class RemoteRun:
    """The folder of one run at a URL. One process writes it, in one thread at a time."""

    def __init__(self, url: str) -> None:
        """Raises ImportError if a package is missing. Storage that connects here may raise other errors."""
        from fsspec.core import url_to_fs

        self.url = url
        self._system, self._root = url_to_fs(url)
        self._uploaded: set[str] | None = None  # the names of the parts that are there, if they are known
        self._known: dict[str, tuple[int, list[str]]] = {}  # the size of each local file, and the names of its parts

    def names(self) -> list[str]:
        """The names of the checkpoints that are there with all their files, from the oldest to the newest."""
        found = [name.removesuffix(".json") for name in self._listed("") if name.endswith(".json")]
        return sorted((name for name in found if moment(name)), key=lambda name: moment(name) or ())

    def upload(self, folder: Path, source: Source, keep: int) -> None:
        """Uploads a checkpoint of the run in ``folder``. Then removes what the newest ``keep`` do not need."""
        name = source.checkpoint.name
        for kind in (_CHECKPOINTS, _PARTS):
            self._system.makedirs(self._path(kind), exist_ok=True)
        if self._uploaded is None:
            self._uploaded = set(self._listed(_PARTS))
        self._system.put_file(str(source.content), self._path(_CHECKPOINTS, name))
        whole = {file: (folder / file).stat().st_size for file in _WHOLE_FILES if (folder / file).exists()}
        files = {file: self._upload_parts(folder / file, size) for file, size in {**source.sizes, **whole}.items()}
        manifest = {"checkpoint": name, "sha256": sha256_of(source.content), "files": files}
        self._system.pipe_file(self._path(f".{name}"), json.dumps(manifest).encode())
        self._system.mv(self._path(f".{name}"), self._path(f"{name}.json"))
        self._remove_old(name, keep)

    def download(self, folder: Path) -> str:
        """Puts the newest good checkpoint and its files into an empty folder. Returns the checkpoint's name.

        Raises ValueError if there is none.
        """
        problem = ""
        for name in reversed(self.names()):
            try:
                manifest = self._manifest(name)
                for file, parts in manifest["files"].items():
                    self._download_parts(folder / file, parts)
                checkpoint = folder / _CHECKPOINTS / name
                checkpoint.parent.mkdir(mode=0o700, exist_ok=True)
                with open_private(checkpoint, "wb"):
                    pass  # others cannot read the file from its beginning on
                self._system.get_file(self._path(_CHECKPOINTS, name), str(checkpoint))
                if sha256_of(checkpoint) != manifest["sha256"]:
                    raise ValueError("its content is not what its manifest says")
                return name
            except (ValueError, FileNotFoundError) as error:
                problem = problem or f"no checkpoint is good; of the newest, {name}: {error}"
                log.warning("checkpoint %s at %s is passed over: %s", name, self.url, error)
                shutil.rmtree(folder)
                folder.mkdir(mode=0o700)
        raise ValueError(problem or "there is no checkpoint")

    def _upload_parts(self, path: Path, size: int) -> list[str]:
        """Uploads the first ``size`` bytes of a file. Returns the names of its parts.

        While a server is at work, a file of its run grows or stays as it is. So its complete parts are known.
        """
        assert self._uploaded is not None
        known_size, known = self._known.get(path.name, (0, []))
        if known_size == size:
            return known
        names = known[: known_size // _PART_BYTES]
        for part in _parts(path, len(names) * _PART_BYTES, size):
            digest = hashlib.sha256(part).hexdigest()
            if digest not in self._uploaded:
                self._system.pipe_file(self._path(_PARTS, digest), part)
                self._uploaded.add(digest)
            names.append(digest)
        self._known[path.name] = size, names
        return names

    def _download_parts(self, path: Path, names: list[str]) -> None:
        with open_private(path, "wb") as file:
            for name in names:
                part = self._system.cat_file(self._path(_PARTS, name))
                if hashlib.sha256(part).hexdigest() != name:
                    raise ValueError(f"a part of {path.name} is not what its name says")
                file.write(part)

    def _remove_old(self, newest: str, keep: int) -> None:
        """Removes all but the newest ``keep``, and others of the newest one's moment: names do not order these."""
        found = self.names()
        names = [name for name in found if name == newest or moment(name) != moment(newest)][-keep:]
        for name in set(found).difference(names):
            self._system.rm_file(self._path(f"{name}.json"))
        kept = [self._manifest(name) for name in names]
        needed = {part for manifest in kept for parts in manifest["files"].values() for part in parts}
        for kind, used in ((_PARTS, needed), (_CHECKPOINTS, set(names))):
            for name in set(self._listed(kind)) - used:
                if moment(name) or _PART_NAME.fullmatch(name):  # nothing that a mirror has not written
                    self._system.rm_file(self._path(kind, name))
        self._uploaded = needed

    def _manifest(self, name: str) -> dict[str, Any]:
        """Raises ValueError if the manifest is damaged, or if it names a file that a run does not have.

        The names become local paths, and whoever can write at the URL chooses them.
        """
        text = self._system.cat_file(self._path(f"{name}.json"))
        try:
            manifest: dict[str, Any] = json.loads(text)
            files, _ = manifest["files"], manifest["sha256"]
            is_whole = CONFIG in files and all(_PART_NAME.fullmatch(part) for parts in files.values() for part in parts)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            is_whole = False
        if not is_whole:
            raise ValueError("its manifest is damaged")
        if unknown := files.keys() - {*FILES, *_WHOLE_FILES}:
            raise ValueError(f"its manifest names {min(unknown)!r}, which is not a file of a run")
        return manifest

    def _listed(self, kind: str) -> list[str]:
        """The names in a folder. A folder that does not exist has none."""
        self._system.invalidate_cache()  # some file systems remember what they listed
        try:
            paths: list[str] = self._system.ls(self._path(kind), detail=False)
        except FileNotFoundError:
            return []
        return [path.rstrip("/").rpartition("/")[2] for path in paths]

    def _path(self, *names: str) -> str:
        return "/".join([self._root.rstrip("/"), *filter(None, names)])


def _parts(path: Path, start: int, end: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        file.seek(start)
        while start < end:
            part = file.read(min(_PART_BYTES, end - start))
            if not part:
                raise OSError(f"{path} is shorter than its checkpoint says")
            yield part
            start += len(part)


class Mirror:
    """Uploads checkpoints in a thread of its own, one at a time, while training continues.

    Of the checkpoints that are written during an upload, the newest is uploaded next. The thread that writes
    checkpoints calls `submit`, and the main thread calls `finish`.
    """

    def __init__(self, url: str, folder: Path, keep: int) -> None:
        self._url, self._folder, self._keep = url, folder, keep
        self._remote: RemoteRun | None = None
        self._lock = threading.Lock()  # for the three below
        self._next: Source | None = None
        self._failed: Source | None = None
        self._thread: threading.Thread | None = None

    def submit(self, checkpoint: Path, sizes: Mapping[str, int]) -> None:
        """Returns at once. The checkpoint may be removed afterwards."""
        try:
            source = Source(checkpoint, sizes)
        except OSError as error:
            self._warn(checkpoint, error)
            return
        with self._lock:
            if self._next is not None:
                self._next.close()
            self._next = source
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)
                self._thread.start()

    def finish(self, seconds: float) -> None:
        """Waits this long for the last checkpoint. If its upload has failed, it is tried once more."""
        deadline = time.monotonic() + seconds
        self._wait(deadline)
        if self._thread is None and self._failed is not None:
            self.submit(self._failed.checkpoint, self._failed.sizes)
            self._wait(deadline)
        if self._thread is not None:
            log.warning("server: the last checkpoint is not yet at %s after %g s", self._url, seconds)

    def _wait(self, deadline: float) -> None:
        thread = self._thread
        if thread is not None:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _work(self) -> None:
        while True:
            with self._lock:
                source, self._next = self._next, None
                if source is None:
                    self._thread = None
                    return
            self._failed = None if self._upload(source) else source
            source.close()

    def _upload(self, source: Source) -> bool:
        try:
            self._remote = self._remote or RemoteRun(self._url)
            self._remote.upload(self._folder, source, self._keep)
        except Exception as error:  # each kind of remote storage has exceptions of its own
            self._warn(source.checkpoint, error)
            self._remote = None  # what it knew of the other side may be wrong now
            return False
        return True

    def _warn(self, checkpoint: Path, error: Exception) -> None:
        log.warning(
            "server: checkpoint %s WAS NOT COPIED to %s: %s; the next one is tried, and training continues",
            checkpoint.name, self._url, first_line(error),
        )  # fmt: skip


def fetch(url: str, path: Path, token: str, key: str = "resume") -> RunDirectory:
    """Makes the directory of a run from the newest good checkpoint at a URL. It gets this token.

    An interrupted call is repeated from its beginning. Raises UserError, which names the ``key`` that has the URL, if
    the URL cannot be read or has no good checkpoint. Raises RunDirectoryError if the directory holds a run already.
    """
    with one_line(key, url):
        remote = RemoteRun(url)
        scratch = path / _COPYING
        directory = RunDirectory(str(path), name="", overwrite=scratch.exists())
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(mode=0o700)
        try:
            name = remote.download(scratch)
        except BaseException:
            shutil.rmtree(scratch)
            raise
    for item in sorted(scratch.iterdir(), key=lambda item: item.name == CONFIG):  # config.yaml makes it a run
        item.replace(path / item.name)
    directory.write_secret("token", token)
    scratch.rmdir()
    log.warning("%s was copied from %s, checkpoint %s", path, url, name)
    return directory
