"""``ringmaster watch RUN_DIR [port=0] [host=127.0.0.1]``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from ringmaster_dist.config.errors import UserError

if TYPE_CHECKING:
    from ringmaster_dist.observe.watch import Watcher

_HELP = """ringmaster watch RUN_DIR [port=N] [host=ADDRESS]

Serves the page of ringmaster report for a run that is going on, and keeps it up to date. It only reads the run
directory; the run does not notice. Ctrl+C ends it.

  port=0           a free one, or the one you say
  host=127.0.0.1   who may look: this machine alone, unless you say otherwise

  ringmaster train watch=true   does the same while it trains
"""


def main(argv: list[str]) -> int:
    if "-h" in argv or "--help" in argv:
        print(_HELP)
        return 0
    words = [word for word in argv if "=" not in word and not word.startswith("-")]
    given = dict(word.split("=", 1) for word in argv if "=" in word)
    if len(words) != 1 or given.keys() - {"port", "host"} or any(word.startswith("-") for word in argv):
        raise UserError(
            "ringmaster watch takes a run directory, port= and host=, such as: ringmaster watch runs/a port=8000"
        )
    port = given.get("port", "0")
    if not port.isdigit() or int(port) > 65535:
        raise UserError(f"port={port}: must be between 0 (any free one) and 65535")

    from ringmaster_dist.runtime.processes import stop_signals

    directory = Path(words[0])
    if not (directory / "config.yaml").is_file():
        raise UserError(f"{directory} holds no run (no config.yaml): give the run.dir of a train or simulate")
    watcher = open_watcher(directory, int(port), given.get("host", "127.0.0.1"))
    print(f"{directory} is shown at {watcher.url} (Ctrl+C ends this)", flush=True)
    with stop_signals() as asked:
        while not asked():
            time.sleep(0.1)
    watcher.close()
    return 0


def open_watcher(directory: Path, port: int = 0, host: str = "127.0.0.1") -> Watcher:
    """Raises UserError if the port cannot be had."""
    from ringmaster_dist.observe.watch import Watcher

    try:
        return Watcher(directory, port, host)
    except OSError as error:
        reason = error.strerror or error
        raise UserError(
            f"host={host} port={port} cannot be listened on ({reason}): choose another, or port=0"
        ) from error
