"""Groups: the ranks of a torchrun that are one worker. Real processes, on CPUs, over gloo."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ringmaster_dist.cli.main import main
from ringmaster_dist.worker.__main__ import main as worker_main
from tests.distributed.attacker import listening
from tests.distributed.processes import LONG, Run, alive, check_finished, descendants, until
from tests.distributed.test_join import free_port

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "0123456789abcdef" * 2

# A gradient takes 20 ms in a worker, and no time in a replay. On a second rank each micro-batch takes as long. Every
# sixth draw has a hundred of them. So in a group of two, the first rank often waits for the second.
OWN = """
import os, time
import torch
from torch import nn
from ringmaster_dist.problems.module import ModuleProblem

STEP_SECONDS, RANK = float(os.environ.get("STEP_SECONDS", "0")), os.environ.get("RANK", "none")

def batches(seed, worker, sequence):
    time.sleep(STEP_SECONDS)
    drawn = torch.Generator().manual_seed(1000 * worker + sequence)
    return torch.randn(100 if sequence % 6 == 5 else 1, 8, 3, generator=drawn)

def loss(model, batch):
    if RANK == "1":
        time.sleep(STEP_SECONDS)
    if os.environ.get("FAILING_RANK") == RANK:
        raise ZeroDivisionError("this rank fails")
    return ((model(batch) - batch.sum(1, keepdim=True)) ** 2).mean()

def factory(seed, device):
    return ModuleProblem(nn.Linear(3, 1), batches, loss, device=device)
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The user's code, where this process and those that it starts find it."""
    (tmp_path / "theirs.py").write_text(OWN)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{tmp_path}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("RINGMASTER_TOKEN", TOKEN)
    where = [f"run.dir={tmp_path}/run", "resume=null", "run.report=false"]
    return ["problem=python", "problem.target=theirs:factory", "cluster.profile=none", *where, *LONG]


class Group:
    """A torchrun whose ranks are one worker."""

    def __init__(self, server, errors, *, ranks=2):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}",
                   "--max-restarts=3", "-m", "ringmaster_dist.worker", server, "target=theirs:factory",
                   "group=true"]  # fmt: skip
        self.process = subprocess.Popen(command, stderr=errors, env={**os.environ, "STEP_SECONDS": "0.02"})

    def ranks(self):
        """The processes by rank."""
        found = {}
        for pid in descendants(self.process.pid):
            words = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0") if alive(pid) else []
            found |= {int(word[5:]): pid for word in words if word.startswith("RANK=")}
        return found

    def kill(self):
        for pid in (*descendants(self.process.pid), self.process.pid):
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


def test_groups_and_a_worker_train_together(own, tmp_path):
    """Ranks are interrupted and killed, a whole group is killed, and the run, in int8 and with overlap, replays to the
    same bits."""
    server = f"server=127.0.0.1:{(port := free_port())}"
    remote = ["cluster.workers=3", "cluster.local_workers=0", "server.host=0.0.0.0", f"server.port={port}"]
    rules = ["method=ringmaster", "method.threshold=8", "server.lease_seconds=3", "wire.gradient_dtype=int8",
             "worker.overlap=true"]  # fmt: skip
    with Run(tmp_path / "run", *own, *remote, *rules) as run, (tmp_path / "groups").open("w") as errors:
        command = [sys.executable, "-m", "ringmaster_dist.worker", server, "target=theirs:factory"]
        single = subprocess.Popen(command, env={**os.environ, "STEP_SECONDS": "0.02"})
        groups = [Group(server, errors), Group(server, errors)]
        try:
            _disturb(run, groups)
            run.children()
            run.process.send_signal(signal.SIGINT)
            summary = check_finished(run)
            assert single.wait() == 0
            assert groups[0].process.wait() == 0, (tmp_path / "groups").read_text()
        finally:
            single.kill()
            for group in groups:
                group.kill()
    joins = [member for member in run.members() if member["event"] == "join"]
    assert sorted(member["ranks"] for member in joins) == [1, 2, 2, 2]
    pairs = [summary["per_worker"][str(member["worker"])] for member in joins if member["ranks"] == 2]
    wasted = [pair for pair in pairs if pair["interrupted"] > 1]
    assert wasted
    for pair in wasted:  # an interruption reaches the second rank, which would be done after two seconds
        assert pair["wasted_seconds"] / (pair["interrupted"] + pair["stale"]) < 1.5
    assert "Traceback" not in (tmp_path / "groups").read_text()


