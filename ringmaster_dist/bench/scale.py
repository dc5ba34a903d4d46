"""``ringmaster bench scale``: how large a cluster one server carries, from what is measured here and what is assumed.

Two updates are measured, from which two rates of this machine follow, and a third as a check. The CPU time that a
server spends on an exchange over TLS is measured too, which needs root and iproute2. The simulator says what a mixed
cluster of N workers delivers and how much of it is accepted. The links, a GPU to serve from with its host, and the
gradient times of workers are assumed: the paper's table for its own model, and arithmetic for a larger one.

Each accepted gradient costs the server one update. It moves the model once in and once out, over the link, through the
CPU that decrypts and checks it, and between host and device. Links and copies are full duplex. All these overlap, so
the slowest is the limit. Workers ask for one exchange per gradient. A group of G devices that is one worker, or local
accumulation of ``k`` gradients, divides the number of exchanges. A narrower wire divides the bytes, and shards divide
all costs.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ringmaster_dist.algorithm.layout import GEOMETRY_MAPS, Layout, Parameter
from ringmaster_dist.algorithm.methods import Method
from ringmaster_dist.algorithm.schedules import Constant
from ringmaster_dist.bench import show
from ringmaster_dist.bench.arithmetic import paper_parameters, update_step
from ringmaster_dist.bench.exchange import can_make_links, servers_cpu_seconds
from ringmaster_dist.config.profile_file import Profile, read_profile
from ringmaster_dist.profiles import GPU_GRADIENT_SECONDS
from ringmaster_dist.simulation.forecast import forecast, horizon_of

_ORTHOGONALIZATION_STEPS = 5
_ELEMENTWISE_BYTES = 5 * 4  # iterate, momentum and gradient are read, iterate and momentum written, fp32


class Model(NamedTuple):
    name: str
    parameters: int
    flops: float  # of one update's orthogonalisations


class Machine(NamedTuple):
    """Where updates are computed."""

    name: str
    flops_per_second: float
    memory_bytes_per_second: float
    copy_bytes_per_second: float = math.inf  # between host and device, each way
    cores: int = 1  # of the host, for exchanges
    cpu_seconds_per_byte: float = 0.0  # of an exchange, per byte of the gradient


def orthogonalization_flops(shapes: Iterable[tuple[int, int]]) -> float:
    """Of the plain iteration, which computes a Gram matrix, its square and a product five times."""
    total = 0.0
    for rows, cols in shapes:
        short, long = min(rows, cols), max(rows, cols)
        total += _ORTHOGONALIZATION_STEPS * 2.0 * (2.0 * short * short * long + float(short) ** 3)
    return total


def fitted(name: str, measured: Iterable[tuple[Model, float]]) -> Machine:
    """The machine whose two rates explain two measured update times."""
    (a, a_seconds), (b, b_seconds) = measured
    determinant = a.flops * b.parameters - b.flops * a.parameters
    per_flop = (a_seconds * b.parameters - b_seconds * a.parameters) / determinant
    per_parameter = (a.flops * b_seconds - b.flops * a_seconds) / determinant
    return Machine(name, 1.0 / max(per_flop, 1e-18), _ELEMENTWISE_BYTES / max(per_parameter, 1e-18))


def update_seconds(model: Model, machine: Machine, shards: int = 1) -> float:
    arithmetic = model.flops / machine.flops_per_second
    return (arithmetic + model.parameters * _ELEMENTWISE_BYTES / machine.memory_bytes_per_second) / shards


def transfer_seconds(model: Model, link_bytes_per_second: float, wire_bytes: int, shards: int = 1) -> float:
    """One way. The other way goes at the same time."""
    return model.parameters * wire_bytes / link_bytes_per_second / shards


def host_seconds(model: Model, machine: Machine, wire_bytes: int, shards: int = 1) -> float:
    """Seconds of all cores for an exchange, or of the copies between host and device if they take longer."""
    size = model.parameters * wire_bytes / shards
    return size * max(machine.cpu_seconds_per_byte / machine.cores, 1.0 / machine.copy_bytes_per_second)


def largest_cluster(exchanges_per_second: float, mean_rate: float, per_exchange: int = 1) -> int:
    """The number of devices with ``mean_rate`` gradients per second each that one server keeps up with."""
    return int(exchanges_per_second * per_exchange / mean_rate)


_GPU = Machine("a GPU (assumed)", 100e12, 2e12, copy_bytes_per_second=25e9, cores=32)
_ASSUMED = "a GPU has 100 Tflop/s and 2 TB/s, and 25 GB/s to its host of 32 cores"
_LINKS = {"10 Gbit/s": 10e9 / 8, "100 Gbit/s": 100e9 / 8}
_WORKER_FLOPS = 0.4 * 312e12  # per second, of a worker's GPU
_TOKENS = 65_536  # per gradient of the larger model
_WORKERS, _WORKERS_QUICK = (1, 4, 16, 64, 256, 1024), (4, 16)
_WIRES = {"float32": 4, "bfloat16": 2}


def transformer(blocks: int, width: int, vocabulary: int) -> list[Parameter]:
    """The matrices of an ordinary transformer: 12 width^2 per block, and two embeddings."""
    parameters = [Parameter("embedding", (vocabulary, width), "embedding")]
    for i in range(blocks):
        parameters += [Parameter(f"{i}.attention.{j}", (width, width)) for j in range(4)]
        parameters += [Parameter(f"{i}.up", (4 * width, width)), Parameter(f"{i}.down", (width, 4 * width))]
    return [*parameters, Parameter("output", (vocabulary, width), "output")]


def described(name: str, parameters: list[Parameter]) -> Model:
    matrices = [(p.shape[0], p.shape[1]) for p in parameters if p.role == "matrix"]
    return Model(name, sum(p.size for p in parameters), orthogonalization_flops(matrices))


class Cluster(NamedTuple):
    """The workers take the devices in turn."""

    devices: str  # in words
    model: Model
    seconds: list[float]  # per gradient of this model, by device
    horizon_seconds: float | None = None  # how long it is played; None if that depends on its size

    def of_size(self, workers: int) -> list[float]:
        """Seconds per gradient of each worker."""
        return [self.seconds[worker % len(self.seconds)] for worker in range(workers)]

    @property
    def mean_rate(self) -> float:
        """Gradients per second of the mean worker."""
        return sum(1.0 / seconds for seconds in self.seconds) / len(self.seconds)


def papers() -> Cluster:
    model = described("the paper's", paper_parameters())
    return Cluster("the paper's GPUs", model, list(GPU_GRADIENT_SECONDS.values()), horizon_seconds=3.0)


def measured(profile: Profile) -> Cluster:
    """The cluster of a file. One of an older version does not say how large its model is, so it is the paper's."""
    content, model = profile.content, papers().model
    if "parameters" in content:
        shapes = [(rows, cols) for rows, cols, number in content["matrices"] for _ in range(number)]
        model = Model(content["model"] or content["problem"], content["parameters"], orthogonalization_flops(shapes))
    return Cluster(f"the devices of {profile.path}", model, profile.seconds)


