"""``ringmaster bench``."""

from __future__ import annotations

import importlib
import sys
import time
from argparse import Namespace

from ringmaster_dist.cli.parser import Parser
from ringmaster_dist.config.errors import UserError

BENCHES = {
    "simulator": "the paper's quadratic at full size, in virtual time",
    "update": "one server update of the paper's model, versus torch.optim.Muon",
    "gradient": "a gradient of the paper's model, versus a plain loop over the same module",
    "exchange": "a push and the snapshot that comes back, versus the same bytes over TCP, gloo, and Ray if installed",
    "scale": "how large a cluster one server carries, from measured updates, simulated workers and assumed links",
    "server": "updates per second with many workers pushing, versus one over the time of an update",
    "time-to-loss": "seconds to a validation loss on paced workers, versus DistributedDataParallel and every method",
    "memory": "the peak memory of a server and a worker, versus what they cannot do without",
    "efficiency": "gradients delivered by paced workers, versus the sum of their rates; interruption",
    "overhead": "what measuring a run costs the server, versus not measuring it",
}


def bench_options(parser: Parser) -> None:
    parser.add_argument("names", metavar="NAME", nargs="*", help="which benches to run (all)")
    parser.switch("--quick", help="fewer repetitions and shorter runs")
    parser.switch("--json", help="one line of JSON per bench")
    parser.epilog = "benches:\n" + "\n".join(f"  {name:<13} {text}" for name, text in BENCHES.items())


def run_bench(arguments: Namespace, overrides: list[str]) -> int:
    """ringmaster bench [NAME ...] [--quick] [--json]

    Measures this system versus its alternatives, in the same run. A bench that repeats shows the best and the worst.
    """
    names = arguments.names or list(BENCHES)
    if unknown := [name for name in names if name not in BENCHES]:
        raise UserError(f"there is no bench {unknown[0]!r}; known: {', '.join(BENCHES)}")
    began = time.monotonic()
    for name in names:
        module = importlib.import_module(f"ringmaster_dist.bench.{name.replace('-', '_')}")
        module.run(arguments.quick, arguments.json)
    print(f"{len(names)} benches in {(time.monotonic() - began) / 60:.1f} minutes", file=sys.stderr)
    return 0
