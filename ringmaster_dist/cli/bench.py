"""``ringmaster bench [NAME ...]``."""

from __future__ import annotations

import sys
import time

from ringmaster_dist.bench import BENCHES, run
from ringmaster_dist.config.errors import UserError

_HELP = """ringmaster bench [NAME ...] [--quick] [--json]

Measures this system beside its alternatives, in the same run; where it repeats, the best, with the worst beside it.
Without a name, all of them.

{benches}

  --quick   fewer repetitions, shorter runs
  --json    one line of JSON per bench
  --help    this text
"""


def main(argv: list[str]) -> int:
    if "-h" in argv or "--help" in argv:
        print(_HELP.format(benches="\n".join(f"  {name:<12} {text}" for name, text in BENCHES.items())))
        return 0
    options = {word for word in argv if word.startswith("-")}
    names = [word for word in argv if not word.startswith("-")] or list(BENCHES)
    if unknown := options - {"--quick", "--json"}:
        raise UserError(f"there is no option {sorted(unknown)[0]}; see ringmaster bench --help")
    if missing := [name for name in names if name not in BENCHES]:
        raise UserError(f"there is no bench {missing[0]!r}; known: {', '.join(BENCHES)}")
    began = time.monotonic()
    for name in names:
        run(name, quick="--quick" in options, as_json="--json" in options)
    print(f"{len(names)} benches in {(time.monotonic() - began) / 60:.1f} minutes", file=sys.stderr)
    return 0
