"""``ringmaster COMMAND [hydra overrides]``. Imports a command's module only when it is called."""

from __future__ import annotations

import importlib
import sys

from ringmaster_dist import __version__
from ringmaster_dist.config.errors import UserError, exit_code_of
from ringmaster_dist.transport.process_settings import prepare_environment

COMMANDS = {
    "train": "train in real time: a server and workers of unequal pace, over torch RPC",
    "worker": "add workers of this machine to a run that is served elsewhere",
    "report": "draw what runs did: figures and a page",
    "watch": "show a run that is going on in the browser",
    "dashboard": "make the wandb workspace for a run's project",
    "replay": "recompute a real run from its trace and compare the bits",
    "eval": "evaluate a run's weights",
    "sample": "generate text with a trained model",
    "export": "write a run's weights to a safetensors file",
    "data": "prepare a corpus",
    "profile": "measure the gradient time of this machine's devices",
    "simulate": "play a run in virtual time: thousands of workers on one core",
    "theory": "the paper's time bounds for a cluster: useful workers, seconds per update",
    "advise": "simulate methods and thresholds on a cluster and recommend one",
    "experiment": "reproduce an experiment of the paper: grids, figure, summary",
    "doctor": "look for what commonly breaks a cluster, on this machine or towards a server",
    "bench": "measure this system beside its alternatives",
    "chaos": "train under kills, stops, disconnects, NaNs and server restarts, and account for it",
}


def usage() -> str:
    lines = [
        f"ringmaster {__version__}: asynchronous Muon on machines of unequal speed",
        "",
        "  ringmaster COMMAND [key=value ...]",
        "",
        *(f"  {name:<10} {text}" for name, text in COMMANDS.items()),
        "",
        "  ringmaster COMMAND --help   says more",
        "",
        "Try:  ringmaster simulate method=ringmaster method.threshold=8 cluster.workers=64",
    ]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    prepare_environment()
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    if arguments[0] in ("-V", "--version"):
        print(__version__)
        return 0
    return exit_code_of(lambda: _run(*arguments))


def _run(command: str, *arguments: str) -> int:
    if command not in COMMANDS:
        raise UserError(f"there is no command {command!r}; known: {', '.join(COMMANDS)}")
    return int(importlib.import_module(f"ringmaster_dist.cli.{command}").main(list(arguments)))
