"""``ringmaster bench exchange``: a push and the snapshot that comes back, beside the same bytes over plain TCP.

The peer is another process. Ours goes through everything but the update itself: the RPC agent, the unpickler, the
session, the checks of the gradient, the verdict, the ledger. With a narrow wire, rounding the gradient and the iterate
counts; widening them does not: that is done by the copy into the model and by the update, which any wire needs.
"""

from __future__ import annotations

import socket
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
    show("exchange", _COLUMNS, measure(rounds=3 if quick else 8), as_json)


def measure(rounds: int, exchanges: int = 5) -> list[dict[str, Any]]:
    """The candidates take turns, so that what disturbs the machine disturbs all of them."""
    from ringmaster_dist.transport.memory import keep_memory

    keep_memory()
    size = sum(parameter.size for parameter in paper_parameters())
    seconds: dict[str, list[float]] = {"raw TCP, float32": []}
    peers = [Peer(__name__, "tcp", str(4 * size))]
    raw = _raw_exchange(peers[0].address, 4 * size)
    candidates: dict[str, Callable[[], None]] = {"raw TCP, float32": raw}
    try:
        for _ in range(rounds):
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


# --- ours --------------------------------------------------------------------------------------------------------


def _our_exchange(address: str, wire: Wire, size: int) -> tuple[Callable[[], None], Callable[[], None]]:
    from ringmaster_dist.transport.star import Client

    client = Client(address, connect_seconds=10.0, call_seconds=60.0)
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
    if sys.argv[1] == "tcp":
        _echo(int(sys.argv[2]))
    else:
        serve("nanochat", _WIRES[sys.argv[2]], threshold=float("inf"), updates=False)
