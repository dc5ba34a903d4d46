"""Commands that make what a run reads: data (the rows of a corpus) and profile (the gradient times of devices)."""

from __future__ import annotations

import json
import statistics
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringmaster_dist.cli.parser import Parser, whole
from ringmaster_dist.config.errors import UserError

if TYPE_CHECKING:
    from ringmaster_dist.config.schema import Config

_WARM_UPS = 3


def data_options(parser: Parser) -> None:
    parser.add_argument("action", metavar="ACTION", choices=["prepare"], help="the only action is prepare")


def run_data(arguments: Namespace, overrides: list[str]) -> int:
    """ringmaster data prepare [data=stdlib|text|climbmix] [model=...] [key=value ...]

    Tokenizes a corpus and packs it into rows once. Training maps the rows into memory. A corpus that was prepared
    before is used again if nothing changed. It is safe to interrupt, because a half-written cache is never used.
    Training does this automatically if needed.

    Examples
      ringmaster data prepare
      ringmaster data prepare data=text data.path=my/texts model=nanochat_d6
    """
    from ringmaster_dist.config.compose import load
    from ringmaster_dist.runtime.preparation import prepare_data

    rows = prepare_data(load(["problem=nanochat", *overrides]))
    counts = rows.manifest["rows"]
    print(
        f"{rows.folder}: {counts['train']:,} training and {counts['validation']:,} validation rows of "
        f"{rows.manifest['context'] + 1} tokens, vocabulary {rows.manifest['vocab_size']:,}, "
        f"fingerprint {rows.fingerprint}"
    )
    return 0


def profile_options(parser: Parser) -> None:
    parser.setting("output=FILE", "where to write", Path, "profile.json")
    parser.setting("steps=N", "how many gradients to time", whole(2), 100)


def run_profile(arguments: Namespace, overrides: list[str]) -> int:
    """ringmaster profile [output=FILE] [steps=N] [key=value ...]

    Measures the time of one gradient on each device of this machine, after 3 warm-ups. Each step is
    timed until the device has finished. The result is a JSON file. Simulations and paced runs take their times from it.

    Examples
      ringmaster profile problem=nanochat model=nanochat_d6 output=mine.json
      ringmaster simulate cluster.profile=file cluster.profile_file=mine.json
    """
    from ringmaster_dist import devices
    from ringmaster_dist.config.compose import load

    config = load(["problem=nanochat", *overrides])
    measured = [_measure(config, name, arguments.steps) for name in devices.available()]
    found = {"problem": config.problem.name, "model": config.model.name, "devices": measured}
    try:
        arguments.output.write_text(json.dumps(found, indent=2))
    except OSError as error:
        raise UserError(f"output={arguments.output} cannot be written ({error.strerror})") from error
    for device in measured:
        mean, std = 1e3 * device["seconds_mean"], 1e3 * device["seconds_std"]
        print(f"{device['device']:<8} {device['name']:<28} {mean:8.2f} ms, std {std:.2f}, "
              f"{device['tokens_per_second']:,.0f} tokens/s")  # fmt: skip
    print(f"written: {arguments.output}")
    return 0


def _measure(config: Config, device: str, steps: int) -> dict[str, Any]:
    """The seconds of a gradient on a device, as they stand in the JSON file."""
    import torch

    from ringmaster_dist import devices
    from ringmaster_dist.config.build import build_layout, build_problem

    torch.set_num_threads(config.cluster.threads)
    problem = build_problem(config, device)
    build_layout(config, problem)
    iterate = problem.initial(config.run.seed)
    seconds = []
    for step in range(_WARM_UPS + steps):
        began = time.perf_counter()
        problem.gradient(iterate, config.run.seed, 0, step)
        devices.finish(device)
        seconds.append(time.perf_counter() - began)
        if sys.stderr.isatty() and step % 10 == 0:
            print(f"\r{device}: step {step} of {_WARM_UPS + steps}", end="", file=sys.stderr)
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    kept = seconds[_WARM_UPS:]
    tokens = config.problem.batch * config.model.sequence_len if config.problem.name == "nanochat" else 0
    name = devices.title(device) + (f", {config.cluster.threads} thread(s)" if devices.is_cpu(device) else "")
    mean = statistics.mean(kept)
    return {"device": device, "name": name, "seconds_mean": mean, "seconds_std": statistics.stdev(kept),
            "tokens_per_second": tokens / mean, "steps": steps}  # fmt: skip
