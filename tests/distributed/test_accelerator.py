"""Whole runs over real processes whose workers compute on an accelerator, which is pretended if there is none."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ringmaster_dist import devices
from ringmaster_dist.config.compose import load
from ringmaster_dist.observe.page_data import page_data
from ringmaster_dist.observe.run_directory import RunDirectory
from ringmaster_dist.observe.run_files import Recording, RunFiles
from ringmaster_dist.protocol import Verdict
from ringmaster_dist.simulation.session import simulate
from tests import pretend
from tests.distributed.processes import LONG, Run, check_finished, recompute, until
from tests.unit.test_devices import OWN

pytestmark = pytest.mark.accelerator

ROOT = Path(__file__).parents[2]
TINY = ["problem=nanochat", "problem.batch=2", "problem.precision=float32", "problem.attention=sdpa", "data=text",
        "model.n_layer=2", "model.n_embd=32", "model.sequence_len=32", "model.vocab_size=300", "geometry=euclidean",
        "budget.updates=30", "budget.seconds=60"]  # fmt: skip


@pytest.fixture
def nanochat(tmp_path):
    """The overrides of a tiny NanoChat."""
    (tmp_path / "text").mkdir()
    text = "\n".join(f"the {i} of {i * i % 97} is {i % 7}" for i in range(2000))
    (tmp_path / "text" / "a.txt").write_text(text)
    return [*TINY, f"data.path={tmp_path}/text"]


def train(directory, *overrides):
    """Returns the arrivals, the summary and the text on stderr."""
    given = ["train", f"run.dir={directory}", "cluster.profile=none", "run.report=false", *overrides]
    command, environment = [sys.executable, "-m", "ringmaster_dist", *given], {**os.environ, "RINGMASTER_LOG": "INFO"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return RunFiles(directory).arrivals(), RunFiles(directory).summary(), done.stderr


def test_a_run_on_an_accelerator_is_that_of_the_cpu(nanochat, tmp_path, accelerator):
    """One worker leaves no choice about the order of arrivals, so the simulator computes the same run on the CPU.

    Muon is left out, because it makes rounding errors of a small gradient as large as the gradient. Gradients and
    updates are computed on the accelerator. Then the run is resumed with a server that computes on the CPU.
    """
    rounding = 1e-5 if accelerator == pretend.NAME else 1e-2  # a GPU sums in another order
    given = [*nanochat, "cluster.workers=1", "model.n_layer=1", "model.sequence_len=16", "budget.seconds=1000"]
    place = [f"cluster.devices=[{accelerator}]", f"server.device={accelerator}"]
    found, summary, errors = train(tmp_path / "run", *given, *place, "budget.updates=200")
    directory = RunDirectory(str(tmp_path / "cpu"), name="cpu")
    on_cpu = simulate(load([*given, "budget.updates=200"]), directory)
    expected = [arrival.loss for arrival in RunFiles(directory.path).arrivals()]
    assert len(found) == len(expected) == 200
    assert [arrival.loss for arrival in found] == pytest.approx(expected, rel=rounding)
    assert summary.evaluation["loss"] == pytest.approx(on_cpu.evaluation["loss"], rel=rounding)
    assert summary.evaluation["loss"] < 0.95 * expected[0]
    assert f"worker-0 joined and computes on {accelerator}" in errors
    again = ["budget.updates=205", "cluster.devices=[cpu]", "server.device=cpu"]
    train(tmp_path / "run", *given, *again, "resume=auto")
    assert [term.device for term in RunFiles(tmp_path / "run").terms()] == [accelerator, "cpu"]
    outcome = recompute(tmp_path / "run")
    assert (outcome.same, outcome.updates) == (True, 205), outcome.message


def test_an_accelerator_and_the_cpu_work_in_one_run(nanochat, tmp_path, accelerator):
    given = [
        "wire.gradient_dtype=int8",
        "cluster.workers=2",
        f"cluster.devices=[{accelerator},cpu]",
        "method=synchronous",
        "budget.updates=5",
    ]
    arrivals, summary, _ = train(tmp_path / "run", *nanochat, *given)
    assert (summary.updates, summary.invalid) == (5, 0)
    assert sorted(arrival.worker for arrival in arrivals if arrival.verdict is Verdict.ACCEPTED) == [0] * 5 + [1] * 5
    expected = {(accelerator, devices.title(accelerator)), ("cpu", "CPU")}
    joined = {m.worker: (m.device, m.device_title) for m in RunFiles(tmp_path / "run").members() if m.event == "join"}
    assert set(joined.values()) == expected
    assert {int(w): (row.device, row.device_title) for w, row in summary.per_worker.items()} == joined
    (run,) = page_data([Recording(tmp_path / "run")])["runs"]
    assert {row["device"] for row in run["workers"]} == {f"{accelerator} ({devices.title(accelerator)})", "cpu"}
    named = next(f"worker {w} computed on {accelerator} (" for w, device in joined.items() if device[0] == accelerator)
    outcome = recompute(tmp_path / "run")
    assert outcome.same, outcome.message
    trace = tmp_path / "run/trace.jsonl"
    trace.write_text(trace.read_text().replace(f'"loss": {arrivals[0].loss!r}', f'"loss": {arrivals[0].loss + 0.5!r}'))
    assert named in recompute(tmp_path / "run").message


def test_a_gradient_in_device_memory_ends_its_worker(tmp_path, accelerator, monkeypatch):
    """The server's machine has tried the code on its CPU, where there is nothing wrong with it."""
    (tmp_path / "staying.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    given = ["problem=python", "problem.target=staying:factory", "cluster.workers=1", "cluster.devices=[cpu]"]
    with Run(tmp_path / "run", *given, *LONG, f"run.dir={tmp_path}/run", "resume=null") as run:
        until(lambda: run.arrivals(), "the run goes on")
        command = [sys.executable, "-m", "ringmaster_dist", "worker", f"server=@{tmp_path}/run/address",
                   f"token_file={tmp_path}/run/token", "target=staying:factory", f"device={accelerator}"]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 1, done.stderr
        (line,) = done.stderr.splitlines()
        assert f"is on {accelerator}, and only host memory can be sent" in line
        assert {a["worker"] for a in run.arrivals()} == {0}
        run.process.send_signal(signal.SIGINT)
        check_finished(run)


# An interpreter that answers questions, and writes down what it would start.
NOTING = """#!/bin/sh
if [ "$1" = -c ]; then exec {python} "$@"; fi
echo "$@" >>{folder}/started
"""


def test_the_launcher_starts_a_worker_for_each_device(accelerator, tmp_path):
    python = tmp_path / "python"
    python.write_text(NOTING.format(python=sys.executable, folder=tmp_path))
    python.chmod(0o755)

    def started(*given, **settings):
        environment = {**os.environ, "RINGMASTER_PYTHON": str(python), **settings}
        subprocess.run([ROOT / "launch/worker.sh", "10.0.0.1:9", *given], env=environment, check=True)
        lines = (tmp_path / "started").read_text().splitlines()
        (tmp_path / "started").unlink()
        return [[word for word in line.split() if "=" in word] for line in lines]

    found = devices.accelerators()
    (words,) = started("slot=3")
    assert {f"workers={len(found)}", f"device={','.join(found)}", "server=10.0.0.1:9", "slot=3"} <= set(words)
    agents = started(f"device=cpu,{accelerator}", "slot=3", LAUNCHER="torchrun", WORKERS="3")
    assert sorted(word for words in agents for word in words if word.startswith("device=")) == sorted(
        ["device=cpu", f"device={accelerator}", "device=cpu"]
    )
    assert all({"server=10.0.0.1:9", "slot=3"} <= set(words) for words in agents)
