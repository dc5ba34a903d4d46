"""``python -m ringmaster_dist`` is the ``ringmaster`` command."""

from __future__ import annotations

import gc
import sys

from ringmaster_dist.process_settings import search_garbage_seldom
from ringmaster_dist.signals import end_at_once, raise_when_stopped


def main() -> int:
    """Runs one command. Ctrl+C during the imports, and after the command, ends the process without a traceback."""
    end_at_once()
    search_garbage_seldom()

    from ringmaster_dist.cli.main import main as ringmaster

    raise_when_stopped()
    code = ringmaster(sys.argv[1:])
    end_at_once()
    gc.freeze()  # the interpreter's shutdown searches all objects of torch for reference cycles, for half a second
    return code


if __name__ == "__main__":
    raise SystemExit(main())
