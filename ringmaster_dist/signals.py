"""How a command obeys Ctrl+C (SIGINT) and SIGTERM. It never imports torch.

A command passes through three states. Until it has begun, a signal ends the process at once. Then a signal raises
`Stopped` in the main thread, so that files and processes are cleaned up. A process that has not ended soon after is
ended. A command that has results to write asks for signals inside `stop_signals`, and ends where it chooses to.
The exit code is 128 plus the number of the signal: 130 for Ctrl+C, 143 for SIGTERM.

While a module is being imported, `Stopped` waits. C++ code of torch imports modules too, and aborts the process if
that raises.

Python runs a handler only between two instructions of the main thread, which may wait in C++ code for a minute. So a
thread hears of signals too, by the wakeup file descriptor, and ends the process if the main thread does not.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

T = TypeVar("T")

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
STOPPED = tuple(128 + number for number in _SIGNALS)  # the exit codes of a command that a signal has stopped
_active: list[StopRequest] = []  # of the `stop_signals` that are entered, the newest last
_LAST_WORK_SECONDS = 1.0  # that a stopped command spends on a result that it can do without
_CLEANUP_SECONDS = 1.5  # a stopped command that has not ended after this long is ended
_IMPORT_SECONDS = 0.02  # between two looks whether an import has ended
_raises = False  # whether a signal raises `Stopped`


class Stopped(KeyboardInterrupt):
    """A signal has asked the command to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.exit_code = 128 + number


class StopRequest:
    """Says whether a signal has asked to stop."""

    def __init__(self) -> None:
        self.number = 0  # of the signal
        self.raises = False  # whether the signal also raises `Stopped`

    def __call__(self) -> bool:
        return bool(self.number)

    @property
    def exit_code(self) -> int:
        """0 if no signal has arrived."""
        return 128 + self.number if self.number else 0


def end_at_once() -> None:
    """From now on a signal ends this process without a word, which is right as long as it has nothing to clean up."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def raise_when_stopped() -> None:
    """From now on a signal raises `Stopped` in the main thread. A second one ends the process. Call it once."""
    global _raises

    def stop(number: int, frame: FrameType | None) -> None:
        end_at_once()
        _raise_after_imports(number, frame)

    for number in _SIGNALS:
        signal.signal(number, stop)
    _raises = True
    heard, written = os.pipe()  # of the numbers of signals, a byte each
    os.set_blocking(written, False)
    signal.set_wakeup_fd(written, warn_on_full_buffer=False)
    threading.Thread(target=_end_after_a_signal, args=(heard,), name="signals", daemon=True).start()


def _raise_after_imports(number: int, frame: FrameType | None) -> None:
    """Raises `Stopped`, at once or when the imports in progress have ended. ``frame`` is the interrupted one."""
    if not _is_importing(frame):
        raise Stopped(number)
    signal.signal(signal.SIGALRM, lambda _, frame: _raise_after_imports(number, frame))
    signal.setitimer(signal.ITIMER_REAL, _IMPORT_SECONDS)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _end_after_a_signal(heard: int) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # they are for the main thread
    while (number := os.read(heard, 1)[0]) not in _SIGNALS or not _raises:
        pass
    threading.Event().wait(_CLEANUP_SECONDS)
    print("ringmaster: stopped", file=sys.stderr, flush=True)
    os._exit(128 + number)


@contextmanager
def stop_signals() -> Iterator[StopRequest]:
    """Gives an object that says whether SIGINT or SIGTERM has arrived.

    The signals raise no exception, so work ends at a point of its own choosing. A second Ctrl+C does raise one.
    """
    global _raises
    asked = StopRequest()

    def ask(number: int, frame: FrameType | None) -> None:
        asked.number = asked.number or number
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if asked.raises:
            raise Stopped(number)

    previous = {number: signal.signal(number, ask) for number in _SIGNALS}
    _active.append(asked)
    raised, _raises = _raises, False
    try:
        yield asked
    finally:
        _raises = raised
        _active.remove(asked)
        for number, handler in previous.items():
            signal.signal(number, handler)


def unless_stopped(compute: Callable[[], T]) -> T | None:
    """The result, or None if a signal arrives inside `stop_signals` first. After a signal, a second is spent on it.

    The computation must leave nothing half done that matters, such as an evaluation, because it ends anywhere.
    """
    if not _active or threading.current_thread() is not threading.main_thread():
        return compute()
    asked = _active[-1]

    def give_up(number: int, frame: FrameType | None) -> None:
        raise Stopped(asked.number)

    previous = signal.signal(signal.SIGALRM, give_up)
    try:
        asked.raises = True
        if asked():
            signal.setitimer(signal.ITIMER_REAL, _LAST_WORK_SECONDS)
        return compute()
    except Stopped:
        return None
    finally:
        asked.raises = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def start_fork_server() -> None:
    """Starts multiprocessing's fork server, if there is none. It ignores Ctrl+C, as its processes do.

    A program inherits which signals are ignored, so this process ignores SIGINT while it starts the fork server. A
    blocked signal stays pending even where it is ignored, so a Ctrl+C of that moment is obeyed at the end.
    """
    from multiprocessing import forkserver, resource_tracker  # most commands start no process

    resource_tracker.ensure_running()  # the fork server starts it too, and would unblock SIGINT in between
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, previous)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
