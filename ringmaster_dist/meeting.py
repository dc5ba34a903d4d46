"""The files by which the processes of one torchrun on one machine find each other.

torchrun's own store would not do, because anybody who reaches its port can read and write it. These files are in a
folder that only their user can enter.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from ringmaster_dist.errors import Mistake


def meeting_file(kind: str, suffix: str) -> Path:
    """A path that all children of one torchrun have in common, and no other process has.

    Removes files of the same kind whose torchrun has ended. Raises Mistake if another user could enter the folder.
    """
    folder = Path(tempfile.gettempdir()) / f"ringmaster-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise Mistake(f"{folder} is not a folder of yours alone: remove it, or set TMPDIR to another place")
    for other in folder.glob(f"{kind}-*"):
        _, parent, start, *_ = other.name.replace(".", "-").split("-")
        if _start_of(parent) != start:
            other.unlink(missing_ok=True)
    parent = str(os.getppid())
    return folder / f"{kind}-{parent}-{_start_of(parent)}{suffix}"


def _start_of(process: str) -> str:
    """When the process started, since process ids are reused. Empty if there is no such process."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""
