"""Faults, each seen to happen: killed and stopped workers, and an attacker on the wire."""

import itertools
import os
import random
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path

from tests.distributed.processes import LONG, Run, alive, check_finished, until


def test_killed_workers_come_back_alone(tmp_path):
    """Ten kills at random moments, most in the middle of an exchange: these workers do hardly anything else."""
    dice = random.Random(3)
    big = ["problem.dim=100000", "cluster.profile=none", "cluster.workers=5"]
    with Run(tmp_path / "run", *LONG, "server.lease_seconds=1", *big) as run:
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


ATTACKER = """
import os, sys, pickle
os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"
import torch.distributed.rpc as rpc
from ringmaster_dist.transport import star, surface
from ringmaster_dist.protocol import Interruptions, JoinRequest
star.restrict = lambda: None  # the attacker's own side is not restricted
address, marker = sys.argv[1:]
client = star.Client(address, connect_seconds=10, call_seconds=10)

class Trap:
    def __reduce__(self):
        return os.system, (f"touch {marker}",)

def attempt(name, function, *arguments):
    try:
        rpc.rpc_sync("server", function, args=arguments, timeout=10)
    except Exception as error:
        print(name, "refused" if "refused" in str(error) else "failed otherwise: " + str(error)[:300])
    else:
        print(name, "WENT THROUGH")

attempt("system", os.system, f"touch {marker}")
attempt("eval", eval, f"open({marker!r}, 'w')")
attempt("trap", surface.join, Trap())
attempt("getattr", getattr, [], "append")
attempt("import", __import__, "os")
attempt("load", pickle.loads, pickle.dumps(1))
print("token", client.join(JoinRequest(2, "wrong", 0)).reason)
print("protocol", client.join(JoinRequest(99, "wrong", 0)).reason)
print("session", client.fetch("guess", 0, 0, Interruptions()).unknown)
sys.stdout.flush()
os._exit(0)
"""


def test_an_attacker_gets_nothing_and_training_goes_on(tmp_path):
    marker = tmp_path / "owned"
    with Run(tmp_path / "run", *LONG) as run:
        until(lambda: run.version() > 5, "the run goes on")
        address = (tmp_path / "run/address").read_text()
        server = run.server()
        attack = subprocess.run(
            [sys.executable, "-c", ATTACKER, address, str(marker)], capture_output=True, text=True, timeout=100
        )
        lines = attack.stdout.splitlines()
        for name in ("system", "eval", "trap", "getattr", "import", "load"):
            assert f"{name} refused" in lines, attack.stdout + attack.stderr
        assert "token the token is not that of this run" in lines
        assert "session True" in lines
        assert any(line.startswith("protocol the worker speaks protocol 99") for line in lines)
        check_listens_on_loopback_alone(server)
        for garbage in (b"GET / HTTP/1.0\r\n\r\n", os.urandom(4096), b"\x80\x04\x95" + bytes(200)):
            with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), timeout=5) as stream:
                stream.sendall(garbage)
        version = run.version()
        until(lambda: run.version() > version + 10, "training goes on")
        assert alive(server)
        assert not marker.exists()
        run.process.send_signal(signal.SIGINT)
        summary = check_finished(run, attacked=True)
    assert summary["num_workers"] == 3


def listening(pid):
    """The addresses a process listens on, as /proc writes them."""
    sockets, found = set(), []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            sockets.add(os.readlink(link))
        except OSError:
            continue
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                found.append(fields[1])
    return found


def check_listens_on_loopback_alone(pid):
    addresses = listening(pid)
    assert len(addresses) >= 2  # the store and the RPC agent
    assert all(address.startswith("0100007F:") for address in addresses), addresses


def test_strangers_on_the_rpc_port_are_refused_and_training_goes_on(tmp_path):
    """Each would stop a plain TensorPipe agent: one by making it deaf, one by ending its process."""
    store = tmp_path / "run/address"
    strangers = {"closes at once": b"", "speaks HTTP": b"GET / HTTP/1.0\r\n\r\n", "sends noise": b"\xff" * 4096}
    with Run(tmp_path / "run", *LONG) as run:
        until(lambda: run.version() > 15, "the run goes on")
        server, workers = run.server(), run.workers()
        for number, (what, garbage) in enumerate([*strangers.items(), *strangers.items()], 1):
            (port,) = ports_of(server) - {int(store.read_text().rpartition(":")[2])}
            with socket.create_connection(("127.0.0.1", port), timeout=5) as stream:
                stream.sendall(garbage)
                if garbage:
                    assert stream.recv(1) == b"", f"{what}: it was answered"
            until(lambda: run.errors().count("another is open") == number, f"{what}: seen, another port is open")  # noqa: B023
            assert port not in ports_of(server)
            version = run.version()
            until(lambda: run.version() > version + 10, f"{what}: training goes on")  # noqa: B023
        os.kill(workers[0], signal.SIGKILL)
        until(lambda: len(run.joined()) == 4, "a worker can join")
        assert run.server() == server
        assert run.workers()[:2] == workers[1:]
        run.process.send_signal(signal.SIGINT)
        summary = check_finished(run)
    assert summary["terms"] == 1


def ports_of(pid):
    return {int(address.partition(":")[2], 16) for address in listening(pid)}


