"""One rank of a torchrun: rank 0 is the server, every other rank a worker of it."""

from __future__ import annotations

import os
from pathlib import Path

from ringmaster_dist.cli.train import RunIsOver, prepare, show_summary
from ringmaster_dist.config.errors import UserError
from ringmaster_dist.logs import log_as_told

_FIND_SECONDS = 24 * 3600.0  # rank 0 may have data to prepare first; torchrun ends the others if it dies


def main(argv: list[str]) -> int:
    from ringmaster_dist.transport import rendezvous

    log_as_told()
    rank = int(os.environ["RANK"])
    workers = int(os.environ["WORLD_SIZE"]) - 1
    if workers == 0 and "cluster.local_workers=0" not in argv:
        raise UserError(
            "rank 0 serves and the others work: use --nproc-per-node=2 or more, "
            "or cluster.local_workers=0 for a server whose workers come from elsewhere"
        )
    if rank > 0:
        from ringmaster_dist.worker.__main__ import work

        server = rendezvous.find(_FIND_SECONDS)
        if server.get("over"):
            return 0
        return work(server["address"], server["token"], slot=rank - 1, **server["timeouts"])

    from ringmaster_dist.cli.serve import serve
    from ringmaster_dist.cli.signals import stop_signals
    from ringmaster_dist.cli.supervisor import timeouts

    numbers = [f"cluster.workers={workers}"] if workers else []
    try:
        config, config_text, directory = prepare([*_resumed_if_restarted(argv), *numbers])
    except RunIsOver as over:
        print(over)
        if workers:
            rendezvous.publish({"over": True})
        return 0
    token = directory.read("token")
    stores = []

    def announce(address: str) -> None:
        if workers:
            facts = {"address": address, "token": token, "timeouts": timeouts(config)}
            stores.append(rendezvous.publish(facts))

    with stop_signals() as asked:
        serve(
            config,
            config_text,
            directory,
            token,
            announce=announce,
            should_stop=asked,
        )
    show_summary(directory, report=config.run.report)
    return 0


def _resumed_if_restarted(argv: list[str]) -> list[str]:
    """torchrun starts all ranks again when one has died (``--max-restarts``): that run goes on in its directory."""
    first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    if first or any(word.startswith("resume=") for word in argv):
        return argv
    given = next((word.partition("=")[2] for word in argv if word.startswith("run.dir=")), "")
    if not given:
        raise UserError("torchrun has restarted the run, which can go on only if run.dir was given")
    return [f"resume={given}"] if (Path(given) / "config.yaml").exists() else argv
