"""What the processes of a run say of themselves, on stderr."""

from __future__ import annotations

import logging
import os


def log_as_told() -> None:
    """RINGMASTER_LOG=INFO says more, DEBUG everything."""
    level = os.environ.get("RINGMASTER_LOG", "WARNING")
    logging.basicConfig(level=level, format="%(asctime)s %(name)s %(message)s")
