"""``ringmaster bench update`` and ``gradient``: the arithmetic of the paper's model, versus what people use instead."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ringmaster_dist import devices
from ringmaster_dist.algorithm.geometry import POLAR_EXPRESS, spectral_scale
from ringmaster_dist.algorithm.layout import GEOMETRY_MAPS, Layout, Parameter
from ringmaster_dist.algorithm.names import MIXED
from ringmaster_dist.algorithm.update import Update
from ringmaster_dist.bench import by_turns, compared, show
from ringmaster_dist.crew import Crew
from ringmaster_dist.problems.module import role_by_shape, trainable_parameters
from ringmaster_dist.problems.nanochat.generate import generate, reader_of_model
from ringmaster_dist.problems.nanochat.model import NanoChat, NanoChatConfig
from ringmaster_dist.problems.nanochat.problem import NanoChatProblem

_ETA, _BETA = 0.02, 0.95
_CONTEXT, _BATCH = 256, 4
_SPIN_SECONDS = 0.1  # within which the threads of a rival have ceased to spin


def paper_parameters() -> list[Parameter]:
    """The 10,518,828 parameters of the paper's NanoChat model."""
    with torch.device("meta"):
        return trainable_parameters(NanoChat(NanoChatConfig()), role_by_shape)


def paper_layout() -> Layout:
    return Layout(paper_parameters(), GEOMETRY_MAPS["muon"])


# --- update ------------------------------------------------------------------------------------------------------


def update(quick: bool, as_json: bool, device: str = "cpu") -> None:
    torch.manual_seed(0)
    layout, threads = paper_layout(), torch.get_num_threads()
    ours: dict[str, Callable[[], object]] = {
        "ringmaster, float32": update_step(layout, device=device, threads=threads),
        "ringmaster, mixed": update_step(layout, MIXED, device, threads),
        "ringmaster, bfloat16": update_step(layout, "bfloat16", device, threads),
    }
    seconds: dict[str, list[float]] = {}
    with _Rivals(device) as rivals:
        for _ in range(1 if quick else 3):
            for candidates in (ours, rivals):
                for name, taken in by_turns(candidates, 1 if quick else 6).items():
                    seconds[name] = seconds.get(name, []) + taken
                time.sleep(_SPIN_SECONDS)
    rows = compared("update", seconds, "ringmaster, float32")
    show("update", ["update", "relative", "ms", "worst ms"], rows, as_json)


def update_step(layout: Layout, precision: str = "", device: str = "cpu", threads: int = 1) -> Callable[[], None]:
    """What a server with that many threads does for one update. The next iterate goes to the other of two buffers."""
    crew = Crew(threads) if threads > 1 and devices.is_cpu(device) else None
    update = Update(layout, precision=precision, device=device, crew=crew)
    buffers = [torch.randn(layout.size).to(device), torch.empty(layout.size, device=device)]
    momentum, gradient = torch.zeros(layout.size, device=device), torch.randn(layout.size).to(device)

    def step() -> None:
        update.apply(buffers[0], momentum, gradient, eta=_ETA, alpha=1 - _BETA, out=buffers[1])
        buffers.reverse()

    return _finished(step, device)


class _Rivals(dict[str, Callable[[], object]]):
    """What people use instead, in a process of its own that has torch's usual settings.

    The threads of our processes sleep between two operations. Rivals have many more operations, so that would make
    them slower than they are for their users, whose threads spin.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import serve_rivals; serve_rivals({device!r})"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True,
        )  # fmt: skip
        for name in json.loads(self._answer()):
            self[name] = partial(self._step, name)

    def _step(self, name: str) -> None:
        assert self._process.stdin is not None
        print(name, file=self._process.stdin, flush=True)
        self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise RuntimeError("the process of the rivals has ended; its error is above")
        return line

    def __enter__(self) -> _Rivals:
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.kill()
        self._process.communicate()


def serve_rivals(device: str) -> None:
    """The main function of the rivals' process: writes their names, then makes a step of each rival that it reads."""
    rivals = {"plain loop in float32, matrix by matrix": _finished(_plain_muon(_with_gradients(device)), device)}
    if hasattr(torch.optim, "Muon"):
        optimizers = optimizers_of(_with_gradients(device), _ETA)
        rivals["torch.optim.Muon (in bfloat16) + SGD"] = _finished(
            lambda: [optimizer.step() for optimizer in optimizers], device
        )
    print(json.dumps(list(rivals)), flush=True)
    for line in sys.stdin:
        rivals[line.rstrip("\n")]()
        print(flush=True)


def _finished(work: Callable[[], object], device: str) -> Callable[[], None]:
    """The same work, which returns when the device has finished it."""

    def finished() -> None:
        work()
        devices.finish(device)

    return finished


def optimizers_of(model: torch.nn.Module, eta: float) -> list[torch.optim.Optimizer]:
    """The muon geometry by torch.optim: Muon for the matrices of the blocks, SGD with momentum for the rest."""
    matrices, rest = _matrices_and_rest(model)
    muon = torch.optim.Muon(matrices, lr=eta, momentum=_BETA, nesterov=True, weight_decay=0.0)
    return [muon, torch.optim.SGD(rest, lr=eta * (1 - _BETA), momentum=_BETA, nesterov=True)]


def _matrices_and_rest(model: torch.nn.Module) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]]:
    matrices: list[torch.nn.Parameter] = []
    rest: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        (matrices if role_by_shape(name, parameter) == "matrix" else rest).append(parameter)
    return matrices, rest


