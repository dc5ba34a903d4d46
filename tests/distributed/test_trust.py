"""Each way in which a worker and a server can fail to trust each other ends with one line."""

import http.server
import json
import os
import re
import signal
import socket
import ssl
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from safetensors import safe_open

from ringmaster_dist.server.members import Sessions
from ringmaster_dist.transport import identity
from tests.command import ringmaster
from tests.distributed.processes import LONG, Run, check_finished, descendants, hang_up, until

TOKEN = "0123456789abcdef" * 2
QUICK_WORKER = ["connect_seconds=2", "call_seconds=3", "patience_seconds=3"]


def work(*arguments, module="ringmaster_dist.worker", **environment):
    environment = {**os.environ, "RINGMASTER_TOKEN": TOKEN, **environment}
    command = [sys.executable, "-m", *module.split(), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def check_line(done, code, *words):
    assert done.returncode == code, done.stdout + done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("ringmaster")]
    assert all(word in line for word in words), line
    assert "Traceback" not in done.stderr


@pytest.fixture
def web():
    """Runs a web server."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_a_program_without_tls_is_not_trusted(web):
    address = f"127.0.0.1:{web.server_address[1]}"
    check_line(work(f"server={address}", *QUICK_WORKER), 2, f"what listens at {address} does not speak TLS")


def test_a_program_with_another_certificate_is_not_trusted(web, tmp_path):
    certificate, key = identity._pair("somebody else", bytes(32))
    (tmp_path / "both.pem").write_bytes(certificate + key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "both.pem")
    web.socket = context.wrap_socket(web.socket, server_side=True)
    check_line(work(f"server=127.0.0.1:{web.server_address[1]}", *QUICK_WORKER), 2, "is not a ringmaster server")


def test_a_worker_retries_a_peer_that_hangs_up():
    """An example is a published port whose container has not started. The worker retries for as long as its patience
    lasts."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=hang_up, args=(listener,), daemon=True).start()
        done = work(f"server=127.0.0.1:{listener.getsockname()[1]}", *QUICK_WORKER)
    check_line(done, 1, "did not answer as a server of this system", "for 3 s")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["server=fd00::1:29400"], "an IPv6 address needs brackets"),
        (["server=here"], "write server=HOST:PORT"),
        (["server=127.0.0.1:1", "tls=maybe"], "tls=maybe: write true or false"),
        (["server=127.0.0.1:1", "token_file=/nowhere"], "/nowhere cannot be read"),
    ],
)
def test_mistakes_of_a_worker_are_reported(arguments, words, monkeypatch):
    monkeypatch.setenv("RINGMASTER_TOKEN", TOKEN)
    check_line(ringmaster("worker", *arguments), 2, words)


def test_plain_text_on_loopback_works_if_both_ends_use_it(tmp_path):
    """If only one end uses plain text, the worker does not join."""
    with Run(tmp_path / "run", *LONG, "server.tls=false") as run:
        until(lambda: run.version() > 5, "the run is on")
        address = (tmp_path / "run/address").read_text()
        token = (tmp_path / "run/token").read_text()
        done = work(f"server={address}", *QUICK_WORKER, RINGMASTER_TOKEN=token)
        assert done.returncode != 0
        check_line(work(f"server={address}", "tls=false", *QUICK_WORKER), 2, "the token is not that of this run")
        run.process.send_signal(signal.SIGINT)
        check_finished(run)


def test_ipv6_works_and_the_run_directory_is_private(tmp_path):
    """After a run over ::1, others can read nothing in its directory, and no checkpoint has a usable session."""
    os.umask(0o022)
    with Run(tmp_path / "run", *LONG, "server.host=::1", "checkpoint.every=10") as run:
        until(lambda: run.checkpoints(0), "a checkpoint")
        done = work(f"server={(tmp_path / 'run/address').read_text()}", "tls=false", *QUICK_WORKER)
        check_line(done, 1, "which may expect TLS: tls=false was given here")
        run.process.send_signal(signal.SIGINT)
        check_finished(run)
        checkpoint = run.checkpoints(0)[-1]
        with safe_open(checkpoint, framework="pt") as file:
            state = json.loads(file.metadata()["state"])
        kept = [row[1] for row in state["service"]["workers"]]
        sessions = Sessions((tmp_path / "run/token").read_text())
        assert len(kept) == 3
        assert all(sessions.holder(session) is None for session in kept), "a checkpoint has a session that can be used"
        assert (tmp_path / "run/token").read_text() not in checkpoint.read_bytes().decode("latin-1")
    for path in [tmp_path / "run", *(tmp_path / "run").rglob("*")]:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), f"{path} has mode {mode:o}"


def test_a_killed_supervised_worker_is_restarted_alone(tmp_path):
    """``ringmaster worker workers=2`` restarts a killed worker alone."""
    with Run(tmp_path / "run", *LONG, "cluster.workers=1") as run:
        until(lambda: run.version() > 5, "the run is on")
        given = [f"server={(tmp_path / 'run/address').read_text()}", "workers=2"]
        environment = {**os.environ, "RINGMASTER_TOKEN": (tmp_path / "run/token").read_text()}
        command = [sys.executable, "-m", "ringmaster_dist", "worker", *given]
        both = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        try:
            until(lambda: len(run.joined()) == 3, "both have joined")
            (victim,) = (pid for pid, name in descendants(both.pid).items() if name == "worker-1")
            os.kill(victim, signal.SIGKILL)
            until(lambda: len(run.joined()) == 4, "it is back")
            run.process.send_signal(signal.SIGINT)
            check_finished(run)
            _, errors = both.communicate()
            assert both.returncode == 0, errors
            assert errors.count("starting it again") == 1
        finally:
            both.kill()
            both.wait()


def test_a_supervised_mistake_is_not_retried(tmp_path):
    with Run(tmp_path / "run", *LONG, "cluster.workers=1") as run:
        until(lambda: run.version() > 5, "the run is on")
        done = work(f"server={(tmp_path / 'run/address').read_text()}", "workers=2", module="ringmaster_dist worker")
        assert done.returncode == 2
        assert done.stderr.count("has another token") == 2
        assert done.stderr.count("a mistake is not retried") == 2
        run.process.send_signal(signal.SIGINT)
        check_finished(run)


def test_the_package_opens_no_store():
    """Not even torchrun's, because anybody who reaches a store can read and write it."""
    import ringmaster_dist

    (folder,) = ringmaster_dist.__path__
    sources = [path for path in Path(folder).rglob("*.py") if path.parent.name != "bench"]
    assert Path(folder, "transport/host.py") in sources
    assert [path for path in sources if re.search(r"TCPStore\(|MASTER_PORT", path.read_text())] == []
