"""``python -m ringmaster_dist.worker`` is ``ringmaster worker``, and can be started by torchrun."""

import os
import sys

from ringmaster_dist.cli.main import main as ringmaster


def main(argv: list[str]) -> int:
    follows = "group=true" in argv and os.environ.get("RANK", "0") != "0"  # the first rank reports a mistake for all
    return ringmaster(["worker", *argv], is_quiet=follows)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
