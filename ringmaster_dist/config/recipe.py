"""The recipe ``experiment=nanochat_depth``: every number of a run from one, the depth of the model.

nanochat has such a recipe for equal devices that take a step together. Its rules give the tokens to train on, the
batch, and how learning rate and decay follow from the batch. Here a gradient of one device takes a share of that batch,
and each gradient is an update. The speeds of the devices say which share, and which delays are normal.

A key that the user gives is not changed, and the numbers that depend on it follow.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf

from ringmaster_dist.config.errors import UserError
from ringmaster_dist.config.profile_file import read_profile
from ringmaster_dist.profiles import PROFILES, base_seconds

NAME = "nanochat_depth"
# What nanochat has measured at its reference depth, and its rules for other depths.
_REFERENCE_DEPTH = 12
_REFERENCE_BATCH = 1 << 19  # tokens
_BATCH_POWER = 0.383  # the batch grows with this power of the tokens
_TOKENS_PER_PARAMETER = 12
_MATRIX_RATE = 0.02
_DECAY, _FINAL_FRACTION = 0.65, 0.05
_WARMUP_STEPS = 40
_WEIGHT_DECAY = 0.28
_CAUTIOUS_SHARE = 0.5  # nanochat decays only coordinates that move towards zero, about half of them
# What was measured for this program; see docs/choosing.md.
_DELAYS_PER_WORKER = 2  # the threshold, with rows by speed
_OLDEST_BATCHES = 4  # an accepted gradient is at most so many of nanochat's batches old
_LEAST_FACTOR = 0.5  # of nanochat's step: what small models needed at 512 tokens
_EQUAL = 1.25  # devices whose times differ by less than this factor count as equal
_AT_ONCE = 16  # rows


class Choice(NamedTuple):
    """A number of the recipe, and why it is this number."""

    key: str
    value: Any
    reason: str


class _Scale(NamedTuple):
    """What follows from the depth alone."""

    depth: int
    width: int
    tokens: float  # to train on
    reference_tokens: float  # the same at the reference depth

    @property
    def batch(self) -> int:
        """The tokens of nanochat's batch, a power of two."""
        return 1 << round(math.log2(_REFERENCE_BATCH * (self.tokens / self.reference_tokens) ** _BATCH_POWER))


