"""A short ``ringmaster chaos``: every kind of fault strikes, nothing is lost, no bit is wrong."""

import json
import subprocess
import sys

import pytest

from tests.command import ringmaster

pytestmark = pytest.mark.e2e


def chaos(*arguments):
    command = [sys.executable, "-m", "ringmaster_dist", "chaos", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.alone
def test_a_short_chaos_loses_nothing_and_replays(tmp_path):
    """Workers take two steps per push, send int8, and compute while they push."""
    given = ["cluster.workers=4", "cluster.unit_seconds=0.01", "local.steps=2", "wire.gradient_dtype=int8",
             "worker.overlap=true"]  # fmt: skip
    done = chaos("seconds=14", "faults=8", "restarts=1", "baseline=5", f"dir={tmp_path}/chaos", *given)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "chaos/chaos.json").read_text())
    assert report["faults"] == {"kill": 2, "stop": 2, "disconnect": 2, "nan": 2, "restart": 1}
    assert report["told_by_workers"]["disconnect"] >= 1  # a worker that is killed immediately reports nothing
    assert report["invalid"] <= 2
    assert report["counters_add_up"]
    assert (report["replay"], report["lost_updates"]) == ("same", 0)
    assert report["goodput"] > 0.5  # of a few seconds on a shared machine; the long run is in docs/cluster.md
    assert "the same bits" in done.stdout
    again = chaos(f"dir={tmp_path}/chaos")
    assert again.returncode == 2
    assert "is not empty" in again.stderr


@pytest.mark.parametrize("argument", ["seconds=1", "faults=-1", "faults=1.5", "seed=x", "--fast", "cluster.workerz=3"])
def test_wrong_arguments_of_chaos_are_refused(argument):
    done = ringmaster("chaos", argument)
    assert (done.returncode, len(done.stderr.strip().splitlines())) == (2, 1), done.stderr
