"""Workers that come too early, to the wrong place or with the wrong data. Each gets one line, and none hangs."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ringmaster_dist import __version__
from ringmaster_dist.cli.main import main
from tests.distributed.processes import LONG, QUICK, Run, check_finished, until

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "0123456789abcdef" * 2


def start(code_or_module, *arguments, cwd=None, **environment):
    """Starts a Python program in the background, with stderr piped."""
    program = ["-c", code_or_module] if " " in code_or_module else ["-m", code_or_module]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, **environment}
    command = [sys.executable, *program, *arguments]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=cwd
    )


def ended(process, code, *words):
    """Checks that it ends with this code, that its last line has these words, and that there is no traceback."""
    output, errors = process.communicate()
    assert process.returncode == code, output + errors
    assert "Traceback" not in errors
    for word in words:
        assert word in errors.strip().splitlines()[-1]
    return errors


@pytest.mark.parametrize(
    ("overrides", "environment", "words"),
    [
        (["server.host=0.0.0.0", "server.tls=false"], {}, ["server.tls=false with server.host=0.0.0.0", "insecure"]),
        (["cluster.local_workers=5"], {}, ["cluster.local_workers=5: between 0 and cluster.workers=4"]),
        (["server.start_seconds=60"], {}, ["server.start_seconds=60: must be below server.call_seconds=60"]),
        (["server.host=0.0.0.0"], {"RINGMASTER_TOKEN": "short"}, ["RINGMASTER_TOKEN", "openssl rand -hex 16"]),
        (["server.host=0.0.0.0"], {"RINGMASTER_TOKEN_FILE": "/no"}, ["token file /no cannot be read"]),
        (["resume=auto"], {}, ["resume=auto needs run.dir"]),
    ],
)
def test_a_server_that_no_worker_could_reach_is_not_started(
    overrides, environment, words, tmp_path, monkeypatch, capfd
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    where = [] if "resume=auto" in overrides else [f"run.dir={tmp_path}/run"]
    given = ["cluster.local_workers=0", *overrides] if "cluster.local_workers=5" not in overrides else overrides
    assert main(["train", *where, *given]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    for word in words:
        assert word in line


@pytest.mark.parametrize(
    ("host", "words"), [("name.invalid", "cannot be listened on"), ("192.0.2.77", "is not an address of this machine")]
)
@pytest.mark.parametrize("resume", [[], ["resume=auto"]])  # the second is found by the server itself
def test_a_host_that_is_not_here_is_one_line(host, words, resume, tmp_path):
    given = ["cluster.local_workers=0", f"server.host={host}", *resume]
    with Run(tmp_path / "run", *given, *([*QUICK, f"run.dir={tmp_path}/run"] if resume else [])) as run:
        code, _, errors = run.wait()
    (line,) = errors.splitlines()
    assert (code, f"server.host={host}" in line, words in line) == (2, True, True)
    assert resume or not (tmp_path / "run").exists()  # so that the corrected command can begin


def test_two_terminals_on_one_machine_tell_what_happens(tmp_path):
    """The server says where it listens and who has joined. The worker says what it computes on, and how fast."""
    alone = ["cluster.local_workers=0", "cluster.workers=1", "cluster.profile=none", "budget.updates=30"]
    with Run(tmp_path / "run", *alone) as run:
        address = until(lambda: (run.directory / "address").exists(), "it listens") and (run.directory / "address")
        guest = start("ringmaster_dist", "worker", f"server=@{address}", f"token_file={run.directory}/token")
        summary = check_finished(run)
        _, output, errors = run.wait()
        said, _ = guest.communicate(timeout=60)
    assert "is loopback, so only this machine can start the 1 of cluster.workers=1" in errors
    assert f"ringmaster worker server={address.read_text()} token_file={run.directory}/token" in output
    assert f"worker-0 joined from {socket.gethostname()}, computes on cpu (1 of 1)" in output
    assert "worker-0: joined, computes on cpu" in said
    assert "worker-0: the run is over, after 3" in said.splitlines()[-1]
    worker = summary["per_worker"]["0"]
    spent = worker["used_seconds"] + worker["wasted_seconds"]
    assert worker["base_seconds"] == 0
    assert 0 < worker["gradient_seconds"] <= spent / 30 * 1.0001
    assert summary["synchronous_updates"] == int(summary["seconds"] / worker["gradient_seconds"])


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def test_a_worker_waits_for_a_server_that_is_not_there_yet(tmp_path, monkeypatch):
    monkeypatch.setenv("RINGMASTER_TOKEN", TOKEN)
    port = free_port()
    early = start("ringmaster_dist.worker", f"server=127.0.0.1:{port}")
    said = early.stderr.readline()
    assert f"no server at 127.0.0.1:{port} (Connection refused)" in said
    assert "trying for another" in said
    with Run(tmp_path / "run", "cluster.workers=1", *LONG, f"server.port={port}") as run:
        until(lambda: len(run.joined()) == 2, "both have joined")
        assert (tmp_path / "run/token").read_text() == TOKEN
        run.children()
        run.process.send_signal(signal.SIGINT)
        check_finished(run)
    ended(early, 0)


def test_a_worker_reads_the_server_address_from_a_file(tmp_path):
    """The file is read at every attempt. First it does not exist, then it is wrong, then it is the server's own."""
    named = tmp_path / "address"
    early = start("ringmaster_dist.worker", f"server=@{named}", RINGMASTER_TOKEN=TOKEN)
    assert f"no server has written {named}" in early.stderr.readline()
    named.write_text(f"127.0.0.1:{free_port()}")
    assert "(Connection refused)" in early.stderr.readline()
    environment = {"RINGMASTER_TOKEN": TOKEN}
    line = [f"run.dir={tmp_path}/run", *QUICK, "cluster.workers=1", "budget.updates=null", "budget.seconds=4"]
    server = start("ringmaster_dist", "train", *line, **environment)
    until(lambda: (tmp_path / "run/address").exists(), "the server is there")
    named.write_text((tmp_path / "run/address").read_text())
    ended(server, 0)
    ended(early, 0)
    assert '"worker": 1' in (tmp_path / "run/members.jsonl").read_text()


