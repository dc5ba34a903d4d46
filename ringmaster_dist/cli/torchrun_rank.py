"""One rank of a torchrun: rank 0 is the server, every other rank a worker of it."""

from __future__ import annotations

import os

from ringmaster_dist.cli.train import RunIsOver, prepare, show_summary
from ringmaster_dist.config.errors import UserError
from ringmaster_dist.logs import log_as_told

_STORE_SECONDS = 60.0
_FIND_SECONDS = 24 * 3600.0  # rank 0 may have data to prepare first; torchrun ends the others if it dies


def main(argv: list[str]) -> int:
    from ringmaster_dist.transport.rendezvous import Rendezvous

    log_as_told()
    rank = int(os.environ["RANK"])
    workers = int(os.environ["WORLD_SIZE"]) - 1
    if workers == 0 and "cluster.local_workers=0" not in argv:
        raise UserError(
            "rank 0 serves and the others work: use --nproc-per-node=2 or more, "
            "or cluster.local_workers=0 for a server whose workers come from elsewhere"
        )
    meeting = Rendezvous(_FIND_SECONDS if rank else _STORE_SECONDS)
    if rank > 0:
        from ringmaster_dist.worker.__main__ import work

        server = meeting.find()
        if server.get("over"):
            return 0
        # Asked at every attempt to connect: it may have begun to serve anew, elsewhere.
        return work(lambda: meeting.find()["address"], server["token"], slot=rank - 1, **server["timeouts"])

    from ringmaster_dist.cli.serve import serve
    from ringmaster_dist.cli.signals import stop_signals
    from ringmaster_dist.cli.supervisor import timeouts

    numbers = [f"cluster.workers={workers}"] if workers else []
    try:
        config, config_text, directory = prepare([*_going_on(argv, meeting.begun()), *numbers])
    except RunIsOver as over:
        print(over)
        meeting.publish({"over": True})
        return 0
    meeting.begin(str(directory.path))
    token = directory.read("token")

    def announce(address: str) -> None:
        meeting.publish({"address": address, "token": token, "timeouts": timeouts(config)})

    with stop_signals() as asked:
        serve(config, config_text, directory, token, announce=announce, should_stop=asked)
    show_summary(directory, report=config.run.report)
    return 0


def _going_on(argv: list[str], begun: str) -> list[str]:
    """torchrun starts all ranks again when one has died (``--max-restarts``): then the run it has begun goes on."""
    if not begun or any(word.startswith("resume=") for word in argv):
        return argv
    rest = [word for word in argv if word.partition("=")[0] not in ("run.dir", "run.overwrite")]
    return [*rest, f"run.dir={begun}", "resume=auto"]
