"""One rank of a torchrun: rank 0 is the server, every other rank a worker of it.

Ranks on the machine of rank 0 learn from a file where the server is (see meeting.py). A rank on another machine needs
the server's address as server.host and server.port, and the token as RINGMASTER_TOKEN_FILE or RINGMASTER_TOKEN.
"""

from __future__ import annotations

import os

from ringmaster_dist.config.compose import compose, to_typed
from ringmaster_dist.config.errors import UserError
from ringmaster_dist.config.secret import given_token
from ringmaster_dist.logs import log_as_told
from ringmaster_dist.observe.report import show_summary
from ringmaster_dist.runtime.meeting import Meeting
from ringmaster_dist.runtime.preparation import RunIsOver, prepare
from ringmaster_dist.transport.addresses import is_loopback, joined


def take_part(argv: list[str]) -> int:
    """Serves or works, by the rank torchrun has given. Returns the exit code."""
    log_as_told()
    rank, local_rank = int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
    workers = int(os.environ["WORLD_SIZE"]) - 1
    if workers == 0 and "cluster.local_workers=0" not in argv:
        raise UserError(
            "rank 0 serves and the others work: use --nproc-per-node=2 or more, "
            "or cluster.local_workers=0 for a server whose workers come from elsewhere"
        )
    if rank != local_rank:
        return _work_elsewhere(argv, rank)
    meeting = Meeting()
    return _serve(argv, workers, meeting) if rank == 0 else _work(rank, meeting)


def _work(rank: int, meeting: Meeting) -> int:
    from ringmaster_dist.worker.__main__ import work

    server = meeting.find("server")
    if server.get("over"):
        return 0
    # Asked at every attempt to connect: after a restart the server may listen elsewhere.
    return work(
        lambda: str(meeting.known()["server"].get("address", server["address"])), server["token"], slot=rank - 1,
        **server["arguments"],
    )  # fmt: skip


def _work_elsewhere(argv: list[str], rank: int) -> int:
    """On a machine that rank 0 is not on."""
    from ringmaster_dist.runtime.supervisor import worker_arguments
    from ringmaster_dist.worker.__main__ import work

    config, token = to_typed(compose(argv, "train"), real_time=True), given_token()
    if is_loopback(config.server.host) or not config.server.port or not token:
        raise UserError(
            f"rank {rank} is on another machine than rank 0: give every rank server.host=ADDRESS server.port=PORT of "
            "rank 0's machine, and the token by RINGMASTER_TOKEN_FILE or RINGMASTER_TOKEN"
        )
    where = joined(config.server.host, config.server.port)
    return work(where, token, slot=rank - 1, **worker_arguments(config))


def _serve(argv: list[str], workers: int, meeting: Meeting) -> int:
    from ringmaster_dist.runtime.server_process import serve
    from ringmaster_dist.runtime.signals import stop_signals
    from ringmaster_dist.runtime.supervisor import worker_arguments

    numbers = [f"cluster.workers={workers}"] if workers else []
    try:
        config, config_text, directory = prepare([*_resumed(argv, meeting.known().get("directory", "")), *numbers])
    except RunIsOver as over:
        print(over)
        meeting.publish({"server": {"over": True}})
        return 0
    meeting.publish({"directory": str(directory.path)})
    token = directory.read("token")

    def announce(address: str) -> None:
        meeting.publish({"server": {"address": address, "token": token, "arguments": worker_arguments(config)}})

    with stop_signals() as asked:
        serve(config, config_text, directory, token, announce=announce, should_stop=asked)
    meeting.publish({"server": {"over": True}})  # in place of the token
    return show_summary(directory, report=config.run.report)


def _resumed(argv: list[str], begun: str) -> list[str]:
    """torchrun starts all ranks again when one has died (``--max-restarts``): then the run it has begun is resumed."""
    if not begun or any(word.startswith("resume=") for word in argv):
        return argv
    rest = [word for word in argv if word.partition("=")[0] not in ("run.dir", "run.overwrite")]
    return [*rest, f"run.dir={begun}", "resume=auto"]
