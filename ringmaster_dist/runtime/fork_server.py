"""The settings of the fork server, which imports this module first.

From then on the fork server ends with the process that has started it. Otherwise a fork server whose parent was killed
would finish its imports first, and keep a pipe of the parent open.
"""

from __future__ import annotations

import ctypes
import signal
import sys

from ringmaster_dist.process_settings import search_garbage_seldom

_PR_SET_PDEATHSIG = 1  # of linux/prctl.h; the processes that are forked later do not inherit it


def end_with_parent() -> None:
    """Asks the system to end this process when its parent has ended. Does nothing where the system cannot."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if any("multiprocessing.forkserver" in word for word in sys.orig_argv):  # and not in a test that imports it
    end_with_parent()
    search_garbage_seldom()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # blocked at the start; a process may handle it
