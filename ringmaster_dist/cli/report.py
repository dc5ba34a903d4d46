"""``ringmaster report RUN [RUN ...] [--out DIR]``."""

from __future__ import annotations

from pathlib import Path

from ringmaster_dist.cli.options import many

_HELP = """ringmaster report RUN_DIR [RUN_DIR ...] [--out DIR]

Draws what one or several runs did, real or simulated, finished, crashed or still going on: loss against time, updates
and tokens; share of gradients accepted; delays; what each worker did when; who contributed how much. Several runs are
laid over each other, named by the configuration keys in which they differ.

Writes report.html, one page that needs no network, and loss.png, delays.png, workers.png.

  --out DIR   where to (one run: RUN_DIR/report; several: ./report)
  --help      this text

Examples
  ringmaster report runs/a
  ringmaster report runs/compare/* --out comparison
"""


def main(argv: list[str]) -> int:
    if "-h" in argv or "--help" in argv:
        print(_HELP)
        return 0

    words, options = many(argv, {"--out": str}, "ringmaster report runs/a")

    from ringmaster_dist.observe.report import FOLDER, write_report

    directories = [Path(word) for word in words]
    folder = Path(options.get("--out") or (directories[0] / FOLDER if len(directories) == 1 else Path(FOLDER)))
    print("\n".join(str(path) for path in write_report(directories, folder)))
    return 0
