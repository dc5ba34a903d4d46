"""``ringmaster replay RUN_DIR``."""

from __future__ import annotations

from pathlib import Path

from ringmaster_dist.config.errors import UserError

_HELP = """ringmaster replay RUN_DIR

Recomputes a real run from its trace, in one process: the same arrivals in the same order, each gradient computed again
at the iterate of its version. Says whether verdicts, losses and the final iterate are the same bits, else where the
first difference is. Exit code 0 if they are the same, 1 if not.
"""


def main(argv: list[str]) -> int:
    if "-h" in argv or "--help" in argv:
        print(_HELP)
        return 0
    if len(argv) != 1:
        raise UserError("ringmaster replay takes one run directory: ringmaster replay runs/a")
    if not Path(argv[0]).is_dir():
        raise UserError(f"{argv[0]} is not a directory: give the run.dir of a finished ringmaster train")

    from ringmaster_dist.simulation.replay import replay

    outcome = replay(Path(argv[0]))
    verdict = "same" if outcome.same else "DIFFERENT"
    print(f"{verdict}: {outcome.updates:,} updates, {outcome.pushes:,} arrivals: {outcome.message}")
    return 0 if outcome.same else 1
