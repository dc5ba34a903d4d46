"""``ringmaster bench exchange``: a push and the snapshot that comes back, versus the same bytes by other means.

The others are plain TCP, gloo's send and receive, and, if Ray is installed, a call of a Ray actor that takes and
returns a tensor. Each runs between two processes. Our exchange has everything but the update itself: the RPC agent, the
unpickler, the session, the checks of the gradient, the verdict and the ledger. With a narrow wire, rounding counts.
Widening does not count, because the copy into the model and the update do it for any wire. Only gradients travel in
int8, so the iterates of that exchange are in bfloat16.

On one machine the receiver reads the tensors from the sender's memory (cma), and only the calls pass the tunnel.
Between machines everything does. Two network namespaces stand in for them, which needs root and iproute2. Their link is
one of 1 Gbit/s and one as fast as the machine, each with TLS and without. Both ends share the cores of this machine.
CPU is that of all processes.
"""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from ringmaster_dist.bench import compared, seconds_of, show
from ringmaster_dist.bench.peers import Peer, Pusher, cpu_seconds, layout_of, serve
from ringmaster_dist.wire import Codec, Wire

_COLUMNS = ["exchange", "relative", "ms", "worst ms", "MB up", "MB down", "CPU ms"]
_LINK_COLUMNS = ["between two machines", "x plain", "ms", "worst ms", "CPU ms", "join ms"]
_EXCHANGES = 5  # of each candidate per round, after one that is not counted
_WIRES = {"float32": Wire(), "bfloat16": Wire(torch.bfloat16, torch.bfloat16), "int8": Wire(torch.int8, torch.bfloat16)}
_OURS = {"ringmaster, float32": ("float32", True), "ringmaster, float32 without TLS": ("float32", False),
         "ringmaster, bfloat16": ("bfloat16", True),
         "ringmaster, int8": ("int8", True)}  # fmt: skip
_BASELINE = "raw TCP, float32"
_OTHERS = {_BASELINE: "tcp", "gloo send and receive, float32": "gloo"}
_RATES = {"1 Gbit/s": "1gbit", "an unshaped link": ""}
_ADDRESSES = ("10.219.0.1", "10.219.0.2")


def run(quick: bool, as_json: bool) -> None:
    size = layout_of("nanochat").size
    show("exchange", _COLUMNS, on_one_machine(size, rounds=1 if quick else 8), as_json)
    if not can_make_links():
        print("exchange: the links between two machines need root and iproute2, and were left out", file=sys.stderr)
        return
    names = list(_RATES)[-1:] if quick else list(_RATES)
    rows = [row for name in names for row in between_machines(name, size, rounds=1 if quick else 4)]
    show("exchange", _LINK_COLUMNS, rows, as_json)


def can_make_links() -> bool:
    """Whether this process may make network namespaces."""
    return os.geteuid() == 0 and bool(shutil.which("ip") and shutil.which("tc"))


def servers_cpu_seconds(size: int, rounds: int) -> float:
    """CPU seconds of a server per exchange of ``size`` numbers in float32, over TLS, without the update."""
    with _namespaces("") as ends:
        return float(min(_exchanged(ends, size, tls=True)["servers_cpu"] for _ in range(rounds)))


def on_one_machine(size: int, rounds: int) -> list[dict[str, Any]]:
    """The candidates take turns, so that a disturbance affects all of them."""
    kinds = _OTHERS | ({"Ray actor, float32": "ray"} if importlib.util.find_spec("ray") else {})
    seconds: dict[str, list[float]] = {name: [] for name in (*kinds, *_OURS)}
    cpu: dict[str, list[float]] = {name: [] for name in _OURS}
    with ExitStack() as stack:
        others = {name: stack.enter_context(Peer(__name__, kind, str(size))) for name, kind in kinds.items()}
        servers = {
            name: stack.enter_context(Peer(__name__, "server", wire, "127.0.0.1", str(int(tls))))
            for name, (wire, tls) in _OURS.items()
        }
        assert all(peer.address for peer in (*others.values(), *servers.values())), "one of them has not come up"
        for _ in range(rounds):
            for name, other in others.items():
                other.ask(str(_EXCHANGES))
                seconds[name] += json.loads(other.answer())
            for name, (wire, tls) in _OURS.items():
                # A process has one RPC agent at a time, so each round makes a connection of its own.
                pusher = Pusher(servers[name].address, size, _WIRES[wire], tls=tls)
                before = cpu_seconds(os.getpid())
                seconds[name] += _times(pusher.push, _EXCHANGES)
                cpu[name].append((cpu_seconds(os.getpid()) - before) / (_EXCHANGES + 1))
                pusher.close()
    rows = compared("exchange", seconds, _BASELINE)
    for row in rows:
        codec = Codec(_WIRES[_OURS.get(row["exchange"], ("float32", True))[0]], size, torch.float32)
        row["MB up"], row["MB down"] = round(codec.gradient_bytes / 1e6, 1), round(codec.iterate_bytes / 1e6, 1)
        if row["exchange"] in cpu:
            row["CPU ms"] = round(1e3 * min(cpu[row["exchange"]]), 1)
    return rows


