"""Logging of the processes of a run, to stderr."""

from __future__ import annotations

import logging
import os

from ringmaster_dist.errors import printable


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def set_up_logging() -> None:
    """Sets the level from RINGMASTER_LOG. The default is WARNING, INFO says more, and DEBUG says everything."""
    level = os.environ.get("RINGMASTER_LOG", "WARNING")
    handler = logging.StreamHandler()
    handler.setFormatter(_Formatter("%(asctime)s %(name)s %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])
