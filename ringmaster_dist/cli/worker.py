"""``ringmaster worker server=HOST:PORT [workers=N] [key=value ...]``: workers of this machine, supervised if wanted."""

from __future__ import annotations

import os
import sys
import time

from ringmaster_dist.config.errors import UserError

_TICK_SECONDS = 0.05
_LAST_SECONDS = 2.0
_HELP = """ringmaster worker server=HOST:PORT [workers=N] [restarts=10] [key=value ...]

Adds workers of this machine to the run that is served at HOST:PORT. Without workers= it is one, in this process. With
it they are processes of their own, one per GPU if N is their number, and one that dies is started again alone.

  workers    how many
  restarts   how often each of them is started again; one that ended with code 2, a mistake, is not   (10)

The other keys are those of each worker:

"""


def main(argv: list[str]) -> int:
    from ringmaster_dist.worker import __main__ as worker

    given = dict(word.partition("=")[::2] for word in argv if word.startswith(("workers=", "restarts=")))
    rest = [word for word in argv if not word.startswith(("workers=", "restarts="))]
    if "-h" in argv or "--help" in argv:
        print(_HELP + worker.HELP.partition("\n\n")[2])
        return 0
    if not given:
        code = worker.main(argv)
        sys.stderr.flush()
        os._exit(code)  # without the interpreter's farewell: TensorPipe's threads may hang in it
    for key in given:
        if not given[key].isdecimal() or (key == "workers" and int(given[key]) < 1):
            raise UserError(f"{key}={given[key]}: must be a number, and workers at least 1")
    try:
        worker.parse(rest)  # report a mistake once, not once per worker
    except ValueError as error:
        raise UserError(str(error)) from error
    return _supervise(rest, int(given.get("workers", 1)), int(given.get("restarts", 10)))


def _supervise(argv: list[str], workers: int, restarts: int) -> int:
    """Until all have ended; the worst exit code."""
    from ringmaster_dist.cli.signals import stop_signals
    from ringmaster_dist.cli.supervisor import Place, finish, prepare_fork_server

    prepare_fork_server()
    places = [Place(f"worker-{index}", _work, argv, index, most_restarts=restarts) for index in range(workers)]
    try:
        with stop_signals() as asked:
            while not asked() and not all(place.has_ended for place in places):
                for place in places:
                    if not place.has_ended:
                        place.tend()
                time.sleep(_TICK_SECONDS)
            if asked():
                for place in places:
                    if place.process is not None:
                        place.process.terminate()
    finally:
        finish(places, _LAST_SECONDS)
    return max(place.last_code or 0 for place in places)


def _work(name: str, argv: list[str], index: int) -> None:
    """What each process does."""
    from ringmaster_dist.cli.supervisor import become, leave
    from ringmaster_dist.worker.__main__ import main as work

    become(name)
    os.environ["LOCAL_RANK"] = str(index)  # which GPU is its own
    leave(work(argv))
