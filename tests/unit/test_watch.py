"""The live page of a run: what it serves, to which clients, and what it shows before the run has files."""

import json
import os
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request

import pytest

from ringmaster_dist.cli.main import main
from ringmaster_dist.observe.report import page
from ringmaster_dist.observe.watch import Watcher
from tests.unit.test_exposition import members, parsed
from tests.unit.test_report import line, make


@pytest.fixture
def watcher(tmp_path):
    made = Watcher(make(tmp_path / "run", arrivals=[]))
    yield made
    made.close()


def get(watcher, path="", **headers):
    with urllib.request.urlopen(urllib.request.Request(watcher.url + path, headers=headers), timeout=60) as answer:
        return answer.read().decode()


def test_the_page_waits_for_files_and_follows_them(watcher, tmp_path):
    assert "nothing to show yet" in get(watcher)
    with pytest.raises(urllib.error.HTTPError, match="503"):
        get(watcher, "data.json")
    trace = tmp_path / "run/trace.jsonl"
    for version in range(3):
        with trace.open("a") as file:
            file.write(line(version + 1.0, 0, version, version, 0, "accepted", 1.0, 0.5))
        assert json.loads(get(watcher, "data.json"))["runs"][0]["totals"]["updates"] == version + 1
    assert 'data-refresh="2"' in get(watcher)


def test_the_server_serves_only_the_page(watcher):
    for path in ("config.yaml", "../token", "%2e%2e/token"):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            get(watcher, path)
    with pytest.raises(urllib.error.HTTPError, match="501"):
        urllib.request.urlopen(urllib.request.Request(watcher.url, data=b"x", method="POST"), timeout=60)
    with pytest.raises(urllib.error.HTTPError, match="403"):  # DNS rebinding: a foreign name for this machine
        get(watcher, Host="evil.example:80")


def test_metrics_and_health_are_answered_only_if_asked_for(watcher, tmp_path):
    for path in ("metrics", "healthz"):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            get(watcher, path)
    asked = Watcher(tmp_path / "run", metrics=True)
    try:
        for path in ("metrics", "healthz"):
            with pytest.raises(urllib.error.HTTPError, match="503"):  # the run has no files yet
                get(asked, path)
            with pytest.raises(urllib.error.HTTPError, match="403"):
                get(asked, path, Host="evil.example:80")
        (tmp_path / "run/trace.jsonl").write_text(line(1.0, 0, 0, 0, 0, "accepted", 1.0, 0.5))
        assert get(asked, "healthz") == "the server waits for workers\n"  # none has joined
        assert parsed(get(asked, "metrics"))["updates",] == 1
        members(tmp_path / "run", (0, "join"))  # and nothing else has changed
        assert parsed(get(asked, "metrics"))["workers",] == 1
        (tmp_path / "run/summary.json").write_text('{"diverged": true}')
        with pytest.raises(urllib.error.HTTPError, match="503"):
            get(asked, "healthz")
        assert parsed(get(asked, "metrics"))["healthy",] == 0
    finally:
        asked.close()


def test_mistakes_are_reported_in_one_line(tmp_path, capsys):
    run = make(tmp_path / "run")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for arguments, words in (
            ([str(run), f"port={port}"], "choose another, or port=0"),
            ([str(run), "port=99999"], "port=99999"),
            ([str(tmp_path)], "no config.yaml"),
            ([str(run), "colour=red"], "known: port=, host=, metrics="),
            ([], "usage: ringmaster watch RUN_DIR"),
        ):
            assert main(["watch", *arguments]) == 2
            said = capsys.readouterr().err
            assert words in said
            assert len(said.splitlines()) == 1


def test_idle_connections_are_closed_and_do_not_pile_up(watcher, monkeypatch):
    """Three hundred connections send nothing. The number of threads stays within its limit, and afterwards the page
    works again."""
    monkeypatch.setattr("ringmaster_dist.observe.watch._Handler.timeout", 0.3)
    host, port = watcher.url.removeprefix("http://").rstrip("/").split(":")
    before = threading.active_count()
    idle = [socket.create_connection((host, int(port)), timeout=60) for _ in range(300)]
    assert threading.active_count() - before <= 32
    for stream in idle:
        assert stream.recv(1) == b""
        stream.close()
    assert "nothing to show yet" in get(watcher)


def test_a_run_cannot_name_a_part_of_the_page(tmp_path):
    name = "@DATA@ @TITLE@ </script>"
    text = page({"runs": [{"name": name}]})
    assert text.count('"runs"') == 1  # the data is there once
    assert "<title>@DATA@ @TITLE@ &lt;/script&gt;</title>" in text


def test_on_loopback_the_page_is_for_the_user_who_serves_it(watcher, tmp_path):
    """Another user gets no page, and 64 idle connections of that user keep nobody out."""
    port = int(watcher.url.rpartition(":")[2].strip("/"))
    other = """import encodings.idna, os, socket, sys
os.setgroups([]), os.setgid(65534), os.setuid(65534)
several = [socket.create_connection(("127.0.0.1", int(sys.argv[1]))) for _ in range(64)]
several[0].sendall(b"GET / HTTP/1.0\\r\\nHost: 127.0.0.1:1\\r\\n\\r\\n")
try:
    print(several[0].recv(1000), flush=True)
except ConnectionError:
    print(b"", flush=True)
sys.stdin.read()"""
    command = [sys.executable, "-c", other, str(port)]
    if os.getuid():
        pytest.skip("only root can become another user")
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"b''\n"
        for _ in range(5):
            assert urllib.request.urlopen(watcher.url).status == 200
        process.stdin.close()
