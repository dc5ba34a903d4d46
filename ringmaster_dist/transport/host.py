"""The server's end of the transport: torch's RPC agent, and the gate in front of it.

The agent listens on loopback and accepts connections from the gate alone (gate.py, loopback.py). The gate is a process
of its own and owns the public port. A thread of this process restarts the gate when it dies.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path

import torch

from ringmaster_dist import addresses
from ringmaster_dist.process_settings import raise_descriptor_limit
from ringmaster_dist.protocol import Handlers
from ringmaster_dist.transport import agent, loopback
from ringmaster_dist.transport.gate import Settings
from ringmaster_dist.transport.streams import shut

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.5  # how often the watching thread checks that the agent listens and that nobody closes the host
_MOST_GATE_DEATHS, _GATE_DEATHS_SECONDS = 10, 60.0  # if the gate dies more often within this time, the server gives up
_KEPT_DESCRIPTORS, _DESCRIPTORS_OF_A_PIPE = 128, 4  # the kept ones are for checkpoints and everything else
_START_SECONDS = 30.0  # the gate may take this long to start
_END_SECONDS = 3.0  # the gate may take this long to end, then it is killed
_START_GATE = """import sys
path, *sys.argv[1:] = sys.argv[1:]
sys.path[:] = __import__("json").loads(path)
from ringmaster_dist.transport import gate
sys.exit(gate.main())"""


class Host:
    """Serves from the moment it is made until `close`. RPC threads call the handlers.

    ``tensor_bytes`` is the largest tensor that a worker may send, ``timeout`` is torch's own for a call, and a peer has
    to introduce itself within ``handshake_seconds``. At most ``workers_per_address`` may connect from one address, not
    counting those that this user starts on this machine. If it is ``insecure``, the host serves also where the system
    cannot keep other users of the machine away. Raises OSError or AddressError if the host cannot listen,
    and RuntimeError if this torch or kernel is not known.
    """

    def __init__(
        self, handlers: Handlers, host: str, port: int, *, token: str, tensor_bytes: int, threads: int,
        timeout: float, tls: bool = True, insecure: bool = False, handshake_seconds: float,
        workers_per_address: int = 64,
    ) -> None:  # fmt: skip
        agent.check_assumptions()
        self._public = addresses.listen(host, port)
        self.address = addresses.published(host, self._public.getsockname()[1])
        self._counts = {"pipes": 0, "received": 0, "sent": 0, "refused": 0}
        self._failure = ""
        self._closing = threading.Event()
        most_pipes = max(1, (raise_descriptor_limit() - _KEPT_DESCRIPTORS) // _DESCRIPTORS_OF_A_PIPE)
        agent.serve(handlers)
        self._descriptor, self._agent, key = agent.start_server_agent(threads, timeout, insecure=insecure)
        self._inode = os.fstat(self._descriptor).st_ino
        self._neighbours = loopback.meet_neighbours(self._public.getsockname()[1])
        self._settings = Settings(
            token=token, tls=tls, handshake_seconds=handshake_seconds, tensor_bytes=tensor_bytes,
            most_pipes=most_pipes, key=key.hex(), torch=torch.__version__, about=agent.versions(),
            most_from_one_address=workers_per_address,
        )  # fmt: skip
        self._is_ready = threading.Event()
        self._process, self._control = self._start_gate()
        self._watcher = threading.Thread(target=self._watch, name="gate", daemon=True)
        self._watcher.start()
        if not self._is_ready.wait(_START_SECONDS) or self._failure:
            self.close()
            raise RuntimeError(self._failure or "the gate did not start")

    def check(self) -> None:
        """Raises RuntimeError if workers cannot reach this server any more."""
        if self._failure:
            raise RuntimeError(self._failure)

    @property
    def counts(self) -> dict[str, int]:
        """The counts of this host so far.

        ``pipes`` is the number of times that workers have connected, reconnections included. ``received`` and ``sent``
        are bytes through the tunnel, without the tensors that processes of one machine read across. ``refused`` is the
        number of peers that did not prove the token or did not introduce themselves.
        """
        return dict(self._counts)

    def close(self) -> None:
        """Stops serving. The last answers are still delivered. Blocks for a few seconds at most."""
        self._closing.set()
        agent.stop_agent()
        for one in (self._public, self._agent, self._neighbours):
            if one is not None:
                one.close()
        shut(self._control)
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _start_gate(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        ours, its = socket.socketpair()
        handed = [one.fileno() for one in (self._public, self._agent, self._neighbours) if one is not None]
        # Python runs isolated, with a path without the current folder: others may be able to write modules there.
        path = [str(Path(__file__).parents[2]), *(entry for entry in sys.path if entry not in ("", os.getcwd()))]
        command = [sys.executable, "-I", "-c", _START_GATE, json.dumps(path), *map(str, handed)]
        with its:
            process = subprocess.Popen(command, stdin=its.fileno(), stdout=subprocess.DEVNULL, pass_fds=handed)
        ours.sendall(json.dumps(asdict(self._settings)).encode() + b"\n")
        return process, ours

    def _watch(self) -> None:
        """Restarts the gate when it dies, keeps its counts, and notices when the agent stops listening."""
        before = dict(self._counts)  # of earlier gates
        deaths: list[float] = []
        while not self._closing.is_set() and not self._failure:
            try:
                self._follow_gate(before)
            except OSError as error:
                log.debug("the gate's control connection: %s", error)
            if self._closing.is_set() or self._failure:
                break
            now = time.monotonic()
            deaths = [death for death in deaths if now - death < _GATE_DEATHS_SECONDS] + [now]
            if len(deaths) > _MOST_GATE_DEATHS:
                self._failure = f"the gate has died {len(deaths)} times within {_GATE_DEATHS_SECONDS:g} s"
                break
            self._process.kill()
            log.warning("server: the gate has died (exit code %s): starting another", self._process.wait())
            before = dict(self._counts)
            try:
                self._process, self._control = self._start_gate()
            except OSError as error:
                self._failure = f"another gate could not be started: {error}"
        self._is_ready.set()

    def _follow_gate(self, before: dict[str, int]) -> None:
        """Reads the gate's counts until the gate dies or the agent has failed."""
        self._control.settimeout(_POLL_SECONDS)
        line = b""
        while not self._closing.is_set():
            try:
                data = self._control.recv(4096)
                if not data:
                    return
                *lines, line = (line + data).split(b"\n")
                for facts in map(json.loads, lines):
                    if "failed" in facts:
                        self._failure = facts["failed"]
                        return
                    self._counts = {name: before[name] + facts[name] for name in before}
                    self._is_ready.set()
            except TimeoutError:
                pass
            if not self._agent_listens():
                self._failure = "torch's RPC agent has stopped listening"
                return

    def _agent_listens(self) -> bool:
        try:
            return os.fstat(self._descriptor).st_ino == self._inode
        except OSError:
            return False
