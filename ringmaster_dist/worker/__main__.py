"""``python -m ringmaster_dist.worker`` is ``ringmaster worker``, and can be started by torchrun."""

import sys

from ringmaster_dist.cli.main import main as ringmaster


def main(argv: list[str]) -> int:
    return ringmaster(["worker", *argv])


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
