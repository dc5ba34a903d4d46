"""Several hosts: a server and workers in separate network namespaces, with links that are cut, long, lossy and narrow.

After each test counters add up, the run ends by itself, and the trace replays to the same bits (`check_finished`).
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.distributed.attacker import listening
from tests.distributed.processes import LONG, Run, check_finished, descendants, processes_with, recompute, until
from tests.e2e.network import Network, require_namespaces

pytestmark = [pytest.mark.netns, pytest.mark.e2e]

ROOT = Path(__file__).resolve().parents[2]
PORT = 29400
TOKEN = {"RINGMASTER_TOKEN": "0123456789abcdef" * 2}
SERVER = ["cluster.local_workers=0", f"server.port={PORT}", "method=asynchronous", "problem.dim=2000",
          "cluster.profile=similar", "cluster.unit_seconds=0.02", "server.start_seconds=0", *LONG]  # fmt: skip
HASTY = ["connect_seconds=5", "call_seconds=4"]


@pytest.fixture
def network(monkeypatch):
    require_namespaces()
    monkeypatch.setenv("RINGMASTER_TOKEN", TOKEN["RINGMASTER_TOKEN"])
    with Network() as network:
        yield network


class Workers:
    """Worker processes by name, one on each machine. All are ended afterwards."""

    def __init__(self, network: Network, address: str) -> None:
        self._network, self._address = network, address
        self.processes: dict[str, subprocess.Popen] = {}

    def __enter__(self) -> "Workers":
        return self

    def start(self, name: str, slot: int = 0) -> None:
        command = [*self._network.at(name), sys.executable, "-m", "ringmaster_dist.worker", f"server={self._address}"]
        environment = {**os.environ, **TOKEN}
        self.processes[name] = subprocess.Popen([*command, f"slot={slot}", *HASTY], env=environment)

    def check_ended(self) -> None:
        codes = {name: process.wait() for name, process in self.processes.items()}
        assert set(codes.values()) == {0}, codes

    def __exit__(self, *exception: object) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()


def events(run: Run, worker: int) -> list[str]:
    return [m["event"] for m in run.members() if m["worker"] == worker]


def test_links_that_are_cut_and_restored(network, tmp_path):
    """The link of one worker is cut for 4 s, that of another for longer than its lease, and then that of the
    server."""
    lease = 12.0
    host = network.machine("server")
    for name in ("steady", "short", "long"):
        network.machine(name)
    overrides = [*SERVER, f"server.host={host}", "cluster.workers=3", f"server.lease_seconds={lease}"]
    run = Run(tmp_path / "run", f"run.dir={tmp_path}/run", *overrides, "resume=null", prefix=network.at("server"))
    with run, Workers(network, f"{host}:{PORT}") as workers:
        for number, name in enumerate(("steady", "short", "long")):  # one after the other, so that their ids are known
            workers.start(name)
            until(lambda number=number: len(run.joined()) == number + 1, f"{name} has joined")
        until(lambda: run.version() > 20, "the run goes on")
        assert (tmp_path / "run/address").read_text() == f"{host}:{PORT}"

        def pushes(worker: int) -> int:
            return sum(arrival["worker"] == worker for arrival in run.arrivals())

        network.cut("short")
        network.cut("long")
        began, silent, version = time.monotonic(), pushes(1), run.version()
        until(lambda: time.monotonic() > began + 4 and run.version() > version + 20, "the steady one has not noticed")
        assert pushes(1) <= silent + 2
        network.mend("short")
        until(lambda: pushes(1) > silent + 10, "the one that was cut off for a while delivers again")
        assert events(run, 1) == ["join"]  # and was a member all the time
        until(lambda: events(run, 2) == ["join", "leave"], "the other's lease has ended")
        assert time.monotonic() - began > lease - 1
        network.mend("long")
        until(lambda: events(run, 2)[-1] == "join", "it is back under its old id")
        silent = pushes(2)
        until(lambda: pushes(2) > silent + 10, "and delivers")

        network.cut("server")
        cut_at, arrived = time.monotonic(), len(run.arrivals())
        until(lambda: time.monotonic() > cut_at + 3, "three seconds")
        assert len(run.arrivals()) <= arrived + 6
        network.mend("server")
        until(lambda: len(run.arrivals()) > arrived + 50, "everybody is back")
        run.interrupt()
        summary = check_finished(run)
        workers.check_ended()
    assert summary["ended"] == "stopped by the user"
    assert summary["num_workers"] == 3
    assert summary["terms"] == 1


@pytest.mark.alone
def test_a_bad_link_slows_only_its_own_worker(network, tmp_path):
    """One link has 50 ms and 1 % loss, and another has a tenth of a megabyte per second. The third worker keeps its
    pace."""
    host = network.machine("server")
    network.machine("near")
    network.machine("far", delay_seconds=0.05, loss=0.01)
    network.machine("thin")
    network.narrow("thin", "800kbit")
    overrides = [*SERVER, f"server.host={host}", "cluster.workers=3"]
    run = Run(tmp_path / "run", f"run.dir={tmp_path}/run", *overrides, "resume=null", prefix=network.at("server"))
    with run, Workers(network, f"{host}:{PORT}") as workers:
        for number, name in enumerate(("near", "far", "thin")):
            workers.start(name)
            until(lambda number=number: len(run.joined()) == number + 1, f"{name} has joined")
        before = run.arrivals()

        def delivered() -> Counter:
            """The gradients of each worker since all three are there."""
            return Counter(arrival["worker"] for arrival in run.arrivals()[len(before) :])

        until(lambda: delivered()[1] > 40 and delivered()[2] > 15, "the bad links deliver")
        run.interrupt()
        check_finished(run)
        workers.check_ended()
    near, far, thin = (delivered()[worker] for worker in range(3))
    seconds = run.arrivals()[-1]["time"] - before[-1]["time"]
    assert near > 0.4 * seconds / 0.02
    assert far < 0.5 * near
    assert thin < 0.3 * near
    assert network.lost_frames() > 0


@pytest.mark.parametrize("launcher", ["ringmaster", "torchrun"])
def test_the_scripts_of_two_machines(network, tmp_path, launcher):
    """Runs launch/server.sh and launch/worker.sh. The server crashes and is restarted."""
    host = network.machine("server")
    network.machine("worker")
    run = tmp_path / "run"
    environment = {**os.environ, **TOKEN, "RINGMASTER_PYTHON": sys.executable, "WORKERS": "2", "LAUNCHER": launcher}
    overrides = ["problem.dim=50", "cluster.profile=similar", "cluster.unit_seconds=0.02", "method=asynchronous",
                 "budget.updates=500", "budget.seconds=null", "checkpoint.every=10"]  # fmt: skip
    serving = {**environment, "SERVER_HOST": host, "RUN_DIR": str(run)}
    server = subprocess.Popen(
        [*network.at("server"), str(ROOT / "launch/server.sh"), *overrides],
        env=serving,
        stdout=subprocess.PIPE,
        text=True,
    )
    worker = subprocess.Popen(
        [*network.at("worker"), str(ROOT / "launch/worker.sh"), f"{host}:{PORT}"], env=environment
    )
    try:
        until(lambda: list(run.glob("checkpoints/*.safetensors")), "a checkpoint")
        if launcher == "torchrun":
            (rank,) = set(processes_with("ringmaster_dist.train", f"run.dir={run}")) - set(
                processes_with("torch.distributed.run", f"run.dir={run}")
            )
        else:
            (rank,) = (pid for pid, name in descendants(server.pid).items() if name == "server")
        os.kill(rank, signal.SIGKILL)
        output, _ = server.communicate()
        assert (server.returncode, worker.wait()) == (0, 0)
    finally:
        for process in (server, worker):
            process.kill()
            process.wait()
    assert "500 updates" in output
    assert len((run / "terms.jsonl").read_text().splitlines()) == 2
    assert json.loads((run / "summary.json").read_text())["num_workers"] == 2
    assert recompute(run).same


class Forwarder:
    """Forwards one port of the router to the server. Nothing else passes between the two networks."""

    def __init__(self, network: Network, host: str, log: Path) -> None:
        self._log = log
        with log.open("w") as output:
            command = [*network.at("router"), sys.executable, str(ROOT / "tests/e2e/forward.py"), str(PORT), host]
            self._process = subprocess.Popen([*command, str(PORT)], stdout=output)
        until(lambda: "ready" in log.read_text(), "it forwards")

    def carried(self) -> list[int]:
        return [int(word) for word in self._log.read_text().splitlines()[-1].split()]

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


def connections(space: str) -> set[tuple[str, str]]:
    """Returns the local and remote addresses of the established TCP connections that leave a namespace."""
    listed = subprocess.run(
        ["ip", "netns", "exec", space, "ss", "-Htn", "state", "established"], capture_output=True, text=True, check=True
    )
    ends = {tuple(line.split()[2:4]) for line in listed.stdout.splitlines()}
    return {(local, remote) for local, remote in ends if not local.startswith("127.")}


def test_one_forwarded_port_is_all_that_a_cluster_needs(network, tmp_path):
    """Two networks have no route between them. A router forwards one port, is cut, and comes back.

    Every byte between workers and server passes that port, through the tunnel, and no other connection leaves.
    """
    host = network.machine("server")
    network.second_network("worker", router="router")
    outside = network.address_of_router
    overrides = [*SERVER, f"server.host={host}", "cluster.workers=1", "server.lease_seconds=3"]
    run = Run(tmp_path / "run", f"run.dir={tmp_path}/run", *overrides, "resume=null", prefix=network.at("server"))
    with run, Workers(network, f"{outside}:{PORT}") as workers:
        forwarder = Forwarder(network, host, tmp_path / "first.log")
        workers.start("worker")
        until(lambda: run.version() > 50, "the run is on")
        for space, other in (("server", "router"), ("worker", "router")):
            found = connections(network.space(space))
            assert found, "nobody is connected"
            assert all(f":{PORT}" in local + remote for local, remote in found), (other, found)
        row = until(lambda: run._records("metrics.jsonl")[-1], "a row")
        until(lambda: forwarder.carried()[0] > row["tunnel_bytes_received"], "they are counted")
        forwarder.stop()
        until(lambda: events(run, 0)[-1] == "leave", "the worker was cut off for longer than its lease")
        forwarder = Forwarder(network, host, tmp_path / "second.log")
        version = until(lambda: events(run, 0)[-1] == "join" and run.version(), "it is back")
        until(lambda: run.version() > version + 50, "and delivers")
        run.interrupt()
        summary = check_finished(run)
        workers.check_ended()
        forwarder.stop()
    logs = [_last(tmp_path / name) for name in ("first.log", "second.log")]
    carried = [sum(pair) for pair in zip(*logs, strict=True)]
    row = run._records("metrics.jsonl")[-1]
    known = [arrival for arrival in run.arrivals() if arrival["time"] < row["time"] - 1.0]  # counts are up to 0.2 s old
    payload = len(known) * 2000 * 8  # gradients of float64
    for counted, passed in zip((row["tunnel_bytes_received"], row["tunnel_bytes_sent"]), carried, strict=True):
        assert payload < counted < passed < 1.2 * counted, (payload, counted, passed)
    assert summary["num_workers"] == 1


def _last(log: Path) -> list[int]:
    return [int(word) for word in log.read_text().splitlines()[-1].split()]


def test_other_users_of_the_machine_reach_no_agent(tmp_path):
    """The user ``nobody`` can connect only to the public port, and can read no file of the run."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to become another user")
    with Run(tmp_path / "run", *LONG) as run:
        until(lambda: run.version() > 5, "the run is on")
        found = sorted(listening(run.children()))
        public = int((tmp_path / "run/address").read_text().rpartition(":")[2])
        code = (
            "import socket, sys\n"
            "for word in sys.argv[2:]:\n"
            "    host, _, port = word.rpartition(':')\n"
            "    try:\n"
            "        socket.create_connection((host, int(port)), timeout=1); print(port, 'open')\n"
            "    except OSError as error: print(port, 'closed')\n"
            "try: open(sys.argv[1]).read(); print('read')\n"
            "except PermissionError: print('not read')\n"
        )
        tmp_path.chmod(0o755)
        words = [str(tmp_path / "run/token"), *(f"{host}:{port}" for host, port in found)]
        done = subprocess.run(
            ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "/usr/bin/python3", "-c", code, *words],
            capture_output=True,
            text=True,
        )
        said = [f"{port} {'open' if port == public else 'closed'}" for _, port in found]
        assert done.stdout.splitlines() == [*said, "not read"], done.stdout + done.stderr
        assert len(found) == 5  # the server's agent and three workers'
        run.interrupt()
        check_finished(run)


