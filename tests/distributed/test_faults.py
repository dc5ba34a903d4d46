"""Faults, each seen to happen: killed and stopped workers, and an attacker on the wire."""

import os
import random
import signal
import socket
import subprocess
import sys
from pathlib import Path

from tests.distributed.processes import LONG, Run, alive, check_finished, until


def test_killed_workers_come_back_alone(tmp_path):
    """Five kills at random moments: the server and the other workers go on, the dead are replaced."""
    dice = random.Random(3)
    with Run(tmp_path / "run", *LONG, "server.lease_seconds=1") as run:
        until(lambda: run.version() > 5, "the run goes on")
        (server,) = run.children("\0serve\0")
        for _ in range(5):
            workers = until(lambda: len(run.workers()) == 3 and run.workers(), "three workers are there")
            before = len(run.members())
            victim = dice.choice(workers)
            os.kill(victim, signal.SIGKILL)
            until(lambda victim=victim: not alive(victim), "the worker is dead")
            version = run.version()
            until(lambda version=version: run.version() > version + 3, "updates go on meanwhile")
            until(lambda before=before: any(m["event"] == "join" for m in run.members()[before:]), "a new one joined")
            assert alive(server)
            assert set(workers) - {victim} <= set(run.workers()), "another worker was disturbed"
        until(lambda: sum(m["event"] == "leave" for m in run.members()) >= 5, "the dead have lost their leases")
        run.process.send_signal(signal.SIGINT)
        summary = check_finished(run)
    assert summary["num_workers"] == 8
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
print("token", client.join(JoinRequest(1, "wrong", 0)).reason)
print("protocol", client.join(JoinRequest(99, "wrong", 0)).reason)
print("session", client.fetch("guess", 0, Interruptions()).unknown)
sys.stdout.flush()
os._exit(0)
"""


def test_an_attacker_gets_nothing_and_training_goes_on(tmp_path):
    marker = tmp_path / "owned"
    with Run(tmp_path / "run", *LONG) as run:
        until(lambda: run.version() > 5, "the run goes on")
        address = (tmp_path / "run/address").read_text()
        (server,) = run.children("\0serve\0")
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


def check_listens_on_loopback_alone(pid):
    sockets = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            sockets.add(os.readlink(link))
        except OSError:
            continue
    listening = 0
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                assert fields[1].startswith("0100007F:"), f"{fields[1]} is not loopback"
                listening += 1
    assert listening >= 2  # the store and the RPC agent
