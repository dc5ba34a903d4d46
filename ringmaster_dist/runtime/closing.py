"""What is said at the end of a run: the summary, and the report."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

from rich.console import Console

from ringmaster_dist.observe.console import print_summary
from ringmaster_dist.observe.run_directory import RunDirectory

log = logging.getLogger(__name__)


def show_summary(directory: RunDirectory, *, report: bool) -> int:
    """The end in words; and drawn, if wanted. Returns the exit code: 1 for a run that has diverged."""
    summary = json.loads((directory.path / "summary.json").read_text())
    first = directory.read_rows("metrics.jsonl")[0]
    initial = first.get("gap", first.get("loss"))
    print_summary(Console(file=sys.stdout), summary, initial, directory.path)
    if report:
        show_report(directory.path)
    return 1 if summary["diverged"] else 0


def show_report(directory: Path) -> None:
    """Draws the report and says where it is. Whatever goes wrong with it, the run was done."""
    from ringmaster_dist.observe.report import FOLDER, write_report

    try:
        print(f"  report: {write_report([directory], directory / FOLDER)[0]}", flush=True)
    except Exception as error:
        log.debug("the report could not be drawn", exc_info=True)
        print(
            f"ringmaster: the report could not be drawn ({error}): see ringmaster report {directory}", file=sys.stderr
        )