def between_machines(name: str, size: int, rounds: int) -> list[dict[str, Any]]:
    """With TLS and without, by turns."""
    measured: dict[str, list[dict[str, Any]]] = {"plain": [], "TLS": []}
    with _namespaces(_RATES[name]) as ends:
        for _ in range(rounds):
            for tls, results in measured.items():
                results.append(_exchanged(ends, size, tls=tls == "TLS"))
    times = {tls: [t for result in results for t in result["times"]] for tls, results in measured.items()}
    rows = compared("tls", times, "plain")
    for row in rows:
        results, row["x plain"] = measured[row["tls"]], row["relative"]
        row[_LINK_COLUMNS[0]] = f"{name}, {row['tls']}"
        row["CPU ms"] = round(1e3 * min(result["cpu"] + result["servers_cpu"] for result in results), 1)
        row["join ms"] = round(1e3 * min(result["join"] for result in results), 1)
    return rows


def _exchanged(ends: list[list[str]], size: int, *, tls: bool) -> dict[str, Any]:
    """What `_client` measures on one end of a link, and the CPU seconds of an exchange on the other end."""
    (on_server, on_worker), secure = ends, str(int(tls))
    with Peer(__name__, "server", "float32", _ADDRESSES[0], secure, prefix=on_server) as peer:
        client = [sys.executable, "-m", __name__, "client", peer.address, str(size), secure]
        before = peer.cpu_seconds
        done = subprocess.run([*on_worker, *client], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        result: dict[str, Any] = json.loads(done.stdout)
        result["servers_cpu"] = (peer.cpu_seconds - before) / (_EXCHANGES + 1)
        return result


@contextmanager
def _namespaces(rate: str) -> Iterator[list[list[str]]]:
    """Two network namespaces with a link between them. Gives the two command prefixes that start a program inside.

    ``rate`` is the speed of the link as tc writes it, such as 1gbit. It is empty for a link as fast as the machine.
    """
    names = [f"ringmaster-{os.getpid()}-{side}" for side in "ab"]
    devices = [f"rm{os.getpid() % 100000}{side}" for side in "ab"]

    def call(text: str) -> None:
        subprocess.run(text.split(), check=True, capture_output=True)

    try:
        for namespace in names:
            call(f"ip netns add {namespace}")
        call(f"ip link add {devices[0]} netns {names[0]} type veth peer name {devices[1]} netns {names[1]}")
        for namespace, device, address in zip(names, devices, _ADDRESSES, strict=True):
            call(f"ip -n {namespace} addr add {address}/24 dev {device}")
            for each in ("lo", device):
                call(f"ip -n {namespace} link set {each} up")
            if rate:
                call(f"tc -n {namespace} qdisc add dev {device} root handle 1: htb default 1")
                call(f"tc -n {namespace} class add dev {device} parent 1: classid 1:1 htb rate {rate}")
        yield [["ip", "netns", "exec", namespace] for namespace in names]
    finally:
        for namespace in names:
            subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, check=False)


def _times(exchange: Callable[[], object], repeats: int) -> list[float]:
    exchange()  # the first one allocates memory
    return seconds_of(exchange, repeats)


# --- in the other processes ----------------------------------------------------------------------------------------


def _client(address: str, size: int, tls: bool) -> None:
    """A worker on another machine. Prints its times, the seconds of its join, and the CPU seconds of an exchange."""
    from ringmaster_dist.transport import client  # noqa: F401  (the import of torch's RPC is not part of a join)

    began = time.perf_counter()
    pusher = Pusher(address, size, Wire(), tls=tls)
    joined, before = time.perf_counter() - began, time.process_time()
    times = _times(pusher.push, _EXCHANGES)
    cpu = (time.process_time() - before) / (_EXCHANGES + 1)
    print(json.dumps({"times": times, "join": joined, "cpu": cpu}), flush=True)
    os._exit(0)


def _answer(exchange: Callable[[], object]) -> None:
    """Reads a number of exchanges, and prints their seconds."""
    exchange()
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(_times(exchange, int(line))), flush=True)


def _start(target: Callable[..., None], *arguments: int) -> None:
    multiprocessing.get_context("spawn").Process(target=target, args=arguments, daemon=True).start()


def _tcp(size: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        _start(_tcp_echo, size, listener.getsockname()[1])
        stream, _ = listener.accept()
    outgoing, incoming = bytes(4 * size), bytearray(4 * size)

    def exchange() -> None:
        stream.sendall(outgoing)
        _receive(stream, incoming)

    _answer(exchange)


def _tcp_echo(size: int, port: int) -> None:
    stream, buffer = socket.create_connection(("127.0.0.1", port)), bytearray(4 * size)
    while _receive(stream, buffer):
        stream.sendall(buffer)


def _receive(stream: socket.socket, into: bytearray) -> bool:
    """Fills the buffer. False if the other side has closed the connection."""
    rest = memoryview(into)
    while rest:
        count = stream.recv_into(rest)
        if count == 0:
            return False
        rest = rest[count:]
    return True


def _gloo(size: int) -> None:
    import torch.distributed as dist

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]  # free once the listener is closed
    _start(_gloo_echo, size, port)
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
    except RuntimeError:  # the other process has ended
        os._exit(0)


def _ray(size: int) -> None:
    import numpy as np
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # so that Ray ends its own processes

    class Server:
        def push(self, gradient: Any) -> Any:
            return gradient

    server: Any = ray.remote(Server).remote()
    gradient = np.random.default_rng(0).standard_normal(size, dtype=np.float32)
    _answer(lambda: ray.get(server.push.remote(gradient)))


if __name__ == "__main__":
    kind, *words = sys.argv[1:]
    if kind == "client":
        _client(words[0], int(words[1]), words[2] == "1")
    elif kind == "server":
        wire, host, tls = words
        serve("nanochat", _WIRES[wire], threshold=float("inf"), updates=False, host=host, tls=tls == "1")
    else:
        {"tcp": _tcp, "gloo": _gloo, "ray": _ray}[kind](int(words[0]))
