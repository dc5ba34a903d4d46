"""The report of one or several runs: PNG figures and one page that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ringmaster_dist.observe.figures import draw
from ringmaster_dist.observe.page import page
from ringmaster_dist.observe.recording import Recording
from ringmaster_dist.observe.run_directory import RunDirectoryError
from ringmaster_dist.observe.view import view

FOLDER = "report"  # in a run directory


def write_report(directories: Sequence[Path], folder: Path) -> list[Path]:
    """The page first, then the figures. Raises RunDirectoryError with one line if there is nothing to show."""
    shown = view([Recording(directory) for directory in directories])
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "report.html"
        temporary = folder / ".report.html"
        temporary.write_text(page(shown))
        temporary.replace(path)  # a reader never sees half a page
        return [path, *draw(shown, folder)]
    except OSError as error:
        raise RunDirectoryError(
            f"{folder} cannot be written ({error.strerror or error}): choose another --out"
        ) from error
