"""Commands that make what a run reads: data (the rows of a corpus) and profile (the gradient times of devices)."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringmaster_dist.cli.parser import Parser, several, whole
from ringmaster_dist.cli.worker import device_names
from ringmaster_dist.config.errors import UserError

if TYPE_CHECKING:
    from ringmaster_dist.config.schema import Config


def data_options(parser: Parser) -> None:
    parser.add_argument("action", metavar="ACTION", choices=["prepare", "verify"], help="prepare or verify")


def run_data(arguments: Namespace, overrides: list[str]) -> int:
    """ringmaster data prepare|verify [data=stdlib|text|climbmix] [model=...] [key=value ...]

    prepare tokenizes a corpus and packs it into rows once. Training maps the rows into memory. A corpus that was
    prepared before is used again if nothing changed, which the size and the date of each file tell. It is safe to
    interrupt, because a half-written cache is never used. Training does this automatically if needed. The text is
    streamed, so it may be larger than the memory.

    verify reads every file of the corpus and every prepared row, and compares their checksums. It ends with code 1 if
    one differs.

    Examples
      ringmaster data prepare
      ringmaster data prepare data=text data.path=my/texts model=nanochat_d6
      ringmaster data verify data=text data.path=my/texts model=nanochat_d6
      ringmaster data prepare problem=nanochat_checkout problem.path=~/nanochat
    """
    from ringmaster_dist.config.compose import load
    from ringmaster_dist.runtime.preparation import prepare_data

    config = load(_about_text(overrides))
    if arguments.action == "verify":
        return _verify(config)
    rows = prepare_data(config)
    counts = rows.manifest["rows"]
    print(
        f"{rows.folder}: {counts['train']:,} training and {counts['validation']:,} validation rows of "
        f"{rows.manifest['context'] + 1} tokens, vocabulary {rows.manifest['vocab_size']:,}, "
        f"fingerprint {rows.fingerprint}"
    )
    return 0


def _verify(config: Config) -> int:
    from ringmaster_dist.config.build import build_recipe

    recipe = build_recipe(config)
    wrong = recipe.verify()
    for sentence in wrong:
        print(sentence)
    if not wrong:
        print(f"{len(recipe.sources):,} files and the rows in {recipe.folder()} are as they were prepared")
    return 1 if wrong else 0


def _about_text(overrides: list[str]) -> list[str]:
    """The overrides, with problem=nanochat if they name no problem."""
    is_named = any(word.startswith(("problem=", "experiment=")) for word in overrides)
    return overrides if is_named else ["problem=nanochat", *overrides]


def profile_options(parser: Parser) -> None:
    parser.setting("output=FILE", "where to write", Path, "profile.json")
    parser.setting("device=NAME[,...]", "only these devices, such as cuda:0,cpu", device_names)
    parser.setting("steps=N", "how many gradients to time on each device", whole(2), 100)
    parser.setting("merge=FILE,FILE", "measure nothing: write the devices of these files as one. A file that is named "
                   "twice counts twice", several(Path))  # fmt: skip


def run_profile(arguments: Namespace, overrides: list[str]) -> int:
    """ringmaster profile [output=FILE] [device=NAME,...] [steps=N] [merge=FILE,FILE] [key=value ...]

    Measures the time of one gradient on each device of this machine, the CPU and every accelerator, after 3 warm-ups.
    The devices are measured one after the other, so that none disturbs another. A step is timed from the iterate in
    host memory to the gradient in host memory, as a worker computes it. The CPU is measured with cluster.threads
    threads. The result is one JSON file. Simulations, paced runs, advise, theory and bench scale take their times
    from it. Workers take the times in turn. With merge=, the files of several machines become one cluster.

    Examples
      ringmaster profile problem=nanochat model=nanochat_d6 output=mine.json
      ringmaster profile merge=mine.json,mine.json,other.json output=cluster.json
      ringmaster simulate cluster.profile=file cluster.profile_file=cluster.json
      ringmaster advise file=cluster.json
      ringmaster bench scale profile=cluster.json
    """
    from ringmaster_dist.config.profile_file import merged, read_profile

    if arguments.merge:
        if overrides or arguments.device:
            raise UserError(f"merge= measures nothing, so {(overrides or ['device='])[0]} has no effect: leave it out")
        found = merged([read_profile(path, "merge") for path in arguments.merge])
    else:
        from ringmaster_dist import devices
        from ringmaster_dist.config.compose import load
        from ringmaster_dist.runtime.profiling import profile

        config = load(_about_text(overrides))
        found = profile(config, arguments.device or devices.available(), arguments.steps, _show_progress)
    try:
        arguments.output.write_text(json.dumps(found, indent=2) + "\n")
    except OSError as error:
        raise UserError(f"output={arguments.output} cannot be written ({error.strerror})") from error
    for device in found["devices"]:
        print(_shown(device))
    print(f"written: {arguments.output}")
    return 0


def _shown(device: dict[str, Any]) -> str:
    """A line about a device. A file of an older version does not have every figure."""
    mean, std = 1e3 * device["seconds_mean"], 1e3 * device.get("seconds_std", 0.0)
    line = f"{device.get('device', ''):<8} {device.get('name', ''):<28} {mean:8.2f} ms, std {std:.2f}"
    if rate := device.get("tokens_per_second", 0.0):
        line += f", {rate:,.0f} tokens/s"
    return line + (f", {device['host']}" if device.get("host") else "")


def _show_progress(device: str, step: int, steps: int) -> None:
    if not sys.stderr.isatty():
        return
    if step + 1 == steps:
        print("\r\033[K", end="", file=sys.stderr)
    elif step % 10 == 0:
        print(f"\r{device}: step {step} of {steps}", end="", file=sys.stderr)
