"""The other side of a bench: its processes, a server of the paper's layout, and a worker that only pushes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ringmaster_dist.algorithm.layout import GEOMETRY_MAPS, Layout, Parameter
from ringmaster_dist.algorithm.methods import Method
from ringmaster_dist.algorithm.schedules import Constant
from ringmaster_dist.algorithm.update import Update
from ringmaster_dist.bench.arithmetic import paper_layout
from ringmaster_dist.protocol import PROTOCOL_VERSION, JoinRequest, Push
from ringmaster_dist.wire import Codec, Wire

_TOKEN = "a token of benches only"


class Peer:
    """A process that runs ``module`` with arguments. Its first line says that it is ready, and where it listens."""

    def __init__(self, module: str, *arguments: str, prefix: Sequence[str] = ()) -> None:
        command = [*prefix, sys.executable, "-m", module, *arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)

    @cached_property
    def address(self) -> str:
        """Blocks until the process is ready. It is empty if the process has failed."""
        return self.answer()

    @property
    def cpu_seconds(self) -> float:
        return cpu_seconds(self._process.pid)

    def ask(self, text: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{text}\n")

    def answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.terminate()
        self._process.wait()


def descendants(pid: int) -> Iterator[int]:
    """A process, its children, their children, and so on."""
    yield pid
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        yield from descendants(int(child))


def cpu_seconds(pid: int) -> float:
    """CPU seconds that a process and its descendants have used so far."""
    ticks = 0
    for each in descendants(pid):
        fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


class NoArithmetic(Update):
    """An update that computes nothing. The next iterate has undefined content, and the version still increases."""

    def apply(self, *arguments: Any, **settings: Any) -> None: ...


def layout_of(problem: str) -> Layout:
    """The layout of the paper's model (``nanochat``) or of a small vector (``quadratic``)."""
    return paper_layout() if problem == "nanochat" else Layout([Parameter("x", (1729,))], GEOMETRY_MAPS["muon"])


def serve(
    problem: str, wire: Wire, *, threshold: float, updates: bool, host: str = "127.0.0.1", tls: bool = True,
    device: str = "cpu",
) -> None:  # fmt: skip
    """Serves until the process is ended. Without ``updates`` nothing is computed."""
    from ringmaster_dist.process_settings import return_memory
    from ringmaster_dist.server.core import ServerCore
    from ringmaster_dist.server.outlets import NoJournal
    from ringmaster_dist.server.service import Service, Settings
    from ringmaster_dist.transport.host import Host

    return_memory()
    torch.set_num_threads(1)
    layout = layout_of(problem)
    update = Update(layout, device=device) if updates else NoArithmetic(layout)
    method = Method(Constant(1e-6, 0.05, threshold))
    core = ServerCore(torch.zeros(layout.size), method, update, wire.gradient_dtype)
    never = float("inf")
    settings = Settings(
        "", "", _TOKEN, max_updates=never, max_seconds=never, lease_seconds=600.0, max_invalid=10, wire=wire
    )
    service = Service(core, settings, NoJournal())
    hosted = Host(service, host, 0, token=_TOKEN, tensor_bytes=4 * layout.size, tls=tls, threads=16, timeout=60.0,
                  handshake_seconds=5.0)  # fmt: skip
    service.start()
    print(hosted.address, flush=True)
    signal.pause()


class Pusher:
    """A worker that pushes the same gradient, (size,), again and again. A process has one at a time."""

    def __init__(self, address: str, size: int, wire: Wire, *, tls: bool = True) -> None:
        from ringmaster_dist.process_settings import keep_memory
        from ringmaster_dist.transport.client import Client

        keep_memory()
        torch.set_num_threads(1)  # as a worker has by default
        self._client = Client(address, token=_TOKEN, tls=tls, connect_seconds=10.0, call_seconds=60.0)
        welcome = self._client.join(JoinRequest(PROTOCOL_VERSION, _TOKEN, 0))
        assert welcome.snapshot is not None
        self._session, self.version = welcome.session, welcome.snapshot.version
        self._gradient, self._sequence = torch.randn(size), 0
        self._codec = Codec(wire, size, torch.float32)
        self.close = self._client.close

    def push(self, version: int | None = None) -> bool:
        """Pushes a gradient of this version, or of the newest. Returns whether it was accepted."""
        at = self.version if version is None else version
        packed = self._codec.encode_gradient(self._gradient, 0, 0, self._sequence)
        push = Push(self._sequence, at, packed, 0.0, 0.0)
        reply = self._client.push(self._session, push)
        assert reply.receipt is not None
        assert reply.snapshot is not None
        self._sequence, self.version = self._sequence + 1, reply.snapshot.version
        return reply.receipt.verdict.value == "accepted"
