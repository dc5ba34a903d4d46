"""``ringmaster bench links``: what overlap, a narrow wire and local steps are worth on slow links.

A server and its workers are on machines of a `Network`, with real processes and the real gate. The first table has a
link on which an exchange, that is a push and the next snapshot, takes as long as a gradient. It compares the gradients
that one worker delivers with the most that is possible, one per gradient or one per exchange, whichever takes longer.
The second table has four workers, each behind a link of 10 Mbit/s with a round trip of 50 ms. It compares the seconds
to the same validation loss.

The etas of the second table are the best of a grid in virtual time (`tuned`), where the best one needs the fewest
updates. A simulated exchange takes no time, but the delays of equal workers are the same with exchanges and without.
A worker that overlaps has two gradients in flight, so it counts as two simulated workers. Rows that differ only in the
wire share an eta.
"""

from __future__ import annotations

import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from ringmaster_dist.bench import network, show
from ringmaster_dist.bench.network import Network
from ringmaster_dist.config.build import build_layout, build_problem, build_wire
from ringmaster_dist.config.compose import compose, load, to_typed
from ringmaster_dist.config.errors import UserError
from ringmaster_dist.observe.records import Arrival, MetricsRow
from ringmaster_dist.observe.run_directory import RunDirectory
from ringmaster_dist.observe.run_files import RunFiles
from ringmaster_dist.simulation.session import simulate
from ringmaster_dist.wire import Codec
from ringmaster_dist.worker.link import is_worth_overlap

_PORT, _TOKEN = 29400, "a-token-of-benches-only"
_START_SECONDS = 60.0  # a run without a gradient after this long is given up
_LOOK_SECONDS = 0.1


def run(quick: bool, as_json: bool) -> None:
    if missing := network.missing():
        print(f"links: this bench makes machines and links on this one, which needs {missing}", file=sys.stderr)
        return
    modes, seconds = ((True,), 3.0) if quick else ((False, True), 20.0)
    show("links", _EQUAL_COLUMNS, as_long_as_a_gradient(modes, seconds), as_json)
    if not quick:
        show(f"links, loss {_TARGET:g}", _LOSS_COLUMNS, to_the_same_loss(tuned()), as_json)


def _say(text: str) -> None:
    print(f"links: {text}", file=sys.stderr, flush=True)


# --- one run on several machines ---------------------------------------------------------------------------------