def run(quick: bool, as_json: bool, profile: Path | None = None) -> None:
    cluster = papers()
    if profile is not None:
        file = read_profile(profile, "profile")
        cluster = measured(file)
        show(f"scale: {cluster.devices}, {cluster.model.name}, {cluster.model.parameters:,} parameters",
             ["device", "name", "host", "ms", "std"], _device_rows(file), as_json)  # fmt: skip
    machine, rows = measured_machine(repeats=1 if quick else 8)
    per_byte = _cpu_seconds_per_byte(rounds=1 if quick else 3)
    machine, gpu = (m._replace(cpu_seconds_per_byte=per_byte) for m in (machine, _GPU))
    show("scale: updates measured here, and a third from the rates of the first two",
         ["model", "parameters", "ms", "ms by the rates"], rows, as_json)  # fmt: skip
    small, large = cluster.model, described("1 B", transformer(20, 1792, 65_536))
    show(f"scale: the most one server does per second; {_ASSUMED}",
         ["model", "server", "updates/s", "wire", "by host", "10 Gbit/s", "100 Gbit/s"],
         limits([small, large], [machine, gpu]),
         as_json)  # fmt: skip
    show(f"scale: {cluster.devices} in virtual time, model {small.name}, R = workers; loads, 1 is saturated",
         ["workers", "gradients/s", "accepted/s", "MB/s each way", "load here", "GPU", "its host", *_LINKS],
         clusters(cluster, [machine, gpu], _WORKERS_QUICK if quick else _WORKERS), as_json)  # fmt: skip
    show("scale: the largest cluster of one server",
         ["model", "server and link", "as it is", "bfloat16", "+ groups of 8", "+ 8 accumulated", "+ 4 shards"],
         largest([(small, cluster.mean_rate), (large, _large_rate(large))], [machine, gpu]), as_json)  # fmt: skip


