"""Across hosts: server and workers in network namespaces of their own, with links that are cut, long, lossy and narrow.

After each: counters add up, the run ends by itself, the trace replays to the same bits (`check_finished`).
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

from tests.distributed.processes import Run, check_finished, processes_with, recompute, until
from tests.e2e.network import Network, require_namespaces

pytestmark = [pytest.mark.netns, pytest.mark.e2e]

ROOT = Path(__file__).resolve().parents[2]
PORT = 29400
TOKEN = {"RINGMASTER_TOKEN": "a token of sixteen or more".replace(" ", "-")}
SERVER = ["cluster.local_workers=0", f"server.port={PORT}", "method=asynchronous", "problem.dim=2000",
          "cluster.profile=similar", "cluster.unit_seconds=0.02", "budget.updates=null", "run.samples=600",
          "server.start_seconds=0"]  # fmt: skip
HASTY = ["connect_seconds=2", "call_seconds=4"]


@pytest.fixture
def network(monkeypatch):
    require_namespaces()
    monkeypatch.setenv("RINGMASTER_TOKEN", TOKEN["RINGMASTER_TOKEN"])
    with Network() as network:
        yield network


class Workers:
    """Worker processes by name, one on each machine; none is left behind."""

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
        codes = {name: process.wait(timeout=30) for name, process in self.processes.items()}
        assert set(codes.values()) == {0}, codes

    def __exit__(self, *exception: object) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()


def events(run: Run, worker: int) -> list[str]:
    return [m["event"] for m in run.members() if m["worker"] == worker]


def test_links_that_are_cut_and_mended(network, tmp_path):
    """One worker's for 10 s, one's for longer than its lease, then the server's own."""
    lease = 18.0
    host = network.machine("server")
    for name in ("steady", "short", "long"):
        network.machine(name)
    overrides = [*SERVER, f"server.host={host}", "cluster.workers=3", f"server.lease_seconds={lease}",
                 "budget.seconds=55"]  # fmt: skip
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
        until(lambda: time.monotonic() > began + 10, "ten seconds", 12)
        assert run.version() > version + 100  # the steady one has not noticed
        assert pushes(1) <= silent + 2
        network.mend("short")
        until(lambda: pushes(1) > silent + 10, "the one that was cut off for ten seconds delivers again", 20)
        assert events(run, 1) == ["join"]  # and was a member all the time
        until(lambda: events(run, 2) == ["join", "leave"], "the other's lease has ended", 30)
        assert time.monotonic() - began > lease - 1
        network.mend("long")
        until(lambda: events(run, 2)[-1] == "join", "it is back under its old id", 20)
        silent = pushes(2)
        until(lambda: pushes(2) > silent + 10, "and delivers")

        network.cut("server")
        cut_at, arrived = time.monotonic(), len(run.arrivals())
        until(lambda: time.monotonic() > cut_at + 5, "five seconds", 7)
        assert len(run.arrivals()) <= arrived + 6
        network.mend("server")
        until(lambda: len(run.arrivals()) > arrived + 50, "everybody is back", 20)
        summary = check_finished(run)
        workers.check_ended()
    assert summary["ended"] == "budget"
    assert summary["num_workers"] == 3
    assert summary["terms"] == 1


@pytest.mark.alone
def test_a_worker_on_a_bad_link_is_slow_alone(network, tmp_path):
    """50 ms and 1 % loss on one, a tenth of a megabyte per second on another; the third one keeps its pace."""
    host = network.machine("server")
    network.machine("near")
    network.machine("far", delay_seconds=0.05, loss=0.01)
    network.machine("thin")
    network.narrow("thin", "800kbit")
    overrides = [*SERVER, f"server.host={host}", "cluster.workers=3", "budget.seconds=10"]
    run = Run(tmp_path / "run", f"run.dir={tmp_path}/run", *overrides, "resume=null", prefix=network.at("server"))
    with run, Workers(network, f"{host}:{PORT}") as workers:
        for number, name in enumerate(("near", "far", "thin")):
            workers.start(name)
            until(lambda number=number: len(run.joined()) == number + 1, f"{name} has joined")
        summary = check_finished(run)
        workers.check_ended()
    assert summary["ended"] == "budget"
    delivered = Counter(arrival["worker"] for arrival in run.arrivals())
    assert delivered[0] > 0.6 * summary["seconds"] / 0.02
    assert 10 < delivered[1] < 0.5 * delivered[0]
    assert 3 < delivered[2] < 0.3 * delivered[0]
    assert network.lost_frames() > 0


def test_the_scripts_of_two_machines(network, tmp_path):
    """launch/server.sh and launch/worker.sh, with torchrun behind them; the server crashes and is brought back."""
    host = network.machine("server")
    network.machine("worker")
    run = tmp_path / "run"
    environment = {**os.environ, **TOKEN, "RINGMASTER_PYTHON": sys.executable, "WORKERS": "2"}
    overrides = ["problem.dim=50", "cluster.profile=similar", "cluster.unit_seconds=0.02", "method=asynchronous",
                 "budget.updates=700", "budget.seconds=null", "checkpoint.every=10"]  # fmt: skip
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
        (rank,) = set(processes_with("ringmaster_dist.train", f"run.dir={run}")) - set(
            processes_with("torch.distributed.run", f"run.dir={run}")
        )
        os.kill(rank, signal.SIGKILL)
        output, _ = server.communicate(timeout=90)
        assert (server.returncode, worker.wait(timeout=60)) == (0, 0)
    finally:
        for process in (server, worker):
            process.kill()
            process.wait()
    assert "700 updates" in output
    assert len((run / "terms.jsonl").read_text().splitlines()) == 2
    assert json.loads((run / "summary.json").read_text())["num_workers"] == 2
    assert recompute(run).same