FLOOD = """
import collections, socket, sys, time
host, port = sys.argv[1].rsplit(":", 1)
open_, sent, begin = collections.deque(), 0, time.monotonic()
while True:
    one = socket.socket()
    one.setblocking(False)
    one.connect_ex((host, int(port)))
    open_.append(one)
    sent += 1
    if sent % 2 and len(open_) > 50:  # half of them begin to speak
        try:
            open_[-50].send(b"\\x16\\x03\\x01\\x3f\\xff")
        except OSError:
            pass
    if len(open_) > 900:
        open_.popleft().close()
    if sent % 3000 == 0:
        print(f"{sent / (time.monotonic() - begin):.0f}", flush=True)
    ahead = begin + sent / 3200 - time.monotonic()
    if ahead > 0.001:
        time.sleep(ahead)
"""
JOIN = """
import sys, time
from ringmaster_dist.transport import client, identity, tensorpipe
from ringmaster_dist.transport.streams import read_frame
context = identity.worker_context(sys.argv[2])
for _ in range(20):
    began = time.monotonic()
    try:
        stream = client.dial(sys.argv[1], context, 20.0)
        stream.send(tensorpipe.opening("far"))
        tensorpipe.read_answer(read_frame(stream))
        stream.socket.close()
        print(f"in {time.monotonic() - began:.2f}", flush=True)
    except Exception as error:
        print(f"out {error!r}", flush=True)
"""