def from_depth(composed: DictConfig, given: Collection[str]) -> list[Choice]:
    """The choices of the recipe in the order of their use.

    A key that the user has ``given``, or that the chosen method does not have, is not among them.
    """
    scale = _scale(composed.model)
    cluster, workers = composed.cluster, int(composed.cluster.workers)
    times = _times(cluster)
    fastest_equivalent = sum(min(times) / seconds for seconds in times)
    is_unequal = not _speeds_are_known(cluster) or max(times) > _EQUAL * min(times)
    chosen: list[Choice] = []

    def choose(key: str, value: Any, reason: str) -> Any:
        section, _, name = key.rpartition(".")
        if key in given or name not in OmegaConf.select(composed, section).keys():  # noqa: SIM118  (`in` skips missing)
            return OmegaConf.select(composed, key, throw_on_missing=False)
        chosen.append(Choice(key, value, reason))
        return value

    length, batch = int(composed.model.sequence_len), scale.batch
    sharing = f"{fastest_equivalent:.3g} devices as fast as the fastest" if is_unequal else f"{workers} equal devices"
    rows = choose(
        "problem.batch", 1 << max(0, round(math.log2(batch / length / fastest_equivalent))),
        f"{sharing} share nanochat's batch of {batch:,} tokens, in rows of {length:,}.",
    )  # fmt: skip
    if not OmegaConf.is_list(cluster.batch):  # such workers compute all their rows at once
        choose(
            "problem.micro_batch", math.gcd(rows, _AT_ONCE),
            "These rows are computed at once; lower it if the memory of a device is too small.",
        )  # fmt: skip
    dealt = choose(
        "cluster.batch", "auto" if is_unequal else None,
        "A slower device takes fewer rows, because the speeds differ or are not known." if is_unequal
        else "The devices are equally fast, so they take the same rows.",
    )  # fmt: skip
    tokens = rows * length  # of the fastest device
    average = tokens * fastest_equivalent / workers if dealt == "auto" else float(tokens)
    oldest = math.ceil(_OLDEST_BATCHES * batch / average)
    choose(
        "method.threshold", max(workers, min(_DELAYS_PER_WORKER * workers, oldest)),
        f"R allows {_DELAYS_PER_WORKER} delays for each of {workers} workers, but no gradient that is more than "
        f"{_OLDEST_BATCHES} batches old.",
    )  # fmt: skip
    eta = choose(
        "method.eta", _rounded(_MATRIX_RATE * max(_LEAST_FACTOR, math.sqrt(tokens / _REFERENCE_BATCH))),
        f"nanochat moves matrices by {_MATRIX_RATE:g} at {_REFERENCE_BATCH:,} tokens; the step follows the root of the "
        f"tokens, here {tokens:,}, down to {_LEAST_FACTOR:g} of it.",
    )  # fmt: skip
    choose(
        "budget.updates", max(1, round(scale.tokens / average)),
        f"The run reads {scale.tokens:,.0f} tokens, {_TOKENS_PER_PARAMETER} for each parameter of blocks and head; an "
        f"average gradient has {average:,.0f}.",
    )  # fmt: skip
    choose("method.decay", _DECAY, "eta falls over this last part, as it does in nanochat.")
    choose("method.final_eta_fraction", _FINAL_FRACTION, "eta falls to this part, as it does in nanochat.")
    choose(
        "method.warmup", _rounded(min(1 - _DECAY, _WARMUP_STEPS * batch / scale.tokens)),
        f"eta rises over {_WARMUP_STEPS} of nanochat's batches, as it does there.",
    )  # fmt: skip
    # The decay of a token is eta * decay / tokens, which depends on the length of the run alone.
    per_token = (
        _CAUTIOUS_SHARE * _WEIGHT_DECAY * _MATRIX_RATE / _REFERENCE_BATCH * scale.reference_tokens / scale.tokens
    )
    choose(
        "geometry.weight_decay.matrix", _rounded(per_token * tokens / (eta or _MATRIX_RATE)),
        f"nanochat has {_WEIGHT_DECAY:g} at depth {_REFERENCE_DEPTH} and skips half of the coordinates; this is half, "
        "scaled as there.",
    )  # fmt: skip
    return chosen


def explained(composed: DictConfig, chosen: Collection[Choice]) -> str:
    """The choices and their reasons as a text of several lines."""
    scale = _scale(composed.model)
    lines = [f"The recipe of depth {scale.depth} makes the model {scale.width} wide, and chooses:"]
    shown = [(f"{key}={'null' if value is None else value}", reason) for key, value, reason in chosen]
    column = max((len(word) for word, _ in shown), default=0)
    return "\n".join([*lines, *(f"  {word:<{column}}  {reason}" for word, reason in shown)])


def _scale(model: DictConfig) -> _Scale:
    def tokens(depth: int) -> float:
        width = _width(model, depth)
        return float(_TOKENS_PER_PARAMETER * (12 * depth * width * width + model.vocab_size * width))

    depth = int(model.depth)
    return _Scale(depth, _width(model, depth), tokens(depth), tokens(_REFERENCE_DEPTH))


def _width(model: DictConfig, depth: int) -> int:
    return int(-(-depth * model.aspect_ratio // model.head_dim) * model.head_dim)


def _speeds_are_known(cluster: DictConfig) -> bool:
    return bool(cluster.profile != "none" or cluster.profile_file)


def _times(cluster: DictConfig) -> list[float]:
    """Seconds per gradient of each worker, in any unit; all are equal if they are not known.

    A real run without pacing may name a profile file too, only for this.
    """
    workers = int(cluster.workers)
    if cluster.profile in PROFILES:
        return [float(seconds) for seconds in base_seconds(cluster.profile, workers, 1.0)]
    if cluster.times:
        measured = [float(seconds) for seconds in cluster.times]
    elif cluster.profile_file:
        measured = read_profile(Path(cluster.profile_file)).seconds
    elif cluster.profile == "file":
        raise UserError("cluster.profile=file needs cluster.profile_file, which ringmaster profile writes")
    else:
        return [1.0] * workers
    return [measured[i % len(measured)] for i in range(workers)]


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")
