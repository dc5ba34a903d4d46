"""Ctrl+C and SIGTERM as a wish, not an exception: work ends at a point of its own choosing, with nothing half done."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def stop_signals() -> Iterator[Callable[[], bool]]:
    """Gives a function that says whether a stop was asked for. A second Ctrl+C stops at once."""
    asked = False

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    previous = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: asked
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
