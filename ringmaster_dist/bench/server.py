"""``ringmaster bench server``: the updates that a server makes while 1, 4 and 16 workers do nothing but push.

The limit is one over the time of an update alone on the machine, or of a copy between host and device if that takes
longer. It is a median, because a rate is not the best of several either. The server and the workers share this machine,
so with more processes than cores the workers cost a part of the rate too. Meanwhile another worker pushes stale
gradients. The bench shows how long that worker waits for its verdict and the newest snapshot, versus the same exchange
with an idle server.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from ringmaster_dist import devices
from ringmaster_dist.bench import by_turns, seconds_of, show
from ringmaster_dist.bench.arithmetic import update_step
from ringmaster_dist.bench.peers import Peer, Pusher, layout_of, serve
from ringmaster_dist.wire import Wire

_COLUMNS = ["server", "of 1/update", "updates/s", "1/update time", "stale answered ms", "idle ms"]
_STALE_PUSHES = 15  # the bench shows their median
_SPARE = 8  # the threshold is larger than the number of workers by this, so none of their pushes is stale


def run(quick: bool, as_json: bool, device: str = "cpu") -> None:
    seconds, counts = (2.0, (2,)) if quick else (4.0, (1, 4, 16))
    rows = [row for problem in ("quadratic", "nanochat") for row in measure(problem, seconds, counts, device)]
    show("server", _COLUMNS, rows, as_json)


def measure(problem: str, seconds: float, counts: tuple[int, ...], device: str = "cpu") -> list[dict[str, Any]]:
    alone, measured = _step_seconds(problem, device), []
    with ExitStack() as stack:
        threshold = str(max(counts) + _SPARE)
        server = stack.enter_context(Peer(__name__, "server", problem, threshold, device))
        late = stack.enter_context(Peer(__name__, "stale", problem, threshold, server.address))
        pushing = [Peer(__name__, "push", problem, threshold, server.address) for _ in range(max(counts))]
        processes = [stack.enter_context(process) for process in pushing]
        assert all(process.address for process in processes), "a worker has not come up"
        idle = _stale_milliseconds(late)
        for count in counts:
            workers = processes[:count]
            _start(workers, 0.0)  # they join
            _results(workers)
            _start(workers, seconds)
            done = _results(workers)
            rate = sum(accepted for accepted, _ in done) / max(took for _, took in done)
            _start(workers, seconds)
            busy = _stale_milliseconds(late)
            _results(workers)
            measured.append((count, rate, busy))
    alone += _step_seconds(problem, device)  # before and after, because the speed of the machine varies
    limit = 1.0 / statistics.median(alone)
    where = "" if device == "cpu" else f" on {device}"
    return [
        {"server": f"{problem}{where}, {count} pushing", "of 1/update": f"{rate / limit:.2f}",
         "updates/s": round(rate, 1), "1/update time": round(limit, 1), "stale answered ms": busy, "idle ms": idle}
        for count, rate, busy in measured
    ]  # fmt: skip


def _start(workers: list[Peer], seconds: float) -> None:
    for worker in workers:
        worker.ask(str(seconds))


def _results(workers: list[Peer]) -> list[tuple[int, float]]:
    """For each worker the number of accepted pushes, and the seconds until its last push was answered."""
    answers = [worker.answer().split() for worker in workers]
    return [(int(accepted), float(took)) for accepted, took in answers]


def _stale_milliseconds(late: Peer) -> float:
    assert late.address, "the late worker has not come up"
    late.ask("now")
    return round(1e3 * float(late.answer()), 1)


def _step_seconds(problem: str, device: str) -> list[float]:
    """Seconds of updates, or of the copies for one if they take longer."""
    torch.set_num_threads(1)  # as the server does
    layout, repeats = layout_of(problem), 8 if layout_of(problem).size > 1e6 else 200
    taken = by_turns({"update": update_step(layout, device=device), "copies": _copies(layout.size, device)}, repeats)
    return max(taken.values(), key=statistics.median)


def _copies(size: int, device: str) -> Callable[[], None]:
    """A gradient on its way in, or a snapshot on its way out, whichever takes longer. In host memory it is nothing."""
    if devices.is_cpu(device):
        return lambda: None
    host, there = torch.zeros(size), torch.zeros(size, device=device)

    def inwards() -> None:
        there.copy_(host)
        devices.finish(device)

    def outwards() -> None:
        memory.receive(there)

    memory = devices.HostMemory(size, host.dtype, device)
    return max((inwards, outwards), key=lambda copy: statistics.median(seconds_of(copy, 5)))


# --- in the other processes ----------------------------------------------------------------------------------------


def _push(join: Callable[[], Pusher], threshold: int) -> None:
    """Reads a number of seconds, pushes as fast as it can for that long, and prints how many pushes were accepted."""
    print("ready", flush=True)
    pusher = None
    for line in sys.stdin:
        pusher = pusher or join()  # not before, so that its first gradient is new
        began, accepted = time.monotonic(), 0
        while time.monotonic() < began + float(line):
            accepted += pusher.push()
        print(accepted, time.monotonic() - began, flush=True)


def _push_stale(join: Callable[[], Pusher], threshold: int) -> None:
    """Brings the server beyond the threshold. Then, whenever it is asked, prints the seconds of a rejected push."""
    pusher = join()
    while pusher.version <= threshold:
        pusher.push()
    print("ready", flush=True)

    def push() -> None:
        assert not pusher.push(version=0), "a stale push was accepted"

    for _ in sys.stdin:
        print(statistics.median(seconds_of(push, _STALE_PUSHES)), flush=True)


if __name__ == "__main__":
    kind, problem, threshold, place = sys.argv[1:]
    if kind == "server":
        serve(problem, Wire(), threshold=int(threshold), updates=True, device=place)
    else:
        torch.set_num_threads(1)
        body = {"push": _push, "stale": _push_stale}[kind]
        body(lambda: Pusher(place, layout_of(problem).size, Wire()), int(threshold))