def test_a_killed_server_goes_on_from_its_checkpoint(tmp_path):
    """Its workers come back by themselves with the gradients they had, and nothing is applied twice."""
    with Run(tmp_path / "run", *LONG, "checkpoint.every=10", "cluster.unit_seconds=0.05") as run:
        workers = until(lambda: len(run.workers()) == 3 and run.workers(), "three workers")
        for term in (1, 2):
            until(lambda term=term: run.checkpoints(term - 1), "a checkpoint of this term")
            os.kill(run.server(), signal.SIGKILL)
            until(lambda term=term: len(run.terms()) == term + 1, "the server is back")
            until(lambda term=term: run.version() > run.terms()[term]["version"] + 15, "updates go on")
        assert run.workers() == workers  # the same processes, reconnected
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
    """No file of the server may grow any more, for a while."""
    with Run(tmp_path / "run", *LONG, "checkpoint.every=10", "checkpoint.keep=100") as run:
        until(lambda: run.checkpoints(0), "a first checkpoint")
        server = run.server()
        _, hard = resource.prlimit(server, resource.RLIMIT_FSIZE, (512, resource.RLIM_INFINITY))
        before, pushed = len(run.checkpoints(0)), len(run.arrivals())
        until(lambda: "CHECKPOINT WAS NOT WRITTEN" in run.errors() or "no checkpoint" in run.errors(), "a warning")
        assert len(run.checkpoints(0)) <= before + 1
        resource.prlimit(server, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, hard))
        until(lambda: len(run.checkpoints(0)) > before + 2, "checkpoints are written again")
        assert len(run.arrivals()) > pushed
        assert alive(server)
        run.process.send_signal(signal.SIGINT)
        check_finished(run)


CLIENT = """
import os, sys, threading, time
os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"
import torch, torch.distributed.rpc as rpc
from ringmaster_dist.transport import star, surface
from ringmaster_dist.protocol import *
from ringmaster_dist.worker.job import make_job
address, token = sys.argv[1], open(sys.argv[2]).read()
client = star.Client(address, connect_seconds=10, call_seconds=10)
welcome = client.join(JoinRequest(PROTOCOL_VERSION, token, 9))
size, version = welcome.snapshot.iterate.numel(), welcome.snapshot.version
job = make_job(welcome.config, 9)
good = torch.zeros(size, dtype=torch.float64)
def push(sequence, gradient, version, loss=0.5):
    reply = client.push(welcome.session, Push(sequence, version, gradient, loss, 0.1, welcome.snapshot.term))
    print(sequence, reply.receipt.verdict.value if reply.receipt else "-", reply.receipt.reason, flush=True)
    return reply
push(0, good * float("nan"), version)
push(1, good[1:], version)
push(2, good.float(), version)
push(3, good, version + 10**6)
newest = client.fetch(welcome.session, 0, -1, Interruptions()).snapshot
good, loss = job.problem.gradient(newest.iterate, job.seed, welcome.worker_id, 4)
replies = [push(4, good, newest.version, loss) for _ in range(3)]
print("same answer", len({reply.receipt for reply in replies}), flush=True)
print("old token", client.join(JoinRequest(PROTOCOL_VERSION, "yesterday", 9)).reason, flush=True)
# And dies in the middle of a push.
rpc.rpc_async("server", surface.push, args=(welcome.session, Push(5, 0, torch.zeros(40_000_000), 0.5, 0.1)))
time.sleep(0.005)
os.kill(os.getpid(), 9)
"""


def test_what_a_bad_worker_sends_is_its_own_fault(tmp_path):
    with Run(tmp_path / "run", *LONG, "method=asynchronous", "server.lease_seconds=2") as run:
        until(lambda: run.version() > 5, "the run goes on")
        address, token = (tmp_path / "run/address").read_text(), tmp_path / "run/token"
        command = [sys.executable, "-c", CLIENT, address, str(token)]
        bad = subprocess.run(command, capture_output=True, text=True, timeout=60)
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
    """One whose gradient raises says so and goes at once; one that sends only NaN is evicted."""
    with Run(tmp_path / "run", *LONG, "server.max_invalid=4") as run:
        until(lambda: run.version() > 5, "the run goes on")
        address, token = (tmp_path / "run/address").read_text(), tmp_path / "run/token"
        common = [f"server={address}", f"token_file={token}"]
        for kind, code, words in (("raises", 1, "on fire"), ("nan", 2, "4 invalid gradients in a row")):
            command = [sys.executable, "-c", FAILING, kind, *common]
            failing = subprocess.run(command, capture_output=True, text=True, timeout=60)
            assert failing.returncode == code, failing.stderr
            assert words in failing.stderr.splitlines()[-1]
        leaves = until(lambda: [m["worker"] for m in run.members() if m["event"] == "leave"], "they have left")
        assert leaves == [3, 4]
        run.process.send_signal(signal.SIGINT)
        summary = check_finished(run)
    assert summary["per_worker"]["4"]["invalid"] == 4 == summary["invalid"]


def test_a_worker_that_comes_when_the_run_is_over_is_told(tmp_path):
    with Run(tmp_path / "run", "budget.updates=20", "server.farewell_seconds=40") as run:
        until(lambda: len(run.members()) == 3, "all are there")
        sleeper = run.workers()[0]
        os.kill(sleeper, signal.SIGSTOP)  # the server waits for it to hear of the end
        try:
            until(lambda: run.version() == 20, "the budget is used up")
            late = [f"server={(tmp_path / 'run/address').read_text()}", f"token_file={tmp_path}/run/token"]
            command = [sys.executable, "-m", "ringmaster_dist.worker", *late]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        finally:
            os.kill(sleeper, signal.SIGCONT)
        assert (done.returncode, done.stderr) == (0, "")
        summary = check_finished(run)
    assert summary["num_workers"] == 3
