"""``ringmaster bench server``: updates a server makes while 1, 4 and 16 workers do nothing but push.

Beside it: one over the time of an update alone on the machine, the median of those before and after (a rate is not the
best of several, so its limit is not either). The server and the pushing workers share this machine, so with more
processes than cores what is missing is theirs too. Meanwhile another worker pushes gradients that
are stale: how long it waits for its verdict and a snapshot of the newest iterate, beside the same exchange with an idle
server.
"""

from __future__ import annotations

import statistics
import sys
import time
from contextlib import ExitStack
from typing import Any

import torch

from ringmaster_dist.bench import by_turns, show
from ringmaster_dist.bench.peers import TOKEN, Peer, serve
from ringmaster_dist.bench.update import paper_parameters
from ringmaster_dist.protocol import PROTOCOL_VERSION, JoinRequest, Push
from ringmaster_dist.wire import Wire

_COLUMNS = ["server", "of 1/update", "updates/s", "1/update time", "stale answered ms", "idle ms"]
_REJECTED = 15  # pushes, of which the median is told
_THRESHOLD = 24  # nothing of 16 pushing workers is stale
_SIZES = {"quadratic": 1729, "nanochat": sum(parameter.size for parameter in paper_parameters())}


def run(quick: bool, as_json: bool) -> None:
    show("server", _COLUMNS, measure(seconds=2.0 if quick else 4.0, counts=(4,) if quick else (1, 4, 16)), as_json)


def measure(seconds: float, counts: tuple[int, ...]) -> list[dict[str, Any]]:
    rows = []
    for problem in _SIZES:
        alone, measured = _update_seconds(problem), []
        with ExitStack() as stack:
            server = stack.enter_context(Peer(__name__, "server", problem))
            late = stack.enter_context(Peer(__name__, "stale", problem, server.address))
            idle = _stale_milliseconds(late)
            workers: list[Peer] = []
            for count in counts:
                while len(workers) < count:
                    workers.append(stack.enter_context(Peer(__name__, "push", problem, server.address)))
                assert all(worker.address for worker in workers), "a worker has not come up"
                rate = _updates_per_second(workers, seconds)
                _go(workers, seconds)
                busy = _stale_milliseconds(late)
                _done(workers)
                measured.append((count, rate, busy))
        alone += _update_seconds(problem)  # before and after: the machine has its moods
        limit = 1.0 / statistics.median(alone)
        rows += [
            {"server": f"{problem}, {count} pushing", "of 1/update": f"{rate / limit:.2f}",
             "updates/s": round(rate, 1), "1/update time": round(limit, 1), "stale answered ms": busy, "idle ms": idle}
            for count, rate, busy in measured
        ]  # fmt: skip
    return rows


def _updates_per_second(workers: list[Peer], seconds: float) -> float:
    _go(workers, seconds)
    done = _done(workers)
    return sum(accepted for accepted, _ in done) / max(took for _, took in done)


def _go(workers: list[Peer], seconds: float) -> None:
    for worker in workers:
        worker.ask(str(seconds))


def _done(workers: list[Peer]) -> list[tuple[int, float]]:
    """What was accepted of each, and how long it took until its last push was answered."""
    answers = [worker.answer().split() for worker in workers]
    return [(int(accepted), float(took)) for accepted, took in answers]


def _stale_milliseconds(late: Peer) -> float:
    assert late.address, "the late worker has not come up"
    late.ask("now")
    return round(1e3 * float(late.answer()), 1)


def _update_seconds(problem: str) -> list[float]:
    from ringmaster_dist.algorithm.layout import GEOMETRY_MAPS, Layout, Parameter
    from ringmaster_dist.algorithm.update import Update

    torch.set_num_threads(1)  # as the server
    parameters = paper_parameters() if problem == "nanochat" else [Parameter("x", (1729,))]
    layout = Layout(parameters, GEOMETRY_MAPS["muon"])
    update = Update(layout)
    buffers = [torch.zeros(layout.size) for _ in range(2)]
    momentum, gradient = torch.zeros(layout.size), torch.randn(layout.size)

    def step() -> None:
        update.apply(buffers[0], momentum, gradient, eta=1e-6, alpha=0.05, out=buffers[1])
        buffers.reverse()

    repeats = 12 if layout.size > 1e6 else 200
    return by_turns({"": step}, repeats)[""]


# --- in the other processes ----------------------------------------------------------------------------------------


class _Pusher:
    def __init__(self, problem: str, address: str) -> None:
        from ringmaster_dist.transport.client import Client
        from ringmaster_dist.transport.process_settings import keep_memory

        keep_memory()
        torch.set_num_threads(1)
        self._client = Client(address, token=TOKEN, connect_seconds=10.0, call_seconds=60.0)
        welcome = self._client.join(JoinRequest(PROTOCOL_VERSION, TOKEN, 0))
        assert welcome.snapshot is not None
        self._session, self.version = welcome.session, welcome.snapshot.version
        self._gradient, self._sequence = torch.randn(_SIZES[problem]), 0

    def push(self, version: int) -> bool:
        reply = self._client.push(self._session, Push(self._sequence, version, self._gradient, 0.0, 0.0))
        assert reply.receipt is not None
        assert reply.snapshot is not None
        self._sequence, self.version = self._sequence + 1, reply.snapshot.version
        return reply.receipt.verdict.value == "accepted"


def _push(problem: str, address: str) -> None:
    """Whenever it is told how long: pushes as fast as it can for that long, and says how many were accepted."""
    pusher = _Pusher(problem, address)
    print("ready", flush=True)
    for line in sys.stdin:
        began, accepted = time.monotonic(), 0
        while time.monotonic() < began + float(line):
            accepted += pusher.push(pusher.version)
        print(accepted, time.monotonic() - began, flush=True)


def _push_stale(problem: str, address: str) -> None:
    """Brings the server beyond the threshold; then, whenever it is asked, says how long a rejected push takes."""
    pusher = _Pusher(problem, address)
    while pusher.version <= _THRESHOLD:
        pusher.push(pusher.version)
    print("ready", flush=True)
    for _ in sys.stdin:
        took = []
        for _ in range(_REJECTED):
            began = time.monotonic()
            assert not pusher.push(0), "a stale push was accepted"
            took.append(time.monotonic() - began)
        print(sorted(took)[_REJECTED // 2], flush=True)


if __name__ == "__main__":
    kind, problem, *rest = sys.argv[1:]
    if kind == "server":
        serve(problem, Wire(), threshold=_THRESHOLD, updates=True)
    elif kind == "push":
        _push(problem, *rest)
    else:
        _push_stale(problem, *rest)
