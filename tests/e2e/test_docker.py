"""The compose cluster on a real engine. Run it with ``pytest -m docker`` on a machine with a running engine.

One cluster goes through all steps: it learns, loses workers, grows, loses its server, is stopped, and replays.
BASE_IMAGE sets the base image (docker/ci.sh makes one if no registry can be reached).
"""

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.distributed.processes import until

pytestmark = [pytest.mark.docker, pytest.mark.e2e, pytest.mark.timeout(900)]

DOCKER = Path(__file__).resolve().parents[2] / "docker"
PROJECT = "ringmaster-test"
TRAIN = ("problem.dim=50 method=asynchronous cluster.unit_seconds=0.05 budget.updates=null budget.seconds=3600 "
         "checkpoint.every=20 run.samples=36000 server.lease_seconds=3")  # fmt: skip
NAMES = ("server", "worker-fast", "worker-slow")


def run(*command, check=True, **environment):
    settings = {"COMPOSE_PROJECT_NAME": PROJECT, "TRAIN": TRAIN, "RINGMASTER_IMAGE": "ringmaster-test"}
    settings = {**os.environ, **settings, **environment}
    done = subprocess.run(command, capture_output=True, text=True, env=settings, cwd=DOCKER, timeout=800)
    assert done.returncode == 0 or not check, f"{command}: {done.stdout[-2000:]}{done.stderr[-3000:]}"
    return done.stdout


def compose(*arguments, file="compose.yaml", **environment):
    new = subprocess.run(["docker", "compose", "version"], capture_output=True).returncode == 0
    return run(*(["docker", "compose"] if new else ["docker-compose"]), "-f", file, *arguments, **environment)


def elsewhere(*arguments):
    """Runs compose for the workers of compose.worker.yaml, another project on a network without the server."""
    return compose(*arguments, file="compose.worker.yaml", COMPOSE_PROJECT_NAME=f"{PROJECT}-elsewhere")


class Cluster:
    """The cluster of compose.yaml, seen from outside."""

    def containers(self, service):
        return compose("ps", "-q", service).split()

    def inspect(self, container):
        return json.loads(run("docker", "inspect", container))[0]

    def records(self, name):
        (server,) = self.containers("server")
        text = run("docker", "exec", server, "cat", f"/runs/current/{name}", check=False)
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def version(self):
        rows = self.records("metrics.jsonl")
        return rows[-1]["version"] if rows else 0

    def live(self):
        rows = self.records("metrics.jsonl")
        return rows[-1]["workers"] if rows else 0

    def joined(self):
        """Returns the number of workers so far. A worker that lost its lease and was taken back keeps its id."""
        return len({record["worker"] for record in self.records("members.jsonl") if record["event"] == "join"})

    def goes_on(self, what, updates=10):
        version = self.version()
        until(lambda: self.version() > version + updates, f"updates go on: {what}", 90)


def _delivered(cluster, worker):
    return sum(arrival["worker"] == worker for arrival in cluster.records("trace.jsonl"))


@pytest.fixture
def cluster():
    assert shutil.which("docker"), "there is no docker command"
    compose("down", "--volumes", "--timeout", "1")
    run("./up.sh")
    yield Cluster()
    elsewhere("down", "--timeout", "1")
    compose("down", "--volumes", "--timeout", "1")


def test_a_cluster_survives_lost_workers_and_a_lost_server_and_replays(cluster):
    until(lambda: cluster.joined() == 2, "the fast and the slow worker have joined", 120)
    cluster.goes_on("at first", 60)
    gaps = [row["gap"] for row in cluster.records("metrics.jsonl")]
    assert gaps[-1] < 0.9 * gaps[0]
    (server,), (fast,), (slow,) = (cluster.containers(name) for name in NAMES)
    until(lambda: cluster.inspect(server)["State"]["Health"]["Status"] == "healthy", "the server is healthy")
    assert run("docker", "exec", server, "id", "-u").strip() == "1000"
    token = (DOCKER / "secrets/token").read_text()
    for text in (json.dumps(cluster.inspect(server)), run("docker", "history", "--no-trunc", "ringmaster-test")):
        assert token not in text

    # The engine restarts a container that crashes. One that is killed by hand stays away until up.sh.
    os.kill(cluster.inspect(fast)["State"]["Pid"], signal.SIGKILL)
    until(lambda: cluster.joined() == 3, "the worker that crashed is back", 60)
    run("docker", "kill", slow)
    cluster.goes_on("without the one that was killed")
    run("./up.sh", "--no-recreate")
    until(lambda: cluster.joined() == 4, "it is back", 60)

    run("./up.sh", "--no-recreate", "--scale", "worker-fast=3")
    until(lambda: cluster.joined() == 6, "two more have joined", 60)
    until(lambda: cluster.live() == 4, "there are four now")
    assert len(cluster.containers("worker-fast")) == 3

    # A worker on another network joins through the published port.
    elsewhere("up", "--detach")
    until(lambda: cluster.joined() == 7, "a worker on another network has joined", 60)
    (other,) = elsewhere("ps", "-q", "worker").split()
    networks = [set(cluster.inspect(one)["NetworkSettings"]["Networks"]) for one in (server, other)]
    assert not networks[0] & networks[1]
    until(lambda: _delivered(cluster, 6) > 3, "it delivers")

    # The server's container is killed and restarts on the same volume. Then it is stopped and started by hand.
    before = cluster.records("terms.jsonl")
    os.kill(cluster.inspect(server)["State"]["Pid"], signal.SIGKILL)
    until(lambda: len(cluster.records("terms.jsonl")) == len(before) + 1, "the server has begun a new term", 90)
    assert cluster.records("terms.jsonl")[-1]["version"] >= 20
    cluster.goes_on("with the server of the second term")
    compose("restart", "server")
    until(lambda: len(cluster.records("terms.jsonl")) == len(before) + 2, "it has resumed from the volume", 90)
    cluster.goes_on("with the server of the third term")

    compose("stop", "server")
    assert cluster.inspect(server)["State"]["ExitCode"] in (0, 143)  # 143 says that SIGTERM ended it
    elsewhere("stop", "--timeout", "5")
    compose("stop", "--timeout", "5")
    said = compose("run", "--rm", "--no-deps", "-T", "server", "ringmaster_dist", "replay", "/runs/current")
    assert "the same bits" in said
    assert said.startswith("same: ")
