"""The report of one or several runs: one HTML page that needs nothing else, and PNG figures of the same values.

The page holds text that others have chosen: names of runs and devices, values of the configuration, what a model has
written. None of it can become a part of the page. The data is JSON in an element that the browser does not run, the
script shows every string as text, and the page's policy allows the one script that is ours, by its hash.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import logging
import re
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ringmaster_dist.observe import style
from ringmaster_dist.observe.closing import Stdout, print_summary
from ringmaster_dist.observe.figures import draw
from ringmaster_dist.observe.page_data import page_data
from ringmaster_dist.observe.run_files import Recording, RunDirectoryError, RunFiles, belong_together

log = logging.getLogger(__name__)

FOLDER = "report"  # in a run directory
_ASSETS = Path(__file__).parent / "assets"


def write_report(directories: Sequence[Path], folder: Path) -> list[Path]:
    """Writes the page and the figures and returns their paths. Raises RunDirectoryError if there is nothing to show."""
    with belong_together(directories[0]):
        data = page_data([Recording(directory) for directory in directories])
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if folder.is_symlink() and folder.parent in directories:
            raise RunDirectoryError(f"{folder} is a link to another place: choose another --out")
        # A reader never sees half a page, and a link in the folder is replaced and not followed.
        with TemporaryDirectory(prefix=".", dir=folder) as name:
            written = [Path(name) / "report.html"]
            written[0].write_text(page(data))
            written += draw(data, Path(name))
            return [path.replace(folder / path.name) for path in written]
    except OSError as error:
        raise RunDirectoryError(
            f"{folder} cannot be written ({error.strerror or error}): choose another --out"
        ) from error


def show_summary(files: RunFiles, *, report: bool) -> int:
    """Says how a run has ended and draws the report if wanted. Returns the exit code, which is 1 if it has diverged."""
    summary = files.outcome()
    print_summary(Stdout(), files, summary)
    if report:
        show_report([files.path], files.path / FOLDER)
    return 1 if summary.diverged else 0


def show_report(directories: Sequence[Path], folder: Path) -> None:
    """Draws the report of runs that have ended and says where it is. A failure to draw does not change the outcome."""
    try:
        print(f"  report: {write_report(directories, folder)[0]}", flush=True)
    except Exception as error:
        log.debug("the report could not be drawn", exc_info=True)
        print(
            f"ringmaster: the report could not be drawn ({error}): see ringmaster report "
            f"{' '.join(map(str, directories))}",
            file=sys.stderr,
        )


def page(data: dict[str, Any], refresh_seconds: float = 0.0) -> str:
    """The page that shows the data. With ``refresh_seconds`` it asks for ``data.json`` that often."""
    parts = {
        "@TITLE@": html.escape(", ".join(run["name"] for run in data["runs"])[:100]),
        "@POLICY@": policy(),
        "@STYLE@": style.css() + _asset("style.css"),
        "@REFRESH@": f"{refresh_seconds:g}",
        "@SCRIPT@": _script(),
        # In a script element only "</" and "<!--" could end or change it.
        "@DATA@": as_json(data).replace("<", "\\u003c"),
    }
    # One pass over the template: a run whose name looks like a mark is not replaced again.
    return re.sub("@[A-Z]+@", lambda mark: parts[mark[0]], _asset("page.html"))


def policy() -> str:
    """The Content-Security-Policy of the page. It runs its own script only, and asks no other server."""
    digest = base64.b64encode(hashlib.sha256(_script().encode()).digest()).decode()
    return (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


def as_json(data: dict[str, Any]) -> str:
    return json.dumps(data, allow_nan=False, separators=(",", ":"))


@cache
def _script() -> str:
    """What the script element of the page contains, to the last character."""
    return f"\n{_asset('charts.js')}const DASHES = {json.dumps(style.DASHES)};\n{_asset('page.js')}"


@cache
def _asset(name: str) -> str:
    return (_ASSETS / name).read_text()
