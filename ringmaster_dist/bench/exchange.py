"""``ringmaster bench exchange``: a push and the snapshot that comes back, beside the same bytes by other means.

Plain TCP, gloo's send and receive, and, where Ray is installed, a call of a Ray actor that takes and gives a tensor.

The peer is another process. Ours goes through everything but the update itself: the RPC agent, the unpickler, the
session, the checks of the gradient, the verdict, the ledger. With a narrow wire, rounding the gradient and the iterate
counts; widening them does not: that is done by the copy into the model and by the update, which any wire needs.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from ringmaster_dist.bench import show
from ringmaster_dist.bench.peers import TOKEN, Peer, serve
from ringmaster_dist.bench.update import paper_parameters
from ringmaster_dist.protocol import PROTOCOL_VERSION, JoinRequest, Push
from ringmaster_dist.wire import Ends, Wire

_COLUMNS = ["exchange", "relative", "ms", "worst ms", "MB each way"]
_WIRES = {"float32": Wire(), "bfloat16": Wire(torch.bfloat16, torch.bfloat16)}


def run(quick: bool, as_json: bool) -> None:
    show("exchange", _COLUMNS, measure(rounds=1 if quick else 8), as_json)


def measure(rounds: int, exchanges: int = 5) -> list[dict[str, Any]]:
    """The candidates take turns, so that what disturbs the machine disturbs all of them."""
    from ringmaster_dist.transport.memory import keep_memory

    keep_memory()
    size = sum(parameter.size for parameter in paper_parameters())
    seconds: dict[str, list[float]] = {"raw TCP, float32": []}
    peers = [Peer(__name__, "tcp", str(4 * size))]
    raw = _raw_exchange(peers[0].address, 4 * size)
    candidates: dict[str, Callable[[], None]] = {"raw TCP, float32": raw}
    others = {"gloo send and receive, float32": Peer(__name__, "gloo", str(size))}
    if importlib.util.find_spec("ray"):
        others["Ray actor, float32"] = Peer(__name__, "ray", str(size))
    peers += others.values()
    assert all(peer.address for peer in peers), "one of them has not come up"
    try:
        for _ in range(rounds):
            for label, other in others.items():
                other.ask(str(exchanges))
                seconds.setdefault(label, []).extend(json.loads(other.answer()))
            for name in _WIRES:
                # A process has one RPC agent at a time, so each round makes a connection of its own.
                with Peer(__name__, "server", name) as peer:
                    exchange, close = _our_exchange(peer.address, _WIRES[name], size)
                    candidates[f"ringmaster, {name}"] = exchange
                    for label in ("raw TCP, float32", f"ringmaster, {name}"):
                        seconds.setdefault(label, []).extend(_times(candidates[label], exchanges))
                    close()
    finally:
        for peer in peers:
            peer.close()
    return [_row(name, times, min(seconds["raw TCP, float32"]), size) for name, times in seconds.items()]


def _times(work: Callable[[], None], repeats: int) -> list[float]:
    work()  # the first has memory to find
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return times


def _row(name: str, times: list[float], baseline: float, size: int) -> dict[str, Any]:
    bytes_each = 2 if "bfloat16" in name else 4
    return {
        "exchange": name,
        "relative": f"{min(times) / baseline:.2f}x",
        "ms": round(min(times) * 1e3, 1),
        "worst ms": round(max(times) * 1e3, 1),
        "MB each way": round(size * bytes_each / 1e6, 1),
    }


# --- plain TCP ---------------------------------------------------------------------------------------------------


def _raw_exchange(address: str, size: int) -> Callable[[], None]:
    host, _, port = address.rpartition(":")
    stream = socket.create_connection((host, int(port)))
    outgoing, incoming = bytes(size), bytearray(size)

    def exchange() -> None:
        stream.sendall(outgoing)
        _receive(stream, incoming)

    return exchange


def _receive(stream: socket.socket, into: bytearray) -> bool:
    rest = memoryview(into)
    while rest:
        count = stream.recv_into(rest)
        if count == 0:
            return False
        rest = rest[count:]
    return True


def _echo(size: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(f"127.0.0.1:{listener.getsockname()[1]}", flush=True)
        stream, _ = listener.accept()
        outgoing, incoming = bytes(size), bytearray(size)
        while _receive(stream, incoming):
            stream.sendall(outgoing)


# --- gloo, Ray ---------------------------------------------------------------------------------------------------


def _gloo(size: int) -> None:
    """Rank 0, with rank 1 in a process of its own; tells the seconds of exchanges when asked."""
    import torch.distributed as dist

    port = _free_port()
    subprocess.Popen([sys.executable, "-m", __spec__.name, "gloo-echo", str(size), str(port)])
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=2)
    outgoing, incoming = torch.randn(size), torch.empty(size)

    def exchange() -> None:
        dist.send(outgoing, 1)
        dist.recv(incoming, 1)

    _answer(exchange)


def _gloo_echo(size: int, port: int) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=1, world_size=2)
    buffer = torch.empty(size)
    try:
        while True:
            dist.recv(buffer, 0)
            dist.send(buffer, 0)
    except RuntimeError:  # the other side has gone
        os._exit(0)


def _ray(size: int) -> None:
    import numpy as np
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # it ends its own processes then, and in silence

    @ray.remote
    class Server:
        def push(self, gradient: Any) -> Any:
            return gradient

    server: Any = Server.remote()
    gradient = np.random.default_rng(0).standard_normal(size, dtype=np.float32)
    _answer(lambda: ray.get(server.push.remote(gradient)))


def _answer(exchange: Callable[[], Any]) -> None:
    exchange()
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(_times(exchange, int(line))), flush=True)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


# --- ours --------------------------------------------------------------------------------------------------------


def _our_exchange(address: str, wire: Wire, size: int) -> tuple[Callable[[], None], Callable[[], None]]:
    from ringmaster_dist.transport.star import Client

    client = Client(address, token=TOKEN, connect_seconds=10.0, call_seconds=60.0)
    welcome = client.join(JoinRequest(PROTOCOL_VERSION, TOKEN, 0))
    assert welcome.snapshot is not None
    gradient, at = torch.randn(size), [0, welcome.snapshot.version]
    ends = Ends(wire, size, torch.float32)

    def exchange() -> None:
        push = Push(at[0], at[1], ends.pack_gradient(gradient), 0.0, 0.0)
        snapshot = client.push(welcome.session, push).snapshot
        assert snapshot is not None
        assert snapshot.version == at[1] + 1
        at[0], at[1] = at[0] + 1, snapshot.version

    return exchange, client.close


if __name__ == "__main__":
    others = {"tcp": _echo, "gloo": _gloo, "gloo-echo": _gloo_echo, "ray": _ray}
    if sys.argv[1] in others:
        others[sys.argv[1]](*map(int, sys.argv[2:]))
    else:
        serve("nanochat", _WIRES[sys.argv[2]], threshold=float("inf"), updates=False)
