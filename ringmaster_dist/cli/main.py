"""``ringmaster COMMAND ...``: the table of commands, and the way from a command line to one of them.

The module of a command NAME has two functions. ``NAME_options(parser)`` declares what its command line may contain.
``run_NAME(arguments, overrides)`` does the work and returns the exit code. Its docstring is the help text, and begins
with a line of usage. A module is imported when its command is called, and it imports torch only inside ``run_NAME``, so
that a help text or a mistake is shown at once.
"""

from __future__ import annotations

import importlib
import sys
from typing import NamedTuple

from ringmaster_dist import __version__
from ringmaster_dist.cli.parser import Parser, did_you_mean
from ringmaster_dist.config.errors import UserError, exit_code_of
from ringmaster_dist.process_settings import prepare_environment


class Command(NamedTuple):
    name: str
    module: str
    sentence: str
    overrides: bool = False  # whether it takes words for Hydra, such as method.eta=0.1
    listed_config: str = ""  # the primary configuration whose keys the help text lists
    explains_itself: bool = False  # whether it shows its help text when it is called without arguments


COMMANDS = (
    Command("train", "train", "train in real time with a server and workers over torch RPC", True, "train"),
    Command("worker", "worker", "add workers of this machine to a run whose server is on another machine"),
    Command("runs", "run_list", "list runs, compare them, or remove them"),
    Command("report", "runs", "draw figures and a page of what runs did"),
    Command("watch", "runs", "show a run in the browser while it continues"),
    Command("dashboard", "runs", "make the wandb workspace for a run's project"),
    Command("replay", "runs", "recompute a real run from its trace and compare the bits"),
    Command("eval", "weights", "evaluate a run's weights"),
    Command("sample", "weights", "generate text with a trained model"),
    Command("export", "weights", "write a run's weights to a safetensors file"),
    Command("data", "inputs", "prepare a corpus, or verify one", True, explains_itself=True),
    Command("profile", "inputs", "measure the gradient time of this machine's devices", True),
    Command("simulate", "simulate", "play a run of thousands of workers in virtual time on one core", True, "config"),
    Command("theory", "cluster", "compute the paper's time bounds for a cluster", True),
    Command("advise", "cluster", "simulate methods and thresholds on a cluster and recommend one", True),
    Command("experiment", "experiment", "run an experiment of the paper, or one of our own", explains_itself=True),
    Command("doctor", "doctor", "check this machine, or a server, for common faults of a cluster"),
    Command("bench", "bench", "measure this system versus its alternatives"),
    Command("chaos", "chaos", "train under kills, stops, disconnects, NaNs and restarts, and report the cost", True),
)


def main(argv: list[str] | None = None, *, is_quiet: bool = False) -> int:
    """Runs one command. Returns the exit code: 2 for a mistake, which is one line on stderr unless ``is_quiet``."""
    prepare_environment()
    return exit_code_of(lambda: _run(sys.argv[1:] if argv is None else argv), is_quiet=is_quiet)


def _run(words: list[str]) -> int:
    if words and words[0] in ("-V", "--version"):
        print(__version__)
        return 0
    if words[:1] == ["help"]:
        words = [*words[1:2], "--help"]
    if not words or words[0] in ("-h", "--help"):
        print(_usage())
        return 0
    command = _command(words[0])
    module = importlib.import_module(f"ringmaster_dist.cli.{command.module}")
    run = getattr(module, f"run_{command.name}")
    parser = Parser(command.name, run.__doc__)
    getattr(module, f"{command.name}_options")(parser)
    if {"-h", "--help"} & set(words) or (command.explains_itself and len(words) == 1):
        print(parser.format_help())
        if command.listed_config:
            from ringmaster_dist.config.describe import keys_and_choices

            print(keys_and_choices(command.listed_config))
        return 0
    arguments, overrides = parser.read(words[1:], takes_overrides=command.overrides)
    return int(run(arguments, overrides))


def _command(name: str) -> Command:
    for command in COMMANDS:
        if command.name == name:
            return command
    names = [command.name for command in COMMANDS]
    raise UserError(f"there is no command {name!r}; {did_you_mean(name, names)}known: {', '.join(names)}")


def _usage() -> str:
    lines = [
        f"ringmaster {__version__}: asynchronous Muon on machines of unequal speed",
        "",
        "  ringmaster COMMAND [key=value ...]",
        "",
        *(f"  {command.name:<10} {command.sentence}" for command in COMMANDS),
        "",
        "  ringmaster COMMAND --help   says more",
        "",
        "Try:  ringmaster simulate method=ringmaster method.threshold=8 cluster.workers=64",
    ]
    return "\n".join(lines)
