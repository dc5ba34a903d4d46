"""The doctor, on this machine and towards real servers, other programs and closed ports."""

import os
import socket
import subprocess
import sys
import threading

import pytest

from ringmaster_dist.doctor import probe
from ringmaster_dist.doctor.machine import machine_findings
from ringmaster_dist.doctor.server import _versions, server_findings
from ringmaster_dist.transport.agent import versions
from tests.command import ringmaster
from tests.distributed.processes import LONG, Run, hang_up, until

pytestmark = pytest.mark.e2e


def doctor(*arguments, **environment):
    command = [sys.executable, "-m", "ringmaster_dist", "doctor", *arguments]
    own = {name: value for name, value in os.environ.items() if name != "RINGMASTER_TOKEN"}
    return subprocess.run(command, capture_output=True, text=True, env={**own, **environment})


def lines(done):
    """Returns the text of each check, by name."""
    return {line[9:22].strip(): line[2:8].strip() + ": " + line[22:].strip() for line in done.stdout.splitlines()[1:]}


def test_the_doctor_checks_one_machine():
    done = doctor()
    assert done.returncode == 0, done.stdout
    said = lines(done)
    assert said["versions"].startswith("ok: Python")
    assert "float32" in said["cpu"]
    assert "20 updates" in said["small run"]
    assert done.stderr == ""


def test_the_doctor_reports_a_fault_of_this_machine(tmp_path, monkeypatch):
    monkeypatch.setattr("ringmaster_dist.doctor.machine._DISK_BYTES", 1 << 60)
    found = {finding.what: finding for finding in machine_findings(tmp_path)}
    assert "choose a run.dir elsewhere" in found["disk"].text
    assert not found["disk"].ok


def test_the_doctor_checks_a_running_server(tmp_path, monkeypatch):
    with Run(tmp_path / "run", *LONG) as run:
        until(lambda: run.arrivals(), "the run goes on")
        address = (run.directory / "address").read_text()
        good = doctor(f"server={address}", f"token_file={run.directory}/token")
        said = lines(good)
        assert good.returncode == 0, good.stdout + good.stderr
        assert said["RPC"] == "ok: a call was answered"
        assert said["token"] == "ok: is that of this run"
        assert abs(float(said["clock skew"].split()[1])) < 1
        assert said["port"] == f"ok: {address} answers with TLS 1.3"
        without = doctor(f"server={address}")
        assert (without.returncode, "a ringmaster server answers" in lines(without)["port"]) == (0, True)
        wrong = doctor(f"server={address}", RINGMASTER_TOKEN="yesterday's")
        assert wrong.returncode == 1
        assert "copy RUN_DIR/token" in lines(wrong)["token"]
        for token, code in ((run.directory / "token", 0), (run.directory / "config.yaml", 1)):
            monkeypatch.setenv("RINGMASTER_TOKEN_FILE", str(token))
            assert probe.main(address) == code
        monkeypatch.delenv("RINGMASTER_TOKEN_FILE")
        assert len(run.joined()) == 3  # no other worker joined


def test_the_doctor_reports_a_closed_port_and_another_program():
    nobody = doctor("server=127.0.0.1:9")
    assert (nobody.returncode, "no server at 127.0.0.1:9" in lines(nobody)["port"]) == (1, True)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=hang_up, args=(listener,), daemon=True).start()
        stranger = doctor(f"server=127.0.0.1:{listener.getsockname()[1]}")
        assert stranger.returncode == 1
        assert "check the port" in lines(stranger)["port"]
    for done in (nobody, stranger):
        assert done.stderr == ""


def test_the_doctor_reports_a_server_that_does_not_answer():
    """An example is a server whose process was stopped. Its socket still accepts connections."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        for token in (None, "0123456789abcdef"):
            found = {f.what: f for f in server_findings(address, token)}
            assert not found["port"].ok
            assert "not" in found["port"].text


def test_a_probe_imports_no_torch():
    code = "import ringmaster_dist.doctor.probe, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_doctor_compares_versions():
    assert _versions(versions()).ok
    other = _versions({**versions(), "torch": "2.7.1"})
    assert not other.ok
    assert "2.7.1" in other.text
    assert "install the same" in _versions({**versions(), "protocol": 1}).text


@pytest.mark.parametrize(
    "arguments", [["server=here"], ["colour=red"], ["server=a:1", "token_file=/nowhere"], ["runs/a"]]
)
def test_wrong_arguments_of_the_doctor_are_refused(arguments):
    done = ringmaster("doctor", *arguments)
    assert (done.returncode, len(done.stderr.splitlines()), done.stdout) == (2, 1, "")
