"""``ringmaster bench links``: what overlap, a narrow wire and local steps are worth on slow links.

A server and its workers are on machines of a `Network`, with real processes and the real gate. The first table has a
link on which an exchange, that is a push and the next snapshot, takes as long as a gradient. It compares the gradients
that one worker delivers with the most that is possible, one per gradient or one per exchange, whichever takes longer.
The second table has four workers, each behind a link of 10 Mbit/s with a round trip of 50 ms. It compares the seconds
to the same validation loss.

The etas of the second table are the best of a grid in virtual time (`tuned`). A simulated exchange takes no time, so a
simulated gradient takes as long as the gradient and the exchange together. A worker that overlaps counts as two, each
of which takes twice as long as the longer one of gradient and exchange. So rates and delays are those of the real run.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from ringmaster_dist.bench import network, show
from ringmaster_dist.bench.network import Network
from ringmaster_dist.config.errors import UserError
from ringmaster_dist.observe.records import Arrival
from ringmaster_dist.observe.run_files import RunFiles

_PORT, _TOKEN = 29400, "a-token-of-benches-only"
_START_SECONDS = 60.0  # a run without a gradient after this long is given up
_LOOK_SECONDS = 0.1


def run(quick: bool, as_json: bool) -> None:
    if missing := network.missing():
        print(f"links: this bench makes machines and links on this one, which needs {missing}", file=sys.stderr)
        return
    show("links", _EQUAL_COLUMNS, as_long_as_a_gradient(seconds=3.0 if quick else 20.0), as_json)


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


def as_long_as_a_gradient(seconds: float) -> list[dict[str, Any]]:
    with Network() as net:
        host = net.machine("server")
        net.machine("worker")
        net.narrow("worker", _RATE)
        _say(f"an exchange of {8 * _DIM / 1e6:g} MB each way over {_RATE} is measured")
        exchange = _deliver(net, host, seconds, _PROBE_SECONDS, overlap=False).waiting_seconds
        rows = []
        for overlap in (False, True):
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