@contextmanager
def _running(net: Network, host: str, workers: Sequence[str], *overrides: str) -> Iterator[RunFiles]:
    """A run whose server is on the machine ``server`` at this address. Gives its files, once gradients arrive.

    The processes are killed at the end of the block.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, tempfile.TemporaryFile() as errors:
        files, python = RunFiles(Path(folder, "run")), [sys.executable, "-m", "ringmaster_dist"]
        settings = [f"run.dir={files.path}", "run.report=false", f"server.host={host}", f"server.port={_PORT}",
                    "cluster.local_workers=0", f"cluster.workers={len(workers)}", "cluster.profile=file",
                    "cluster.jitter=0", "budget.updates=null", "checkpoint.every=null"]  # fmt: skip
        environment = os.environ | {"RINGMASTER_TOKEN": _TOKEN}
        commands = [[*net.at("server"), *python, "train", *settings, *overrides]]
        commands += [[*net.at(name), *python, "worker", f"server={host}:{_PORT}"] for name in workers]
        processes = [
            subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors, env=environment) for command in commands
        ]
        try:
            deadline = time.monotonic() + _START_SECONDS
            while not files.last_version():
                if time.monotonic() > deadline or processes[0].poll() is not None:
                    errors.seek(0)
                    raise UserError(f"links: the run has no gradients: {errors.read().decode().strip()[-2000:]}")
                time.sleep(_LOOK_SECONDS)
            yield files
        finally:
            for process in processes:
                process.kill()  # and with it every process of its machine
                process.wait()


# --- an exchange as long as a gradient ---------------------------------------------------------------------------

_RATE, _DIM = "20mbit", 50_000  # 0.4 MB each way, in float64
_PROBE_SECONDS = 0.05  # the pace of the worker that measures an exchange
_EQUAL_COLUMNS = ["an exchange as long as a gradient", "of the limit", "gradients/s", "gradient ms", "exchange ms",
                  "mean delay"]  # fmt: skip


class _Delivered(NamedTuple):
    per_second: float
    gradient_seconds: float
    delay: float

    @property
    def waiting_seconds(self) -> float:
        """Between the end of a gradient and the beginning of the next, without overlap."""
        return 1.0 / self.per_second - self.gradient_seconds


def as_long_as_a_gradient(modes: Sequence[bool], seconds: float) -> list[dict[str, Any]]:
    """A row with overlap or without it for each of the modes, from this many seconds each."""
    with Network() as net:
        host = net.machine("server")
        net.machine("worker")
        net.narrow("worker", _RATE)
        _say(f"an exchange of {8 * _DIM / 1e6:g} MB each way over {_RATE} is measured")
        exchange = _deliver(net, host, seconds, _PROBE_SECONDS, overlap=False).waiting_seconds
        rows = []
        for overlap in modes:
            _say(f"{'with' if overlap else 'without'} overlap, for {seconds:g} s")
            found = _deliver(net, host, seconds, exchange, overlap=overlap)
            limit = 1.0 / max(found.gradient_seconds, exchange)
            rows.append({
                _EQUAL_COLUMNS[0]: f"worker.overlap={'true' if overlap else 'false'}",
                "of the limit": round(found.per_second / limit, 3),
                "gradients/s": round(found.per_second, 2),
                "gradient ms": round(1e3 * found.gradient_seconds),
                "exchange ms": round(1e3 * exchange),
                "mean delay": round(found.delay, 2),
            })  # fmt: skip
        return rows


def _deliver(net: Network, host: str, seconds: float, pace: float, *, overlap: bool) -> _Delivered:
    """What one worker delivers that needs ``pace`` seconds for a gradient."""
    overrides = [f"problem.dim={_DIM}", "method=asynchronous", f"cluster.times=[{pace}]", f"worker.overlap={overlap}",
                 "budget.seconds=10000"]  # fmt: skip
    with _running(net, host, ["worker"], *overrides) as files:
        time.sleep(seconds)
        arrivals: list[Arrival] = files.arrivals()[2:]  # the first exchanges of a connection differ
    if len(arrivals) < 3:
        raise UserError(
            f"links: {len(arrivals)} gradients in {seconds:g} s are too few to measure: is this machine busy?"
        )
    return _Delivered(
        (len(arrivals) - 1) / (arrivals[-1].time - arrivals[0].time),
        statistics.mean(arrival.compute_seconds for arrival in arrivals),
        statistics.mean(arrival.delay for arrival in arrivals),
    )


# --- seconds to the same loss ------------------------------------------------------------------------------------

_WORKERS, _GRADIENT_SECONDS, _STEPS = 4, 0.05, 16
_TARGET, _LIMIT_SECONDS = 5.2, 150.0
_MBIT, _DELAY_SECONDS = 10.0, 0.025  # the delay is that of one direction
_ROUND_TRIPS = 2  # of an exchange, about
_MODEL = ["problem=nanochat", "model=nanochat_tiny", "model.n_layer=2", "model.sequence_len=64",
          "data=stdlib", "problem.batch=2", "problem.validation_rows=16", "problem.final_tokens=1024", "eval.every=1",
          "geometry=scion", "method=asynchronous"]  # fmt: skip
_WIRES = {"float32": [], "bfloat16": ["wire.gradient_dtype=bfloat16", "wire.iterate_dtype=bfloat16"],
          "int8": ["wire.gradient_dtype=int8", "wire.iterate_dtype=bfloat16"]}  # fmt: skip
_GRIDS = {1: (0.01, 0.005, 0.0025, 0.02), _STEPS: (0.25, 0.125, 0.0625, 0.5)}  # of method.eta, by steps per push
_MOST_UPDATES = {1: 250, _STEPS: 100}  # of a simulation
_LOSS_COLUMNS = ["10 Mbit/s, 50 ms, 4 workers", "x as soon", "seconds", "pushes", "eta", "mean delay", "MB up",
                 "MB down"]  # fmt: skip

Etas = Mapping[tuple[int, int], float]  # by steps per push, and gradients in flight


@dataclass(frozen=True)
class Setting:
    """One row of the table."""

    wire: str
    steps: int
    overlap: bool

    @property
    def name(self) -> str:
        steps = f", {self.steps} local steps" if self.steps > 1 else ""
        return f"{self.wire}{steps}{', overlap' if self.overlap else ''}"

    @cached_property
    def megabytes(self) -> tuple[float, float]:
        """Of a gradient and of an iterate."""
        config = to_typed(compose([*_MODEL, *_WIRES[self.wire]], "train"), real_time=True)
        problem = build_problem(config)
        codec = Codec(build_wire(config), build_layout(config, problem).size, problem.dtype)
        return codec.gradient_bytes / 1e6, codec.iterate_bytes / 1e6

    @property
    def in_flight(self) -> int:
        """The gradients that all workers together have in flight."""
        exchange = 8 * sum(self.megabytes) / _MBIT + _ROUND_TRIPS * 2 * _DELAY_SECONDS
        return _WORKERS * (1 + (self.overlap and is_worth_overlap(exchange, self.steps * _GRADIENT_SECONDS)))


SETTINGS = [Setting(wire, steps, overlap) for wire, steps in
            (("float32", 1), ("bfloat16", 1), ("int8", 1), ("float32", _STEPS), ("int8", _STEPS))
            for overlap in (False, True)]  # fmt: skip


def tuned(settings: Sequence[Setting] = SETTINGS) -> Etas:
    """The best eta for each number of steps and of gradients in flight."""
    etas: dict[tuple[int, int], float] = {}
    for steps, in_flight in sorted({(setting.steps, setting.in_flight) for setting in settings}):
        grid, fewest = _GRIDS[steps], _MOST_UPDATES[steps]
        for eta in grid:
            updates = _virtual_updates(eta, steps, in_flight, fewest)
            if updates < fewest:
                fewest, etas[steps, in_flight] = updates, eta
        if (steps, in_flight) not in etas:
            raise UserError(f"links: no eta of {grid} reaches a loss of {_TARGET:g} in {fewest} updates")
        _say(f"steps {steps}, gradients in flight {in_flight}: eta {etas[steps, in_flight]:g} of {grid} is the best, "
             f"with {fewest} updates in virtual time")  # fmt: skip
    return etas


def _virtual_updates(eta: float, steps: int, workers: int, most: int) -> int:
    """The updates to the target with this many equal workers, or ``most`` if it is not reached before."""
    with tempfile.TemporaryDirectory() as folder:
        config = load([*_MODEL, f"cluster.workers={workers}", "cluster.profile=file", "cluster.times=[1]",
                       f"local.steps={steps}", f"method.eta={eta}", f"budget.updates={most}", "budget.seconds=null",
                       f"run.samples={most}", "run.trace=false"])  # fmt: skip
        simulate(config, RunDirectory(f"{folder}/run", name="links"))
        rows = RunFiles(Path(folder, "run")).metrics()
    return next((row.version for row in rows if _has_reached(row)), most)


def _has_reached(row: MetricsRow) -> bool:
    loss = row.evaluation.get("loss")
    return loss is not None and loss <= _TARGET


def to_the_same_loss(etas: Etas, settings: Sequence[Setting] = SETTINGS) -> list[dict[str, Any]]:
    """A row for each setting. The first is what the others are compared with."""
    rows: list[dict[str, Any]] = []
    plain = math.nan
    with Network() as net:
        host = net.machine("server")
        workers = [f"worker-{number}" for number in range(_WORKERS)]
        for name in workers:
            net.machine(name, delay_seconds=_DELAY_SECONDS)
            net.narrow(name, f"{_MBIT:g}mbit")
        for setting in settings:
            _say(f"{setting.name}, for at most {_LIMIT_SECONDS:g} s")
            row = _seconds_to_loss(net, host, workers, setting, etas[setting.steps, setting.in_flight])
            plain = plain if rows else row["seconds"]
            row["x as soon"] = round(plain / row["seconds"], 2)
            rows.append(row)
    return rows


def _seconds_to_loss(net: Network, host: str, workers: Sequence[str], setting: Setting, eta: float) -> dict[str, Any]:
    overrides = [*_MODEL, *_WIRES[setting.wire], f"local.steps={setting.steps}", f"worker.overlap={setting.overlap}",
                 f"method.eta={eta}", f"cluster.times=[{_GRADIENT_SECONDS}]", f"budget.seconds={_LIMIT_SECONDS}",
                 f"run.samples={4 * int(_LIMIT_SECONDS)}"]  # fmt: skip
    reached = None
    with _running(net, host, workers, *overrides) as files:
        while reached is None and files.summary() is None:
            time.sleep(_LOOK_SECONDS)
            reached = next(filter(_has_reached, files.metrics()), None)
        arrivals = files.arrivals()
    seconds = math.inf if reached is None else reached.time
    before = [arrival for arrival in arrivals if arrival.time <= seconds]
    up, down = setting.megabytes
    return {
        _LOSS_COLUMNS[0]: setting.name,
        "seconds": round(seconds, 1),
        "pushes": len(before),
        "eta": eta,
        "mean delay": round(statistics.mean(arrival.delay for arrival in before), 1),
        "MB up": round(up, 2),
        "MB down": round(down, 2),
    }
