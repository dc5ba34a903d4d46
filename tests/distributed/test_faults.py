"""Faults that each test sees happen: killed and stopped workers, a killed server, a full disk, bad gradients."""

import itertools
import os
import random
import resource
import signal
import subprocess
import sys

from ringmaster_dist.runtime.mirror import RemoteRun
from tests.distributed.processes import LONG, QUICK, Run, alive, check_finished, overlapping, until


def test_killed_workers_come_back_alone(tmp_path):
    """There are ten kills at random moments. Most are in the middle of an exchange, because these workers do almost
    nothing else. The leases are long enough for a worker that gets no core for a while."""
    dice = random.Random(3)
    big = ["problem.dim=100000", "cluster.profile=none", "cluster.workers=5"]
    with Run(tmp_path / "run", *LONG, "server.lease_seconds=5", *big) as run:
        server = run.server()
        for wave in (1, 2):
            until(lambda wave=wave: len(run.joined()) == 5 * wave, "all have joined, the killed ones anew")
            workers = run.workers()
            dice.shuffle(workers)
            for number, victim in enumerate(workers, 1):
                version = run.version() + dice.randrange(20)
                until(lambda version=version: run.version() > version, "updates go on")
                os.kill(victim, signal.SIGKILL)
                until(lambda victim=victim: not alive(victim), "the worker is dead")
                assert all(map(alive, (server, *workers[number:]))), "another process was disturbed"
        until(lambda: len(run.joined()) == 15, "all are back")
        until(lambda: sum(m["event"] == "leave" for m in run.members()) == 10, "the dead have lost their leases")
        run.process.send_signal(signal.SIGINT)
        summary = check_finished(run)
    assert summary["num_workers"] == 15
    assert summary["invalid"] == 0


def test_a_synchronous_round_does_not_wait_for_the_dead(tmp_path):
    with Run(tmp_path / "run", "method=synchronous", *LONG, "server.lease_seconds=1") as run:
        until(lambda: run.version() > 5, "the run goes on")
        victim = run.workers()[0]
        os.kill(victim, signal.SIGSTOP)
        try:
            until(lambda: any(m["event"] == "leave" for m in run.members()), "the silent worker is counted out")
            version = run.version()
            until(lambda: run.version() > version + 5, "rounds go on without it")
            joins = sum(m["event"] == "join" for m in run.members())
        finally:
            os.kill(victim, signal.SIGCONT)
        until(lambda: sum(m["event"] == "join" for m in run.members()) > joins, "it is back")
        version = run.version()
        until(lambda: run.version() > version + 5, "rounds go on with it")
        assert victim in run.workers()
        run.process.send_signal(signal.SIGINT)
        check_finished(run)


def test_a_killed_server_resumes_from_its_checkpoint(tmp_path):
    """Its workers reconnect with the gradients that they had, and nothing is applied twice.

    The wire is int8, and workers take two steps per push and compute while they push.
    """
    given = ["checkpoint.every=10", "wire.gradient_dtype=int8", "local.steps=2", "worker.overlap=true"]
    with Run(tmp_path / "run", *LONG, *given) as run:
        workers = until(lambda: len(run.workers()) == 3 and run.workers(), "three workers")
        for term in (1, 2):
            until(lambda term=term: run.checkpoints(term - 1), "a checkpoint of this term")
            os.kill(run.server(), signal.SIGKILL)
            until(lambda term=term: len(run.terms()) == term + 1, "the server is back")
            until(lambda term=term: run.version() > run.terms()[term]["version"] + 15, "updates go on")
        assert run.workers() == workers  # the same processes, reconnected
        until(lambda: overlapping(run.arrivals()) > 20, "workers compute while they push")
        run.process.send_signal(signal.SIGINT)
        summary = check_finished(run)
    assert summary["terms"] == 3
    assert summary["num_workers"] == 3
    terms, arrivals = run.terms(), run.arrivals()
    carried = [a for t in (1, 2) for a in arrivals[terms[t]["pushes"] :] if a["term"] < t]
    assert carried, "no worker had kept its gradient"
    for arrival in carried:
        contained = "lost_version" not in arrival
        assert contained or arrival["verdict"] == "stale"
    assert all(a["time"] <= b["time"] for a, b in itertools.pairwise(arrivals))


