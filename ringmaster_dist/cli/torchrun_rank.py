"""One rank of a torchrun: rank 0 is the server, every other rank a worker of it."""

from __future__ import annotations

import os
import secrets

from ringmaster_dist.cli.train import prepare, show_summary
from ringmaster_dist.config.errors import UserError

_FIND_SECONDS = 120.0


def main(argv: list[str]) -> int:
    from ringmaster_dist.transport import rendezvous

    rank = int(os.environ["RANK"])
    if int(os.environ["WORLD_SIZE"]) < 2:
        raise UserError("rank 0 serves and the others work: use --nproc-per-node=2 or more")
    if rank > 0:
        from ringmaster_dist.worker.__main__ import work

        address, token = rendezvous.find(_FIND_SECONDS)
        return work(address, token, slot=rank - 1)

    from ringmaster_dist.cli.serve import serve
    from ringmaster_dist.cli.signals import stop_signals

    workers = int(os.environ["WORLD_SIZE"]) - 1
    config, config_text, directory = prepare([*argv, f"cluster.workers={workers}"])
    token = secrets.token_hex(16)
    directory.write_secret("token", token)
    stores = []
    with stop_signals() as asked:
        serve(
            config,
            config_text,
            directory,
            token,
            announce=lambda address: stores.append(rendezvous.publish(address, token)),
            should_stop=asked,
        )
    show_summary(directory)
    return 0
