"""Logging of the processes of a run, to stderr."""

from __future__ import annotations

import logging
import os


def set_up_logging() -> None:
    """Sets the level from RINGMASTER_LOG. The default is WARNING, INFO says more, and DEBUG says everything."""
    level = os.environ.get("RINGMASTER_LOG", "WARNING")
    logging.basicConfig(level=level, format="%(asctime)s %(name)s %(message)s")
