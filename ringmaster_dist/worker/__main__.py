"""``python -m ringmaster_dist.worker`` is ``ringmaster worker``, and can be started by torchrun."""

import os
import sys
import time

from ringmaster_dist.signals import end_at_once, raise_when_stopped

_PAUSE_SECONDS = 10.0


def main(argv: list[str]) -> int:
    end_at_once()

    from ringmaster_dist.cli.main import main as ringmaster

    raise_when_stopped()
    follows = "group=true" in argv and os.environ.get("RANK", "0") != "0"
    code = ringmaster(["worker", *argv], is_quiet=follows)
    end_at_once()
    if follows and code == 2:
        time.sleep(_PAUSE_SECONDS)  # torchrun ends all ranks when one exits, and the first rank says why for all
    return code


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