def test_a_worker_reports_another_program_at_the_port():
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        quick = ["connect_seconds=1", "call_seconds=1", "patience_seconds=1"]
        mistaken = start("ringmaster_dist.worker", f"server={address}", *quick, RINGMASTER_TOKEN=TOKEN)
        ended(mistaken, 1, f"something listens at {address}, but did not answer as a server")  # it may be hanging


OTHER_VERSION = """
import sys, ringmaster_dist
ringmaster_dist.__version__ = "9.9.9"
from ringmaster_dist.worker.__main__ import main
code = main(sys.argv[1:])
sys.stderr.flush()
import os; os._exit(code)
"""


OWN_PROBLEM = """
from ringmaster_dist.problems.quadratic import Quadratic
def factory(seed, device):
    problem = Quadratic(20, 0.01)
    problem.data_fingerprint = "{data}"
    return problem
"""


def test_other_packages_and_other_data_are_refused_with_the_reason(tmp_path, monkeypatch):
    for place in ("server", "other", "none"):
        (tmp_path / place).mkdir()
        if place != "none":
            (tmp_path / place / "theirs.py").write_text(OWN_PROBLEM.format(data=place))
    problem = ["problem=python", "problem.target=theirs:factory", "cluster.workers=1", f"run.dir={tmp_path}/run"]
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path / "server")
    with Run(tmp_path / "run", *problem, *LONG, "resume=null") as run:
        until(lambda: run.version() > 2, "the run goes on")
        given = [f"server={(tmp_path / 'run/address').read_text()}", f"token_file={tmp_path}/run/token"]
        allowed, there = [*given, "target=theirs:factory"], tmp_path / "server"
        refused = start("ringmaster_dist.worker", *given, cwd=there)
        wrong = start("ringmaster_dist.worker", *given, "target=os:system", cwd=there)
        older = start(OTHER_VERSION, *allowed, cwd=there)
        elsewhere = start("ringmaster_dist.worker", *allowed, cwd=tmp_path / "other")
        nowhere = start("ringmaster_dist.worker", *allowed, cwd=tmp_path / "none")
        ended(refused, 2, "problem.target=theirs:factory, and none was allowed", "add target=theirs:factory")
        ended(wrong, 2, "target=os:system was given", "add target=theirs:factory")
        ended(
            older, 2, f"this machine has version 9.9.9 of ringmaster-dist, the server {__version__}: install the same"
        )
        ended(elsewhere, 2, "this machine has other data than the server, or other frozen weights or buffers")
        ended(nowhere, 2, "cannot be joined from here", "theirs:factory cannot be imported here")
        until(lambda: sum(m["event"] == "leave" for m in run.members()) == 5, "they have left again")
        run.process.send_signal(signal.SIGINT)
        run.wait()


CARELESS_PROBLEM = """
import numpy
from ringmaster_dist.problems.quadratic import Quadratic
class Careless(Quadratic):
    def gradient(self, *arguments):
        gradient, loss = super().gradient(*arguments)
        return gradient.clone().requires_grad_(), numpy.float64(loss)
def factory(seed, device):
    return Careless(20, 0.01)
"""


def test_gradients_with_a_graph_and_numpy_losses_are_converted(tmp_path, monkeypatch):
    """A gradient with its graph and a numpy loss do not stop a server, and do not make a worker retry for ever."""
    (tmp_path / "careless.py").write_text(CARELESS_PROBLEM)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    problem = ["problem=python", "problem.target=careless:factory", f"run.dir={tmp_path}/run", "run.report=false"]
    with Run(tmp_path / "run", *problem, "budget.updates=20", "resume=null") as run:
        assert check_finished(run)["updates"] == 20


def test_resume_auto_begins_resumes_and_leaves_a_finished_run_alone(tmp_path):
    """``resume=auto`` is for a restart policy, which repeats one command line."""
    line = [f"run.dir={tmp_path}/run", *QUICK, "resume=auto", "watch=true"]
    again = [sys.executable, "-m", "ringmaster_dist", "train", *line]
    with Run(tmp_path / "run", *line, "budget.updates=10000") as run:
        until(lambda: run.version() > 5, "the run goes on")
        run.process.send_signal(signal.SIGINT)
        check_finished(run)
    raised = subprocess.run([*again, "budget.updates=420"], capture_output=True, text=True)
    assert "420 updates" in raised.stdout, raised.stderr
    over = subprocess.run([*again, "budget.updates=420"], capture_output=True, text=True)
    assert (over.returncode, "is over: 420 updates" in over.stdout) == (0, True)
    other = subprocess.run([*again, "method.eta=7"], capture_output=True, text=True)
    assert other.returncode == 2
    assert "method.eta=7: the run in" in other.stderr
    assert "was begun with 0.2" in other.stderr