def measured_machine(repeats: int) -> tuple[Machine, list[dict[str, Any]]]:
    """By the CPU seconds of one thread, the default of a server, so that other load on the machine counts little."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    models = [
        ("the paper's", paper_parameters()),
        ("6 blocks of 384, no vocabulary", transformer(6, 384, 8)),
        ("4 blocks of 512, vocabulary 8192", transformer(4, 512, 8192)),
    ]
    times = []
    for _, parameters in models:
        step = update_step(Layout(parameters, GEOMETRY_MAPS["muon"]))
        step()
        times.append(min(_thread_seconds(step) for _ in range(repeats)))
    sizes = [described(*model) for model in models]
    machine = fitted("this machine, one thread", zip(sizes[:2], times[:2], strict=True))
    rows = [
        {"model": model.name, "parameters": f"{model.parameters:,}", "ms": round(1e3 * seconds, 1),
         "ms by the rates": round(1e3 * update_seconds(model, machine), 1)}
        for model, seconds in zip(sizes, times, strict=True)
    ]  # fmt: skip
    return machine, rows


def _cpu_seconds_per_byte(rounds: int) -> float:
    """CPU seconds of a server for an exchange over TLS, per byte of the gradient. 0 if it cannot be measured here."""
    if not can_make_links():
        print("scale: the cost of an exchange needs root and iproute2 to be measured, and is left out", file=sys.stderr)
        return 0.0
    size = papers().model.parameters
    seconds = servers_cpu_seconds(size, rounds)
    print(f"scale: an exchange of the paper's model takes {1e3 * seconds:.0f} ms of a server's CPU", file=sys.stderr)
    return seconds / (4 * size)


def _thread_seconds(step: Callable[[], None]) -> float:
    began = time.thread_time()
    step()
    return time.thread_time() - began


def limits(models: list[Model], machines: list[Machine]) -> list[dict[str, Any]]:
    return [
        {"model": model.name, "server": machine.name, "updates/s": _short(1.0 / update_seconds(model, machine)),
         "wire": wire, "by host": _short(1.0 / max(host_seconds(model, machine, width), 1e-12)),
         **{name: _short(1.0 / transfer_seconds(model, link, width)) for name, link in _LINKS.items()}}
        for model, machine, (wire, width) in product(models, machines, _WIRES.items())
    ]  # fmt: skip


def clusters(cluster: Cluster, machines: Sequence[Machine], sizes: Sequence[int]) -> list[dict[str, Any]]:
    """The loads of two servers, this machine and a GPU, the second with its host."""
    here, gpu = machines
    model, rows = cluster.model, []
    for workers in sizes:
        times = cluster.of_size(workers)
        played = forecast(times, Method(Constant(0.1, 0.1, workers)), jitter=0.05, interrupt=True,
                          horizon_seconds=cluster.horizon_seconds or horizon_of(times))  # fmt: skip
        moved = played.gradients_per_second * model.parameters * 4  # bytes per second
        rows.append(
            {"workers": workers, "gradients/s": _short(played.gradients_per_second),
             "accepted/s": _short(played.updates_per_second), "MB/s each way": _short(moved / 1e6),
             "load here": _short(played.updates_per_second * update_seconds(model, here)),
             "GPU": _short(played.updates_per_second * update_seconds(model, gpu)),
             "its host": _short(played.gradients_per_second * host_seconds(model, gpu, 4)),
             **{name: _short(moved / link) for name, link in _LINKS.items()}}
        )  # fmt: skip
    return rows


def largest(models: list[tuple[Model, float]], machines: list[Machine]) -> list[dict[str, Any]]:
    """Each column adds a remedy to the one before. A model comes with the rate of its mean worker."""
    rows = []
    for (model, rate), machine, (name, link) in product(models, machines, _LINKS.items()):
        carried = partial(_carried, model, machine, link, rate)
        rows.append(
            {"model": model.name, "server and link": f"{machine.name.partition(' (')[0]}, {name}",
             "as it is": carried(4, 1, 1), "bfloat16": carried(2, 1, 1), "+ groups of 8": carried(2, 8, 1),
             "+ 8 accumulated": carried(2, 64, 1), "+ 4 shards": carried(2, 64, 4)}
        )  # fmt: skip
    return rows


def _carried(
    model: Model, machine: Machine, link: float, rate: float, wire: int, per_exchange: int, shards: int
) -> int | str:
    """How many devices one server carries. ``per_exchange`` is the number of their gradients in one exchange."""
    slowest = max(
        update_seconds(model, machine, shards),
        transfer_seconds(model, link, wire, shards),
        host_seconds(model, machine, wire, shards),
    )
    return largest_cluster(1.0 / slowest, rate, per_exchange) or "<1"


def _device_rows(profile: Profile) -> list[dict[str, Any]]:
    return [
        {**{name: device.get(name, "") for name in ("device", "name", "host")},
         "ms": _short(1e3 * device["seconds_mean"]), "std": _short(1e3 * device.get("seconds_std", 0.0))}
        for device in profile.devices
    ]  # fmt: skip


def _large_rate(model: Model) -> float:
    return _WORKER_FLOPS / (6.0 * model.parameters * _TOKENS)


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