def test_a_flood_of_strangers_keeps_no_distant_worker_out(network, tmp_path):
    """Others of the same network open 3,000 connections a second, and half of them begin to speak."""
    host = network.machine("server")
    network.machine("far", delay_seconds=0.05)
    network.machine("strangers")
    overrides = [*SERVER, f"server.host={host}", "cluster.workers=1", "cluster.local_workers=1"]
    run = Run(tmp_path / "run", f"run.dir={tmp_path}/run", *overrides, "resume=null", prefix=network.at("server"))
    with run:
        until(lambda: run.version() > 5, "the run goes on")
        flood = subprocess.Popen(
            [*network.at("strangers"), sys.executable, "-c", FLOOD, f"{host}:{PORT}"], stdout=subprocess.PIPE, text=True
        )
        try:
            rates = [flood.stdout.readline()]
            command = [*network.at("far"), sys.executable, "-c", JOIN, f"{host}:{PORT}", TOKEN["RINGMASTER_TOKEN"]]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        finally:
            flood.kill()
            rates += flood.communicate()[0].split()
        lines = done.stdout.splitlines()
        print(rates[-1], "connections per second:", lines)
        assert [line.split()[0] for line in lines] == ["in"] * 20, done.stdout + done.stderr
        run.interrupt()
        check_finished(run, attacked=True)
