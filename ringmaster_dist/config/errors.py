"""The exception for a mistake of the user, how a process ends with one, and warnings."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from ringmaster_dist.errors import Mistake, printable
from ringmaster_dist.signals import Stopped


class UserError(Exception):
    """A mistake of the user: the message is one helpful line, shown without traceback, exit code 2."""


def warn(text: str) -> None:
    """Tells the user of something that is allowed and may not be meant."""
    print(f"ringmaster: warning: {printable(text)}", file=sys.stderr, flush=True)


def exit_code_of(work: Callable[[], int], *, is_quiet: bool = False) -> int:
    """Does the work of a process. A mistake is one line on stderr, unless ``is_quiet``, and exit code 2.

    A signal is one line and exit code 130 or 143.
    """
    try:
        code = work()
        sys.stdout.flush()  # so that a closed pipe is noticed here and not when the interpreter exits
        return code
    except (UserError, Mistake) as error:
        if not is_quiet:
            print(f"ringmaster: {printable(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as error:
        print("ringmaster: stopped", file=sys.stderr)
        return error.exit_code if isinstance(error, Stopped) else 130
    except BrokenPipeError:  # the reader of a pipe, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the interpreter flushes stdout once more
        return 0