def test_a_full_disk_costs_checkpoints_and_nothing_else(tmp_path):
    """For a while no file of the server may grow beyond 2 kB, which is enough for its messages."""
    with Run(tmp_path / "run", *LONG, "checkpoint.every=10", "checkpoint.keep=100") as run:
        until(lambda: run.checkpoints(0), "a first checkpoint")
        server = run.server()
        _, hard = resource.prlimit(server, resource.RLIMIT_FSIZE, (2048, resource.RLIM_INFINITY))
        before, pushed = len(run.checkpoints(0)), len(run.arrivals())
        until(lambda: "CHECKPOINT WAS NOT WRITTEN" in run.errors() or "no checkpoint" in run.errors(), "a warning")
        assert len(run.checkpoints(0)) <= before + 1
        resource.prlimit(server, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, hard))
        until(lambda: len(run.checkpoints(0)) > before + 2, "checkpoints are written again")
        assert len(run.arrivals()) > pushed
        assert alive(server)
        run.process.send_signal(signal.SIGINT)
        check_finished(run)


def test_a_run_whose_machine_is_lost_resumes_from_its_copies(tmp_path):
    """The supervisor is killed and the run directory is removed. The same command line then resumes elsewhere."""
    url = f"file://{tmp_path}/remote"
    line = [f"checkpoint.mirror={url}", "checkpoint.every=10", "checkpoint.keep=2", "method.threshold=auto"]
    with Run(tmp_path / "run", *line, *LONG) as run:
        until(lambda: len(RemoteRun(url).names()) == 2, "two checkpoints are there")
        run.children()
        run.process.kill()
        until(lambda: not any(map(alive, run.started)), "all processes have ended")
    (tmp_path / "run").rename(tmp_path / "lost")
    with Run(tmp_path / "run", f"run.dir={tmp_path}/run", *QUICK, *line, *LONG, "resume=auto") as run:
        until(lambda: len(run.terms()) == 2 and run.version() > run.terms()[1]["version"] + 20, "it continues")
        run.process.send_signal(signal.SIGINT)
        summary = check_finished(run)  # the replay begins with the arrivals before the loss
    assert run.terms()[1]["version"] > 0
    newest = RemoteRun(url).names()[-1]
    assert newest == run.checkpoints(1)[-1].name  # the last one was copied before the end
    assert f"version-{summary['updates']:09d}" in newest


CLIENT = """
import os, sys, threading, time
os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"
import torch, torch.distributed.rpc as rpc
from ringmaster_dist.transport import agent
from ringmaster_dist.transport.client import Client
from ringmaster_dist.protocol import *
from ringmaster_dist.worker.job import make_job
address, token = sys.argv[1], open(sys.argv[2]).read()
client = Client(address, token=token, connect_seconds=10, call_seconds=10)
welcome = client.join(JoinRequest(PROTOCOL_VERSION, token, 9))
size, version = welcome.snapshot.iterate.numel(), welcome.snapshot.version
job = make_job(welcome.config, 9)
good = torch.zeros(size, dtype=torch.float64)
def push(sequence, gradient, version, loss=0.5):
    reply = client.push(welcome.session, Push(sequence, version, gradient, loss, 0.1, welcome.snapshot.term))
    print(sequence, reply.receipt.verdict.value if reply.receipt else "-", reply.receipt.reason, flush=True)
    return reply
push(0, good * float("nan"), version)
push(1, good[1:].clone(), version)
push(2, good.float(), version)
push(3, good, version + 10**6)
newest = client.fetch(welcome.session, 0, -1, Interruptions()).snapshot
good, loss = job.problem.gradient(newest.iterate, job.seed, welcome.worker_id, 4)
replies = [push(4, good, newest.version, loss) for _ in range(3)]
print("same answer", len({reply.receipt for reply in replies}), flush=True)
print("old token", client.join(JoinRequest(PROTOCOL_VERSION, "yesterday", 9)).reason, flush=True)
# And dies in the middle of a push.
rpc.rpc_async("server", agent.push, args=(welcome.session, Push(5, 0, torch.zeros(40_000_000), 0.5, 0.1)))
time.sleep(0.005)
os.kill(os.getpid(), 9)
"""


