"""``ringmaster worker``."""

from __future__ import annotations

import os
from argparse import Namespace
from typing import Any

from ringmaster_dist.addresses import split
from ringmaster_dist.cli.parser import Parser, number, target_setting, whole
from ringmaster_dist.config.errors import UserError
from ringmaster_dist.config.schema import ServerConfig
from ringmaster_dist.config.secret import given_token
from ringmaster_dist.config.sizes import refuse_workers

TOKEN_HELP = "the file with the run's token, RUN_DIR/token; or set RINGMASTER_TOKEN_FILE or RINGMASTER_TOKEN"


def server_address(text: str) -> str:
    """Checks HOST:PORT."""
    try:
        split(text)
    except ValueError as error:
        raise ValueError(f"write server=HOST:PORT; RUN_DIR/address has it ({error})") from None
    return text


def _server(text: str) -> str:
    return text if text.startswith("@") else server_address(text)


def device_names(text: str) -> list[str]:
    """Checks that this machine has the devices."""
    from ringmaster_dist import devices

    names = text.split(",")
    for name in names:
        devices.require(name)
    return names


def _true_or_false(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError("write true or false")
    return text == "true"


def worker_options(parser: Parser) -> None:
    seconds = number(0)
    parser.setting("server=HOST:PORT", "where the server is, as in RUN_DIR/address on its machine. With server=@FILE, "
                   "FILE is read at every attempt to connect, for a server that may restart at another address",
                   _server)  # fmt: skip
    parser.setting("token_file=FILE", TOKEN_HELP, str, "")
    target_setting(parser)
    parser.setting("device=NAME[,...]", "where it computes, such as cuda:1 or cpu; workers=N take several in turn. "
                   "Without it, workers take the accelerators in turn, or the CPU if there is none",
                   device_names)  # fmt: skip
    parser.setting("tls=BOOL", "false means no encryption, for a server with server.tls=false", _true_or_false, "true")
    parser.setting("insecure=BOOL", "true works also where other users of this machine cannot be kept away from this "
                   "worker's memory", _true_or_false, "false")  # fmt: skip
    parser.setting("slot=N", "the place in the delay profile that sets its pace; -1 means its own id", whole(), -1)
    parser.setting("connect_seconds=S", "how long it waits for a connection", seconds, ServerConfig.connect_seconds)
    parser.setting(
        "call_seconds=S",
        "how long it waits for an answer before it connects again and retries",
        seconds,
        ServerConfig.call_seconds,
    )
    parser.setting("patience_seconds=S", "how long it looks for a server that is away before it gives up", seconds,
                   ServerConfig.patience_seconds)  # fmt: skip
    parser.setting(
        "group=BOOL",
        "true makes the processes of a torchrun one worker, whose gradients have their mean",
        _true_or_false,
        "false",
    )
    parser.setting("workers=N", "supervise N workers, each in a process of its own", whole(1))
    parser.setting(
        "restarts=N", "how often each is restarted, unless it ended with code 2, a mistake (default: 10)", whole(0)
    )


def run_worker(arguments: Namespace, overrides: list[str]) -> int:
    """ringmaster worker server=HOST:PORT [workers=N] [restarts=N] [key=value ...]

    Adds workers of this machine to the run that is served at HOST:PORT. A worker waits for a server that is not there
    yet or is away. The configuration comes from the server. Without workers= there is one worker, in this process.
    With workers=N there are N processes, one per accelerator if N is their number. A process that dies is restarted
    alone. device=cuda:0,cuda:1,cpu workers=3 has two GPUs and the CPU work in one run.

    python -m ringmaster_dist.worker is the same command. Under torchrun it is one worker per process, but torchrun
    restarts all G when one dies. launch/worker.sh starts one torchrun agent per worker.

      torchrun --standalone --nproc-per-node=G -m ringmaster_dist.worker server=HOST:PORT

    With group=true the G processes of a torchrun are one worker, which is a group. They compute different rows of one
    gradient, average it, and push it once.

    RINGMASTER_LOG=INFO says more. Exit code 0: the run is over. 1: the server is lost, or gradients cannot be computed
    here. 2: a mistake, or the server refuses this worker; the line on stderr says why.
    """
    if not arguments.server:
        raise UserError("server= is missing: write server=HOST:PORT; RUN_DIR/address has it")
    token = given_token(arguments.token_file)
    if not token:
        raise UserError("no token: give token_file=RUN_DIR/token or set RINGMASTER_TOKEN")
    if arguments.group and (arguments.workers is not None or arguments.restarts is not None):
        raise UserError(
            "group=true makes one worker of the ranks of a torchrun: leave workers= and restarts= out, and use its "
            "--nproc-per-node and --max-restarts"
        )
    refuse_workers(arguments.workers or 1, "workers", "start them on several machines")
    names = ("target", "tls", "insecure", "slot", "connect_seconds", "call_seconds", "patience_seconds")
    keywords: dict[str, Any] = {name: getattr(arguments, name) for name in names}
    named: list[str] = arguments.device or []

    from ringmaster_dist.devices import in_turn
    from ringmaster_dist.logs import set_up_logging
    from ringmaster_dist.runtime.processes import leave
    from ringmaster_dist.runtime.supervisor import supervise_workers
    from ringmaster_dist.worker.process import work, work_in_group
    from ringmaster_dist.worker.talk import Talk

    if arguments.workers is None and arguments.restarts is None:
        set_up_logging()
        device = in_turn(named, int(os.environ.get("LOCAL_RANK", 0)))
        keywords["talk"] = Talk(silent=False)
        leave((work_in_group if arguments.group else work)(arguments.server, token, device=device, **keywords))
    restarts = 10 if arguments.restarts is None else arguments.restarts
    return supervise_workers(arguments.server, token, keywords, arguments.workers or 1, restarts, named)
