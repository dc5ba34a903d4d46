"""Whoever else wants to hear of a run. A logger may be slow, hang or fail: the run does not notice."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Logger:
    """Hears what the server measures, and keeps none of it. None of these block or raise."""

    def row(self, row: Mapping[str, Any]) -> None:
        """A row of metrics.jsonl."""

    def text(self, text: str) -> None:
        """A sample of what a model writes."""

    def file(self, path: Path, kind: str) -> None:
        """A checkpoint, or the final weights."""

    def close(self, summary: Mapping[str, Any]) -> None:
        """The end of the run. Waits a while for what is on its way, and no longer."""
