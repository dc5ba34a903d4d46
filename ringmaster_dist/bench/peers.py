"""The processes on the other side of a bench: a server with the paper's layout, and clients that only push."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ringmaster_dist.bench.update import paper_parameters
from ringmaster_dist.wire import Wire

TOKEN = "a token of benches only"


class Peer:
    """A process that runs ``module`` with arguments; its first line, when it is ready, says where it listens."""

    def __init__(self, module: str, *arguments: str, prefix: Sequence[str] = ()) -> None:
        command = [*prefix, sys.executable, "-m", module, *arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)

    @cached_property
    def address(self) -> str:
        """Waits until it is ready: several may be started together, and be waited for then."""
        return self.answer()

    @property
    def cpu_seconds(self) -> float:
        """That it and the processes it has started have used so far."""
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
        self.close()

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()


def cpu_seconds(pid: int) -> float:
    """Of a process and its children, which it may have replaced itself by or have started."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    ticks = int(fields[11]) + int(fields[12])
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return ticks / os.sysconf("SC_CLK_TCK") + sum(cpu_seconds(int(child)) for child in children)


class Ignore:
    """A journal that keeps nothing."""

    def arrival(self, *arguments: Any) -> None: ...

    def membership(self, *arguments: Any) -> None: ...

    def change(self, *arguments: Any) -> None: ...

    def flush(self) -> None: ...

    def mark(self) -> dict[str, int]:
        return {}


def serve(
    problem: str, wire: Wire, *, threshold: float, updates: bool, compute_threads: int = 1, host: str = "127.0.0.1",
    tls: bool = True,
) -> None:  # fmt: skip
    """Serves until the process is ended. Without ``updates`` versions count on and nothing is computed."""
    from ringmaster_dist.algorithm.layout import GEOMETRY_MAPS, Layout, Parameter
    from ringmaster_dist.algorithm.methods import Method
    from ringmaster_dist.algorithm.schedules import Constant
    from ringmaster_dist.algorithm.update import Update
    from ringmaster_dist.server.core import ServerCore
    from ringmaster_dist.server.service import Service, Settings
    from ringmaster_dist.transport.memory import return_memory
    from ringmaster_dist.transport.star import Host

    return_memory()
    torch.set_num_threads(compute_threads)
    parameters = paper_parameters() if problem == "nanochat" else [Parameter("x", (1729,))]
    layout = Layout(parameters, GEOMETRY_MAPS["muon"])
    update = Update(layout)
    if not updates:
        update.apply = lambda *arguments, **settings: None  # type: ignore[method-assign]
    method = Method(Constant(1e-6, 0.05, threshold))
    core = ServerCore(torch.zeros(layout.size), method, update, wire.gradient_dtype)
    never = float("inf")
    settings = Settings(
        "", "", TOKEN, max_updates=never, max_seconds=never, lease_seconds=600.0, max_invalid=10, wire=wire
    )
    service = Service(core, settings, Ignore())
    hosted = Host(service, host, 0, token=TOKEN, tensor_bytes=4 * layout.size, tls=tls, threads=16, timeout=60.0,
                  handshake_seconds=5.0)  # fmt: skip
    service.start()
    print(hosted.address, flush=True)
    signal.pause()
