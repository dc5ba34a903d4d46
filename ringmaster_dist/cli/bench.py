"""``ringmaster bench [NAME ...]``."""

from __future__ import annotations

import importlib
import sys
import time

from ringmaster_dist.config.errors import UserError

BENCHES = {
    "simulator": "the paper's quadratic at full size, in virtual time",
    "update": "one server update of the paper's model, beside torch.optim.Muon",
    "gradient": "a gradient of the paper's model, beside a plain loop over the same module",
    "exchange": "a push and the snapshot that comes back, beside the same bytes over TCP, gloo, and Ray if installed",
    "scale": "how large a cluster one server carries, from measured updates, simulated workers and assumed links",
    "server": "updates per second with many workers pushing, beside one over the time of an update",
    "time-to-loss": "seconds to a validation loss on paced workers, beside DistributedDataParallel and every method",
    "memory": "the most a server and a worker take, beside what they cannot do without",
    "efficiency": "gradients delivered by paced workers, beside the sum of their rates; interruption",
    "overhead": "what measuring a run costs the server, beside not measuring it",
}

_HELP = """ringmaster bench [NAME ...] [--quick] [--json]

Measures this system beside its alternatives, in the same run; where it repeats, the best, with the worst beside it.
Without a name, all of them.

{benches}

  --quick   fewer repetitions, shorter runs
  --json    one line of JSON per bench
  --help    this text
"""


def main(argv: list[str]) -> int:
    if "-h" in argv or "--help" in argv:
        print(_HELP.format(benches="\n".join(f"  {name:<12} {text}" for name, text in BENCHES.items())))
        return 0
    options = {word for word in argv if word.startswith("-")}
    names = [word for word in argv if not word.startswith("-")] or list(BENCHES)
    if unknown := options - {"--quick", "--json"}:
        raise UserError(f"there is no option {sorted(unknown)[0]}; see ringmaster bench --help")
    if missing := [name for name in names if name not in BENCHES]:
        raise UserError(f"there is no bench {missing[0]!r}; known: {', '.join(BENCHES)}")
    began = time.monotonic()
    for name in names:
        module = importlib.import_module(f"ringmaster_dist.bench.{name.replace('-', '_')}")
        module.run("--quick" in options, "--json" in options)
    print(f"{len(names)} benches in {(time.monotonic() - began) / 60:.1f} minutes", file=sys.stderr)
    return 0