def _with_gradients(device: str) -> NanoChat:
    model = NanoChat(NanoChatConfig()).to(device)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape).to(device)
    return model


def _plain_muon(model: torch.nn.Module) -> Callable[[], None]:
    """Muon as it is usually written, in fp32. torch.optim.Muon computes in bf16, which some processors emulate."""
    matrices, rest = _matrices_and_rest(model)
    momenta = {id(p): torch.zeros_like(p) for p in (*matrices, *rest)}

    def look_ahead(parameter: torch.nn.Parameter) -> torch.Tensor:
        """Nesterov's direction, of the parameter's shape."""
        assert parameter.grad is not None
        momentum = momenta[id(parameter)].lerp_(parameter.grad, 1 - _BETA)
        return torch.lerp(momentum, parameter.grad, 1 - _BETA)

    @torch.no_grad()
    def step() -> None:
        for parameter in matrices:  # (rows, cols)
            direction = look_ahead(parameter)
            y = direction / (direction.norm() + 1e-7)
            tall = y.shape[0] > y.shape[1]
            y = y.T if tall else y
            for a, b, c in POLAR_EXPRESS:
                gram = y @ y.T
                y = a * y + (b * gram + c * gram @ gram) @ y
            parameter.add_(y.T if tall else y, alpha=-_ETA * spectral_scale(*parameter.shape))
        for parameter in rest:
            parameter.add_(look_ahead(parameter), alpha=-_ETA)

    return step


# --- gradient ----------------------------------------------------------------------------------------------------


class _NoiseRows:
    """Rows without text, because the time does not depend on what is in them."""

    fingerprint = "noise"
    folder = Path()
    token_bytes = np.ones(8192, dtype=np.int64)

    def __init__(self, context: int = _CONTEXT, vocabulary: int = 8192) -> None:
        shape = (64, context + 1)
        self.train = self.validation = np.random.default_rng(0).integers(0, vocabulary, shape, dtype=np.uint16)

    def sample(self, seed: int, worker_id: int, sequence: int, count: int, stream: int = 0) -> np.ndarray:
        return self.train[(np.arange(count) + sequence * count) % len(self.train)]


def gradient(quick: bool, as_json: bool) -> None:
    config = NanoChatConfig(sequence_len=_CONTEXT)
    rows: Any = _NoiseRows()
    plain, ours = "plain loop over the module", "ringmaster, interruptible"
    candidates = {plain: _plain_gradient(config, rows), ours: _our_gradient(config, rows, watched=True)}
    seconds = by_turns(candidates, 2 if quick else 16)
    count = 48 if quick else _CONTEXT - 1  # without a cache the time grows with the square of it
    cached = f"sample {count} tokens, cache"
    sampling = by_turns({cached: _sample(config, count, cached=True),
                         f"sample {count} tokens, no cache": _sample(config, count, cached=False)},
                        1 if quick else 4)  # fmt: skip
    table = [
        *compared("gradient", seconds, plain),
        _cost_of_checks(min(seconds[ours]), 60 if quick else 400),
        *compared("gradient", sampling, cached),
    ]
    show("gradient", ["gradient", "relative", "ms", "worst ms"], table, as_json)


def _cost_of_checks(whole: float, rounds: int) -> dict[str, Any]:
    """The cost of being interruptible, as a share of ``whole``.

    The checks cost the same in a small model. So they are measured in a model of the same depth and hardly any width,
    where they are a visible part of the time.
    """
    config = NanoChatConfig(n_head=1, n_kv_head=1, n_embd=32, vocab_size=64, sequence_len=8)
    rows: Any = _NoiseRows(context=8, vocabulary=64)
    candidates = {name: _our_gradient(config, rows, watched=name == "with") for name in ("with", "without")}
    seconds = by_turns(candidates, rounds)
    pairs = sorted(a - b for a, b in zip(seconds["with"], seconds["without"], strict=True))
    cost, ninth_decile = statistics.median(pairs), pairs[int(0.9 * len(pairs))]
    return {"gradient": "of it, being interruptible", "relative": f"{100 * cost / whole:.2f} %",
            "ms": round(1e3 * cost, 3), "worst ms": round(1e3 * ninth_decile, 3)}  # fmt: skip


def _plain_gradient(config: NanoChatConfig, rows: Any) -> Callable[[], object]:
    model = NanoChat(config)

    def step() -> None:
        tokens = torch.from_numpy(rows.sample(0, 0, 0, _BATCH).astype(np.int64))  # (batch, context + 1)
        model.zero_grad()
        torch.autograd.backward(model(tokens[:, :-1], tokens[:, 1:]))

    return step


def _our_gradient(config: NanoChatConfig, rows: Any, *, watched: bool) -> Callable[[], object]:
    problem = NanoChatProblem(config, rows, batch=_BATCH)
    problem.bind(Layout(problem.parameters, GEOMETRY_MAPS["muon"]))
    if not watched:
        for block in problem.model.blocks:
            block._forward_hooks.clear()
    iterate, stop = problem.initial(0), threading.Event()
    return lambda: problem.gradient(iterate, 0, 0, 0, stop.is_set)


def _sample(config: NanoChatConfig, count: int, *, cached: bool) -> Callable[[], object]:
    """Draws ``count`` tokens."""
    model = NanoChat(config)
    return lambda: deque(generate(reader_of_model(model, cached=cached), [0], count), maxlen=0)
