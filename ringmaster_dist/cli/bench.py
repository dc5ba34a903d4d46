"""``ringmaster bench``."""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from ringmaster_dist.bench import BENCHES, LONG, ON_DEVICES, run
from ringmaster_dist.cli.parser import Parser, several, whole
from ringmaster_dist.config.errors import UserError


def bench_options(parser: Parser) -> None:
    parser.add_argument("names", metavar="NAME", nargs="*", help="which benches to run (default: all)")
    parser.setting(
        "device=NAME", f"where updates are computed, such as cuda:0; for {' and '.join(ON_DEVICES)}", str, ""
    )
    parser.setting("profile=FILE", "scale: the workers are the devices in this file of ringmaster profile, and not the "
                   "paper's GPUs", Path)  # fmt: skip
    parser.setting("clusters=A,B", "time-to-loss: only on these clusters, such as linear8", several(str))
    parser.setting("contenders=A,B", "time-to-loss: only these, such as ringmaster,ddp", several(str))
    parser.setting("seeds=N", "time-to-loss: how many seeds each contender trains with (default: 3)", whole(1))
    parser.setting("dir=DIR", "time-to-loss: where trials are kept and found again (default: runs/time-to-loss)", Path)
    parser.switch("--quick", help="fewer repetitions and shorter runs")
    parser.switch("--json", help="one line of JSON per bench")
    parser.epilog = "benches:\n" + "\n".join(f"  {name:<13} {text}" for name, text in BENCHES.items())


def run_bench(arguments: Namespace, overrides: list[str]) -> int:
    """ringmaster bench [NAME ...] [device=NAME] [profile=FILE] [clusters=A,B] [contenders=A,B] [--quick] [--json]

    Measures this system versus its alternatives, in the same run. A bench that repeats shows the best and the worst.
    """
    names = arguments.names or list(BENCHES)
    if unknown := [name for name in names if name not in BENCHES]:
        raise UserError(f"there is no bench {unknown[0]!r}; known: {', '.join(BENCHES)}")
    settings: dict[str, Any] = {}
    if arguments.device:
        from ringmaster_dist import devices

        devices.require(arguments.device)
        if other := [name for name in names if name not in ON_DEVICES]:
            raise UserError(
                f"device={arguments.device}: {other[0]} takes no device, only {' and '.join(ON_DEVICES)} do"
            )
        settings["device"] = arguments.device
    if arguments.profile:
        if names != ["scale"]:
            raise UserError(f"profile={arguments.profile} is for ringmaster bench scale only")
        settings["profile"] = arguments.profile
    settings |= _of_race(arguments, names)
    began = time.monotonic()
    for name in names:
        quick = arguments.quick or (name in LONG and name not in arguments.names)
        run(name, quick=quick, as_json=arguments.json, **settings)
    print(f"{len(names)} benches in {(time.monotonic() - began) / 60:.1f} minutes", file=sys.stderr)
    return 0


def _of_race(arguments: Namespace, names: list[str]) -> dict[str, Any]:
    """The settings of time-to-loss that were given."""
    known = {"clusters": "clusters", "contenders": "contenders", "seeds": "seeds", "dir": "folder"}
    given = {name: getattr(arguments, name) for name in known if getattr(arguments, name) is not None}
    if given and (names != ["time-to-loss"] or arguments.quick):
        raise UserError(f"{next(iter(given))}= is for ringmaster bench time-to-loss only, without --quick")
    return {known[name]: value for name, value in given.items()}
