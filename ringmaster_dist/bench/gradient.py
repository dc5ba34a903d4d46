"""``ringmaster bench gradient``: a gradient of the paper's model beside a plain loop over the same module."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ringmaster_dist.algorithm.layout import GEOMETRY_MAPS, Layout
from ringmaster_dist.bench import show
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

    def __init__(self) -> None:
        self.train = self.validation = np.random.default_rng(0).integers(0, 8192, (64, _CONTEXT + 1), dtype=np.uint16)

    def sample(self, seed: int, worker_id: int, sequence: int, count: int) -> np.ndarray:
        return self.train[(np.arange(count) + sequence * count) % len(self.train)]


def run(quick: bool, as_json: bool) -> None:
    show("gradient", _COLUMNS, measure(rounds=4 if quick else 12), as_json)


def measure(rounds: int) -> list[dict[str, Any]]:
    """The candidates take turns, so that what disturbs the machine disturbs all of them."""
    config = NanoChatConfig(sequence_len=_CONTEXT)
    rows: Any = _Noise()
    candidates: dict[str, Callable[[], Any]] = {
        "plain loop over the module": _plain(config, rows),
        "ringmaster, interruptible": _ours(config, rows, watched=True),
        "ringmaster, not interruptible": _ours(config, rows, watched=False),
    }
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for turn in range(rounds + 1):
        for name, work in candidates.items():
            began = time.perf_counter()
            work()
            if turn:  # the first is a warm-up
                seconds[name].append(time.perf_counter() - began)
    baseline = min(seconds["plain loop over the module"])
    return [
        {"gradient": name, "relative": f"{min(t) / baseline:.3f}x", "ms": round(1e3 * min(t), 1),
         "worst ms": round(1e3 * max(t), 1)}
        for name, t in seconds.items()
    ] + _sampling(config, rounds=2 if rounds < 10 else 4)  # fmt: skip


def _plain(config: NanoChatConfig, rows: Any) -> Callable[[], None]:
    model = NanoChat(config)

    def step() -> None:
        tokens = torch.from_numpy(rows.sample(0, 0, 0, _BATCH).astype(np.int64))
        model.zero_grad()
        torch.autograd.backward(model(tokens[:, :-1], tokens[:, 1:]))

    return step


def _ours(config: NanoChatConfig, rows: Any, *, watched: bool) -> Callable[[], None]:
    problem = NanoChatProblem(config, rows, batch=_BATCH)
    problem.bind(Layout(problem.parameters, GEOMETRY_MAPS["muon"]))
    if not watched:
        for block in problem.model.blocks:
            block._forward_hooks.clear()
    iterate = problem.initial(0)
    return lambda: problem.gradient(iterate, 0, 0, 0)


def _sampling(config: NanoChatConfig, rounds: int) -> list[dict[str, Any]]:
    """Generating as many tokens as the context holds, with and without the cache, by turns."""
    model = NanoChat(config)
    took: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(rounds):
        for cached, times in took.items():
            began = time.perf_counter()
            count = sum(1 for _ in generate(model, [0], _CONTEXT, cached=cached))
            times.append(time.perf_counter() - began)
    return [
        {"gradient": f"sample {count} tokens, {'cache' if cached else 'no cache'}",
         "relative": f"{min(times) / min(took[True]):.2f}x", "ms": round(1e3 * min(times), 1),
         "worst ms": round(1e3 * max(times), 1)}
        for cached, times in took.items()
    ]  # fmt: skip
