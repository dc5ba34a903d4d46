"""One rank of a torchrun. Rank 0 is the server, and every other rank is one of its workers.

Ranks on the machine of rank 0 find the server through a `Rendezvous` file. A rank on another machine needs the server's
address as server.host and server.port, and the token as RINGMASTER_TOKEN_FILE or RINGMASTER_TOKEN.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from typing import Any

from ringmaster_dist.addresses import is_loopback, joined
from ringmaster_dist.config.build import cache_folder
from ringmaster_dist.config.compose import compose, to_typed
from ringmaster_dist.config.errors import UserError
from ringmaster_dist.config.secret import given_token
from ringmaster_dist.files import open_private
from ringmaster_dist.logs import set_up_logging
from ringmaster_dist.meeting import meeting_file
from ringmaster_dist.observe.closing import Stdout
from ringmaster_dist.observe.console import LiveTable
from ringmaster_dist.observe.report import show_summary
from ringmaster_dist.runtime.preparation import RunIsOver, prepare

_LOOK_SECONDS = 0.05


def take_part(argv: list[str]) -> int:
    """Serves or works, by the rank that torchrun has given. Returns the exit code."""
    set_up_logging()
    rank, local_rank = int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
    workers = int(os.environ["WORLD_SIZE"]) - 1
    if workers == 0 and "cluster.local_workers=0" not in argv:
        raise UserError(
            "rank 0 serves and the others work: use --nproc-per-node=2 or more, "
            "or cluster.local_workers=0 for a server whose workers come from elsewhere"
        )
    if rank != local_rank:
        return _work_elsewhere(argv, rank)
    rendezvous = Rendezvous()
    return _serve(argv, workers, rendezvous) if rank == 0 else _work(rank, rendezvous)


def _serve(argv: list[str], workers: int, rendezvous: Rendezvous) -> int:
    from ringmaster_dist.runtime.server_process import StopOnceServing, serve
    from ringmaster_dist.runtime.supervisor import worker_arguments

    numbers = [f"cluster.workers={workers}"] if workers else []
    try:
        config, config_text, directory = prepare(
            [*_resumed(argv, rendezvous.known().get("directory", "")), *numbers], "torchrun -m ringmaster_dist.train"
        )
    except RunIsOver as over:
        print(over)
        rendezvous.publish({"server": {"over": True}})
        return 0
    rendezvous.publish({"directory": str(directory.path)})
    token = directory.read("token")

    def announce(address: str) -> None:
        stop.begin()
        arguments = [worker_arguments(config, slot) for slot in range(workers)]
        cache = str(cache_folder(config))
        rendezvous.publish({"server": {"address": address, "token": token, "arguments": arguments, "cache": cache}})

    budget = config.budget
    table = LiveTable(
        directory.path, Stdout(), budget.updates, budget.seconds,
        awaited=config.cluster.workers, local_steps=config.local.steps,
    )  # fmt: skip
    try:
        with StopOnceServing() as stop:
            serve(
                config, config_text, directory, token, announce=announce, should_stop=lambda: stop.asked(),
                look=table.update,
            )  # fmt: skip
    finally:
        table.close()
    rendezvous.publish({"server": {"over": True}})  # this removes the token from the file
    stopped = stop.asked.exit_code
    return show_summary(directory, report=config.run.report and not stopped) or stopped


def _resumed(argv: list[str], begun: str) -> list[str]:
    """The overrides that resume the run in ``begun``, which an earlier start of the same torchrun has begun.

    torchrun restarts all ranks when one has died (``--max-restarts``).
    """
    if not begun or any(word.startswith("resume=") for word in argv):
        return argv
    rest = [word for word in argv if word.partition("=")[0] not in ("run.dir", "run.overwrite")]
    return [*rest, f"run.dir={begun}", "resume=auto"]


def _work(rank: int, rendezvous: Rendezvous) -> int:
    """Works on the machine of rank 0."""
    from ringmaster_dist.worker.process import work

    server = rendezvous.wait_for("server")
    if server.get("over"):
        return 0
    os.environ["RINGMASTER_CACHE"] = server["cache"]
    # The address is read at every attempt to connect, because a restarted server may listen elsewhere.
    return work(
        lambda: str(rendezvous.known()["server"].get("address", server["address"])), server["token"], slot=rank - 1,
        **server["arguments"][rank - 1],
    )  # fmt: skip


def _work_elsewhere(argv: list[str], rank: int) -> int:
    """Works on another machine than that of rank 0."""
    from ringmaster_dist.runtime.supervisor import worker_arguments
    from ringmaster_dist.worker.process import work

    config, token = to_typed(compose(argv, "train"), real_time=True), given_token()
    if is_loopback(config.server.host) or not config.server.port or not token:
        raise UserError(
            f"rank {rank} is on another machine than rank 0: give every rank server.host=ADDRESS server.port=PORT of "
            "rank 0's machine, and the token by RINGMASTER_TOKEN_FILE or RINGMASTER_TOKEN"
        )
    os.environ["RINGMASTER_CACHE"] = str(cache_folder(config))
    where = joined(config.server.host, config.server.port)
    return work(where, token, slot=rank - 1, **worker_arguments(config, rank - 1))


class Rendezvous:
    """A file through which the ranks of one torchrun on one machine find the server. Rank 0 writes, the others read.

    torchrun's own store would not do, because anybody who reaches its port can read and write it. The file is private
    to the user, because it holds the token. It is named after the torchrun process, so it survives a restart of the
    ranks and tells rank 0 which run to resume.
    """

    def __init__(self) -> None:
        self._path = meeting_file("torchrun", ".json")

    def publish(self, facts: Mapping[str, Any]) -> None:
        """Adds ``facts`` to the file, or replaces those of the same key."""
        temporary = self._path.with_suffix(".new")
        with open_private(temporary, "w") as file:
            json.dump({**self.known(), **facts}, file)
        temporary.replace(self._path)

    def known(self) -> dict[str, Any]:
        """Everything that has been published so far."""
        try:
            facts: dict[str, Any] = json.loads(self._path.read_text())
        except FileNotFoundError:
            return {}
        return facts

    def wait_for(self, key: str) -> Any:
        """Blocks until the key is published. torchrun ends this rank if rank 0 fails before that."""
        while key not in (facts := self.known()):
            time.sleep(_LOOK_SECONDS)
        return facts[key]
