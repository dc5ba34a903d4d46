"""``ringmaster profile``."""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from ringmaster_dist.cli.options import parse
from ringmaster_dist.config.compose import load
from ringmaster_dist.config.errors import UserError
from ringmaster_dist.config.schema import Config

_HELP = """ringmaster profile [output=profile.json] [steps=100] [key=value ...]

Measures the time of one gradient on each device of this machine: 3 warm-ups, then 100 steps, each waited for. The
result is a JSON file that simulations and paced runs take their times from:

  ringmaster profile problem=nanochat model=nanochat_d6 output=mine.json
  ringmaster simulate cluster.profile=file cluster.profile_file=mine.json
"""
_WARM_UPS = 3


def main(argv: list[str]) -> int:
    own = {"output": "profile.json", "steps": "100"}
    rest = []
    for word in argv:
        key, equals, value = word.partition("=")
        if equals and key in own:
            own[key] = value
        else:
            rest.append(word)
    overrides, show = parse(rest, "profile")
    if show == "help":
        print(_HELP)
        return 0
    if not own["steps"].isdigit() or int(own["steps"]) < 2:
        raise UserError(f"steps={own['steps']}: must be a whole number of at least 2")
    config = load(["problem=nanochat", *overrides])
    devices = [measure(config, device, int(own["steps"])) for device in _devices()]
    path = Path(own["output"])
    try:
        path.write_text(
            json.dumps({"problem": config.problem.name, "model": config.model.name, "devices": devices}, indent=2)
        )
    except OSError as error:
        raise UserError(f"output={path} cannot be written ({error.strerror})") from error
    for device in devices:
        mean, std = 1e3 * device["seconds_mean"], 1e3 * device["seconds_std"]
        print(f"{device['device']:<8} {device['name']:<28} {mean:8.2f} ms, std {std:.2f}, "
              f"{device['tokens_per_second']:,.0f} tokens/s")  # fmt: skip
    print(f"written: {path}")
    return 0


def _devices() -> list[str]:
    import torch

    return ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0))]


def measure(config: Config, device: str, steps: int) -> dict[str, Any]:
    """Seconds per gradient, each step synchronised."""
    import torch

    from ringmaster_dist.config.build import build_layout, build_problem

    torch.set_num_threads(config.cluster.threads)
    problem = build_problem(config, device)
    build_layout(config, problem)
    iterate = problem.initial(config.run.seed)
    seconds = []
    for step in range(_WARM_UPS + steps):
        began = time.perf_counter()
        problem.gradient(iterate, config.run.seed, 0, step)  # ends with a copy to host memory, which waits
        seconds.append(time.perf_counter() - began)
        if sys.stderr.isatty() and step % 10 == 0:
            print(f"\r{device}: step {step} of {_WARM_UPS + steps}", end="", file=sys.stderr)
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    kept = seconds[_WARM_UPS:]
    tokens = config.problem.batch * config.model.sequence_len if config.problem.name == "nanochat" else 0
    name = torch.cuda.get_device_name(device) if device != "cpu" else f"CPU, {config.cluster.threads} thread(s)"
    mean = statistics.mean(kept)
    return {
        "device": device,
        "name": name,
        "seconds_mean": mean,
        "seconds_std": statistics.stdev(kept),
        "tokens_per_second": tokens / mean,
        "steps": steps,
    }
