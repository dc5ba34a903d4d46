"""``ringmaster bench gradient``: a gradient of the paper's model beside a plain loop over the same module."""

from __future__ import annotations

import statistics
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ringmaster_dist.algorithm.layout import GEOMETRY_MAPS, Layout
from ringmaster_dist.bench import by_turns, compared, show
from ringmaster_dist.problems.nanochat.generate import generate
from ringmaster_dist.problems.nanochat.model import NanoChat, NanoChatConfig
from ringmaster_dist.problems.nanochat.problem import NanoChatProblem

_COLUMNS = ["gradient", "relative", "ms", "worst ms"]
_CONTEXT, _BATCH = 256, 4


class _Noise:
    """Rows without text: the time does not depend on what is in them."""

    fingerprint = "noise"
    folder = Path()
    token_bytes = np.ones(8192, dtype=np.int64)

    def __init__(self, context: int = _CONTEXT, vocabulary: int = 8192) -> None:
        shape = (64, context + 1)
        self.train = self.validation = np.random.default_rng(0).integers(0, vocabulary, shape, dtype=np.uint16)

    def sample(self, seed: int, worker_id: int, sequence: int, count: int) -> np.ndarray:
        return self.train[(np.arange(count) + sequence * count) % len(self.train)]


def run(quick: bool, as_json: bool) -> None:
    show("gradient", _COLUMNS, measure(rounds=2 if quick else 16), as_json)


def measure(rounds: int) -> list[dict[str, Any]]:
    config = NanoChatConfig(sequence_len=_CONTEXT)
    rows: Any = _Noise()
    plain = "plain loop over the module"
    seconds = by_turns(
        {plain: _plain(config, rows), "ringmaster, interruptible": _ours(config, rows, watched=True)}, rounds
    )
    sampling = by_turns({"sample, cache": _sample(config, cached=True),
                         "sample, no cache": _sample(config, cached=False)}, 1 if rounds < 10 else 4)  # fmt: skip
    return [
        *compared("gradient", seconds, plain),
        _checks(min(seconds["ringmaster, interruptible"])),
        *compared("gradient", sampling, "sample, cache"),
    ]


def _checks(whole: float) -> dict[str, Any]:
    """What being interruptible costs: checks do not depend on the sizes of the tensors they stand between, so they are
    measured where nearly nothing else is, in a model of the same depth and hardly any width, and set beside ``whole``.
    """
    config = NanoChatConfig(n_head=1, n_kv_head=1, n_embd=32, vocab_size=64, sequence_len=8)
    rows: Any = _Noise(context=8, vocabulary=64)
    seconds = by_turns({"with": _ours(config, rows, watched=True), "without": _ours(config, rows, watched=False)}, 400)
    pairs = sorted(a - b for a, b in zip(seconds["with"], seconds["without"], strict=True))
    cost = statistics.median(pairs)
    ninth = pairs[int(0.9 * len(pairs))]
    return {"gradient": "of it, being interruptible", "relative": f"{100 * cost / whole:.2f} %",
            "ms": round(1e3 * cost, 3), "worst ms": round(1e3 * ninth, 3)}  # fmt: skip


def _plain(config: NanoChatConfig, rows: Any) -> Callable[[], None]:
    model = NanoChat(config)

    def step() -> None:
        tokens = torch.from_numpy(rows.sample(0, 0, 0, _BATCH).astype(np.int64))
        model.zero_grad()
        torch.autograd.backward(model(tokens[:, :-1], tokens[:, 1:]))

    return step


def _ours(config: NanoChatConfig, rows: Any, *, watched: bool) -> Callable[[], object]:
    problem = NanoChatProblem(config, rows, batch=_BATCH)
    problem.bind(Layout(problem.parameters, GEOMETRY_MAPS["muon"]))
    if not watched:
        for block in problem.model.blocks:
            block._forward_hooks.clear()
    iterate, stop = problem.initial(0), threading.Event()
    return lambda: problem.gradient(iterate, 0, 0, 0, stop.is_set)


def _sample(config: NanoChatConfig, *, cached: bool) -> Callable[[], object]:
    """As many tokens as the context holds."""
    model = NanoChat(config)
    return lambda: deque(generate(model, [0], _CONTEXT, cached=cached), maxlen=0)