def test_bad_pushes_harm_only_the_worker_that_sends_them(tmp_path):
    with Run(tmp_path / "run", *LONG, "method=asynchronous", "server.lease_seconds=2") as run:
        until(lambda: run.version() > 5, "the run goes on")
        address, token = (tmp_path / "run/address").read_text(), tmp_path / "run/token"
        command = [sys.executable, "-c", CLIENT, address, str(token)]
        bad = subprocess.run(command, capture_output=True, text=True)
        assert bad.returncode == -signal.SIGKILL, bad.stderr
        lines = bad.stdout.splitlines()
        reasons = ("NaN", "shape", "float32", "future")
        for sequence, reason in enumerate(reasons):
            assert lines[sequence].startswith(f"{sequence} invalid"), bad.stdout + bad.stderr
            assert reason in lines[sequence]
        assert lines[4:] == ["4 accepted "] * 3 + ["same answer 1", "old token the token is not that of this run"]
        until(lambda: any(m["event"] == "leave" for m in run.members()), "it has lost its lease")
        version = run.version()
        until(lambda: run.version() > version + 10, "training goes on")
        run.process.send_signal(signal.SIGINT)
        summary = check_finished(run)
    assert summary["invalid"] == summary["per_worker"]["3"]["invalid"]
    assert summary["invalid"] in (4, 5)  # the last push, of a wrong shape too, came whole or not at all
    assert summary["per_worker"]["3"]["accepted"] == 1


FAILING = """
import os, sys
from ringmaster_dist.problems.quadratic import Quadratic
from ringmaster_dist.worker.__main__ import main
compute, broken = Quadratic.gradient, sys.argv.pop(1)
def gradient(self, iterate, seed, worker, sequence, stop):
    if sequence >= 3 and broken == "raises":
        raise ArithmeticError("the device is on fire")
    gradient, loss = compute(self, iterate, seed, worker, sequence, stop)
    return (gradient * float("nan") if sequence >= 3 else gradient), loss
Quadratic.gradient = gradient
code = main(sys.argv[1:])
sys.stderr.flush()
os._exit(code)
"""


def test_a_worker_that_cannot_compute_leaves(tmp_path):
    """A worker whose gradient raises reports it and leaves. A worker that sends only NaN is evicted."""
    # The threshold is fixed, because stale gradients are rejected before they are looked at.
    with Run(tmp_path / "run", *LONG, "server.max_invalid=4", "method.threshold=8") as run:
        until(lambda: run.version() > 5, "the run goes on")
        address, token = (tmp_path / "run/address").read_text(), tmp_path / "run/token"
        common = [f"server={address}", f"token_file={token}"]
        for kind, code, words in (("raises", 1, "on fire"), ("nan", 2, "4 invalid gradients in a row")):
            command = [sys.executable, "-c", FAILING, kind, *common]
            failing = subprocess.run(command, capture_output=True, text=True)
            assert failing.returncode == code, failing.stderr
            assert words in failing.stderr.splitlines()[-1]
        leaves = until(lambda: [m["worker"] for m in run.members() if m["event"] == "leave"], "they have left")
        assert leaves == [3, 4]
        run.process.send_signal(signal.SIGINT)
        summary = check_finished(run)
    assert summary["per_worker"]["4"]["invalid"] == 4 == summary["invalid"]


def test_a_worker_that_joins_after_the_end_exits_with_a_message(tmp_path):
    waits = ["server.farewell_seconds=100", "server.lease_seconds=100"]  # for a worker that has not heard of the end
    with Run(tmp_path / "run", "budget.updates=20", "cluster.unit_seconds=0.1", *waits) as run:
        until(lambda: len(run.members()) == 3, "all are there")
        sleeper = run.workers()[0]
        os.kill(sleeper, signal.SIGSTOP)
        try:
            until(lambda: run.version() == 20, "the budget is used up")
            late = [f"server={(tmp_path / 'run/address').read_text()}", f"token_file={tmp_path}/run/token"]
            command = [sys.executable, "-m", "ringmaster_dist.worker", *late]
            done = subprocess.run(command, capture_output=True, text=True)
        finally:
            os.kill(sleeper, signal.SIGCONT)
        assert (done.returncode, done.stderr) == (0, "")
        summary = check_finished(run)
    assert summary["num_workers"] == 3
