"""``ringmaster data prepare [key=value ...]``."""

from __future__ import annotations

import sys

from ringmaster_dist.config.errors import UserError

_HELP = """ringmaster data prepare [data=stdlib|text|climbmix] [model=...] [key=value ...]

Tokenizes a corpus and packs it into rows, once; training maps them. What was prepared before is used again if nothing
changed. Safe to interrupt: a half-written cache is never used. Training does this by itself when it has to.

  ringmaster data prepare
  ringmaster data prepare data=text data.path=my/texts model=nanochat_d6
"""


def main(argv: list[str]) -> int:
    if not argv or "-h" in argv or "--help" in argv:
        print(_HELP)
        return 0
    if argv[0] != "prepare":
        raise UserError(f"there is no ringmaster data {argv[0]}; known: prepare")

    from rich.console import Console

    from ringmaster_dist.config.build import build_rows
    from ringmaster_dist.config.compose import load
    from ringmaster_dist.observe.console import ProgressLine

    line = ProgressLine(Console(file=sys.stderr))
    try:
        rows = build_rows(load(["problem=nanochat", *argv[1:]]), line.show)
    finally:
        line.close()
    counts = rows.manifest["rows"]
    print(
        f"{rows.folder}: {counts['train']:,} training and {counts['validation']:,} validation rows of "
        f"{rows.manifest['context'] + 1} tokens, vocabulary {rows.manifest['vocab_size']:,}, "
        f"fingerprint {rows.fingerprint}"
    )
    return 0