def _accepted(run, worker):
    return sum((arrival["worker"], arrival["verdict"]) == (worker, "accepted") for arrival in run.arrivals())


def _disturb(run, groups):
    until(lambda: (run.directory / "address").exists() or run.process.poll() is not None, "the server is there")
    assert run.process.poll() is None, run.errors()
    until(lambda: len(run.joined()) == 3, "two groups and a worker have joined")
    pairs = [member["worker"] for member in run.members() if member["ranks"] == 2]
    assert len(pairs) == 2  # a group of two ranks is one worker
    until(lambda: all(_accepted(run, pair) > 10 for pair in pairs), "both continue after interruptions")
    listens = listening([*groups[0].ranks().values(), *groups[1].ranks().values()])
    assert {host for host, _ in listens} == {"127.0.0.1"}
    os.kill(groups[0].ranks()[1], signal.SIGKILL)
    until(lambda: len(run.joined()) == 4, "the group is back as another worker")
    groups[1].kill()
    newest = max(run.joined())
    until(lambda: _accepted(run, newest) > 5, "the group is of use again")
    until(lambda: sum(member["event"] == "leave" for member in run.members()) == 2, "the killed group is counted out")


def rank_pair(start, *arguments, **environment):
    """Two ranks as torchrun would start them. ``start`` tells this pair from others."""
    settings = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RESTART_COUNT": start, **environment}
    command = [sys.executable, "-m", "ringmaster_dist.worker", *arguments, "group=true"]
    return [
        subprocess.Popen(command, env={**os.environ, **settings, "RANK": rank, "LOCAL_RANK": rank},
                         stderr=subprocess.PIPE, text=True)
        for rank in ("0", "1")
    ]  # fmt: skip


def test_a_rank_that_fails_ends_its_group_with_one_line(own, tmp_path):
    paced = ["cluster.workers=1", "cluster.profile=similar", "cluster.unit_seconds=0.1"]
    with Run(tmp_path / "run", *own, *paced) as run:
        until(run.arrivals, "the run is on")
        server = f"server={(tmp_path / 'run/address').read_text()}"
        failing = rank_pair("a", server, "target=theirs:factory", FAILING_RANK="1")
        not_allowed = rank_pair("b", server)
        ended = [[process.communicate()[1] for process in pair] for pair in (failing, not_allowed)]
        codes = [[process.returncode for process in pair] for pair in (failing, not_allowed)]
        assert codes == [[1, 1], [2, 2]], ended
        (said, shown), (allowed, nothing) = ended
        assert "could not be computed: rank 1 of the group: ZeroDivisionError: this rank fails" in said
        assert shown.count("Traceback") == 1
        assert "add target=theirs:factory" in allowed
        assert [text.count("\n") for text in (said, allowed, nothing)] == [1, 1, 0]
        left = [member["worker"] for member in run.members() if member["event"] == "leave"]
        assert len(left) == 2  # those that had joined; the server waits for neither
        run.process.send_signal(signal.SIGINT)
        check_finished(run)


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (["group=true"], {}, "group=true needs torchrun: torchrun --standalone --nproc-per-node=G"),
        (["group=true", "workers=2"], {}, "leave workers= and restarts= out"),
        (["group=maybe"], {}, "group=maybe: write true or false"),
        (["group=true"], {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, "start one group on each machine"),
    ],
)
def test_wrong_arguments_of_a_group_are_refused(arguments, environment, message, monkeypatch, capsys):
    monkeypatch.setenv("RINGMASTER_TOKEN", TOKEN)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main(["worker", "server=127.0.0.1:1", *arguments]) == 2
    errors = capsys.readouterr().err
    assert message in errors
    assert errors.count("\n") == 1
    monkeypatch.setenv("RANK", "1")  # the first rank reports a mistake for all
    monkeypatch.setattr("ringmaster_dist.worker.__main__._PAUSE_SECONDS", 0.0)
    assert worker_main(["server=127.0.0.1:1", *arguments, "group=true", "device=cuda:7"]) == 2
    assert capsys.readouterr().err == ""
