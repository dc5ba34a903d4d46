"""``ringmaster worker server=HOST:PORT [workers=N] [key=value ...]``: workers of this machine, supervised if wanted."""

from __future__ import annotations

import os
import sys

from ringmaster_dist.config.errors import UserError

_HELP = """ringmaster worker server=HOST:PORT [workers=N] [restarts=10] [key=value ...]

Adds workers of this machine to the run that is served at HOST:PORT. Without workers= it is one, in this process. With
it they are processes of their own, one per GPU if N is their number, and one that dies is started again alone.

  workers    how many
  restarts   how often each of them is started again; one that ended with code 2, a mistake, is not   (10)

The other keys are those of each worker:

"""


def main(argv: list[str]) -> int:
    from ringmaster_dist.runtime.supervisor import supervise_workers
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
    return supervise_workers(rest, int(given.get("workers", 1)), int(given.get("restarts", 10)))
