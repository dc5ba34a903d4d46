"""``ringmaster bench exchange``: a push and the snapshot that comes back, beside the same bytes by other means.

Plain TCP, gloo's send and receive, and, where Ray is installed, a call of a Ray actor that takes and gives a tensor.

The peer is another process. Ours goes through everything but the update itself: the RPC agent, the unpickler, the
session, the checks of the gradient, the verdict, the ledger. With a narrow wire, rounding the gradient and the iterate
counts; widening them does not: that is done by the copy into the model and by the update, which any wire needs.

On one machine tensors are read across (cma), and only the calls pass the tunnel. Between machines everything does: two
network namespaces stand in for them (root and iproute2 are needed), with a link of 1 Gbit/s and with one as fast as the
machine is, each with TLS and without. Both ends share this machine's cores there. CPU is that of all the processes.
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

from ringmaster_dist.bench import links, show
from ringmaster_dist.bench.peers import TOKEN, Peer, cpu_seconds, serve
from ringmaster_dist.bench.update import paper_parameters
from ringmaster_dist.protocol import PROTOCOL_VERSION, JoinRequest, Push
from ringmaster_dist.wire import Codec, Wire

_COLUMNS = ["exchange", "relative", "ms", "worst ms", "MB each way", "CPU ms"]
_LINK_COLUMNS = ["between two machines", "x plain", "ms", "worst ms", "CPU ms", "join ms"]
_WIRES = {"float32": Wire(), "bfloat16": Wire(torch.bfloat16, torch.bfloat16)}
_OURS = {"float32": ("float32", True), "float32 without TLS": ("float32", False), "bfloat16": ("bfloat16", True)}
_RATES = {"1 Gbit/s": "1gbit", "an unshaped link": ""}


def run(quick: bool, as_json: bool) -> None:
    show("exchange", _COLUMNS, measure(rounds=1 if quick else 8), as_json)
    if not links.available():
        print("exchange: the links between two machines need root and iproute2, and were left out", file=sys.stderr)
        return
    rows = [row for name in _RATES for row in between_machines(name, rounds=1 if quick else 4)]
    show("exchange", _LINK_COLUMNS, rows, as_json)


def measure(rounds: int, exchanges: int = 5) -> list[dict[str, Any]]:
    """The candidates take turns, so that what disturbs the machine disturbs all of them."""
    from ringmaster_dist.transport.process_settings import keep_memory

    keep_memory()
    size = sum(parameter.size for parameter in paper_parameters())
    seconds: dict[str, list[float]] = {"raw TCP, float32": []}
    peers = [Peer(__name__, "tcp", str(4 * size))]
    raw = _raw_exchange(peers[0].address, 4 * size)
    used: dict[str, list[float]] = {}
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
            for name, (wire, tls) in _OURS.items():
                # A process has one RPC agent at a time, so each round makes a connection of its own.
                with Peer(__name__, "server", wire, "127.0.0.1", str(int(tls))) as peer:
                    exchange, close = _our_exchange(peer.address, _WIRES[wire], size, tls)
                    seconds["raw TCP, float32"] += _times(raw, exchanges)
                    before = cpu_seconds(os.getpid())
                    seconds.setdefault(f"ringmaster, {name}", []).extend(_times(exchange, exchanges))
                    used.setdefault(f"ringmaster, {name}", []).append(cpu_seconds(os.getpid()) - before)
                    close()
    finally:
        for peer in peers:
            peer.close()
    rows = [_row(name, times, min(seconds["raw TCP, float32"]), size) for name, times in seconds.items()]
    for row in rows:
        if row["exchange"] in used:
            row["CPU ms"] = round(min(used[row["exchange"]]) / (exchanges + 1) * 1e3, 1)
    return rows


def between_machines(name: str, rounds: int, exchanges: int = 5) -> list[dict[str, Any]]:
    """With TLS and without, by turns."""
    measured: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    with links.Link(_RATES[name]) as link:
        for _ in range(rounds):
            for tls, results in measured.items():
                server = [__name__, "server", "float32", links.ADDRESSES[0], str(int(tls))]
                with Peer(*server, prefix=link.inside(0)) as peer:
                    client = [sys.executable, "-m", __name__, "client", peer.address, str(int(tls)), str(exchanges)]
                    before = peer.cpu_seconds
                    done = subprocess.run([*link.inside(1), *client], capture_output=True, text=True)
                    assert done.returncode == 0, done.stderr
                    results.append(json.loads(done.stdout))
                    results[-1]["cpu"] += (peer.cpu_seconds - before) / (exchanges + 1)
    best = min(min(result["times"]) for result in measured[False])
    rows = []
    for tls, results in measured.items():
        times = [seconds for result in results for seconds in result["times"]]
        rows.append(
            {
                _LINK_COLUMNS[0]: f"{name}, {'TLS' if tls else 'plain'}",
                "x plain": f"{min(times) / best:.2f}x",
                "ms": round(min(times) * 1e3, 1),
                "worst ms": round(max(times) * 1e3, 1),
                "CPU ms": round(min(result["cpu"] for result in results) * 1e3, 1),
                "join ms": round(min(result["join"] for result in results) * 1e3, 1),
            }
        )
    return rows


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

    class Server:
        def push(self, gradient: Any) -> Any:
            return gradient

    server: Any = ray.remote(Server).remote()
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


def _client(address: str, tls: bool, exchanges: int) -> None:
    """A worker on another machine: tells its times, the seconds its join took, and the CPU seconds of an exchange."""
    from ringmaster_dist.transport import client  # noqa: F401  (torch's start is not part of a join)
    from ringmaster_dist.transport.process_settings import keep_memory

    keep_memory()
    size = sum(parameter.size for parameter in paper_parameters())
    began = time.perf_counter()
    exchange, _ = _our_exchange(address, _WIRES["float32"], size, tls)
    joined, before = time.perf_counter() - began, time.process_time()
    times = _times(exchange, exchanges)
    used = (time.process_time() - before) / (exchanges + 1)
    print(json.dumps({"times": times, "join": joined, "cpu": used}), flush=True)
    os._exit(0)


def _our_exchange(address: str, wire: Wire, size: int, tls: bool) -> tuple[Callable[[], None], Callable[[], None]]:
    from ringmaster_dist.transport.client import Client

    client = Client(address, token=TOKEN, tls=tls, connect_seconds=10.0, call_seconds=60.0)
    welcome = client.join(JoinRequest(PROTOCOL_VERSION, TOKEN, 0))
    assert welcome.snapshot is not None
    gradient, at = torch.randn(size), [0, welcome.snapshot.version]
    ends = Codec(wire, size, torch.float32)

    def exchange() -> None:
        push = Push(at[0], at[1], ends.encode_gradient(gradient), 0.0, 0.0)
        snapshot = client.push(welcome.session, push).snapshot
        assert snapshot is not None
        assert snapshot.version == at[1] + 1
        at[0], at[1] = at[0] + 1, snapshot.version

    return exchange, client.close


if __name__ == "__main__":
    others: dict[str, Callable[..., None]] = {"tcp": _echo, "gloo": _gloo, "gloo-echo": _gloo_echo, "ray": _ray}
    if sys.argv[1] in others:
        others[sys.argv[1]](*map(int, sys.argv[2:]))
    elif sys.argv[1] == "client":
        _client(sys.argv[2], sys.argv[3] == "1", int(sys.argv[4]))
    else:
        host, tls = sys.argv[3], sys.argv[4] == "1"
        serve("nanochat", _WIRES[sys.argv[2]], threshold=float("inf"), updates=False, host=host, tls=tls)
