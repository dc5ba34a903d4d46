"""Real runs: a server and workers as processes, over torch RPC on loopback."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from ringmaster_dist.algorithm.methods import Method
from ringmaster_dist.algorithm.schedules import Constant
from ringmaster_dist.cli.main import main
from ringmaster_dist.devices import has_bfloat16
from ringmaster_dist.observe.run_files import RunFiles
from ringmaster_dist.simulation.forecast import forecast
from ringmaster_dist.theory import seconds_of_run
from tests.command import ringmaster
from tests.distributed.processes import (
    LONG,
    QUICK,
    Run,
    alive,
    check_finished,
    descendants,
    processes_with,
    recompute,
    replay,
    until,
)

METHODS = {
    "ringmaster": ["method.threshold=2"],
    "ringmaster_agnostic": ["method.eta=1"],
    "rennala": ["method.batch=3"],
    "delay_adaptive": [],
    "synchronous": [],
    "asynchronous": [],
}


@pytest.mark.parametrize("method", METHODS)
def test_a_real_run_replays_to_the_same_bits(method, tmp_path):
    with Run(tmp_path / "run", f"method={method}", *METHODS[method], "budget.updates=60") as run:
        summary = check_finished(run)
    assert summary["updates"] == 60
    assert summary["num_workers"] == 3
    assert summary["clock"] == "real"
    assert summary["final_gap"] < 100
    assert all(worker["accepted"] + worker["interrupted"] > 0 for worker in summary["per_worker"].values())
    if method == "ringmaster":
        assert all(a["delay"] < 2 for a in run.arrivals() if a["verdict"] == "accepted")
    if method == "synchronous":
        assert summary["accepted"] == 180


def test_an_automatic_threshold_replays(tmp_path):
    """It also replays across a restart of the server, which resumes its choices from the checkpoint."""
    with Run(tmp_path / "run", *LONG, "method.threshold=auto", "checkpoint.every=10") as run:
        until(lambda: run.version() > 60 and run.checkpoints(0), "the run goes on")
        os.kill(run.server(), signal.SIGKILL)
        until(lambda: len(run.terms()) == 2 and run.version() > run.terms()[1]["version"] + 30, "it goes on again")
        run.process.send_signal(signal.SIGINT)
        check_finished(run)
    changes = [json.loads(line) for line in (tmp_path / "run/thresholds.jsonl").read_text().splitlines()]
    assert changes
    assert all("differ" in change["reason"] for change in changes)
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert rows[0]["threshold"] is None  # it begins without a limit
    assert min(row["threshold"] or math.inf for row in rows) < 16


def test_a_large_update_by_several_threads_replays(tmp_path):
    """A part of it is in bfloat16 if the processor has that. The run says so, and the replay does the same."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text/a.txt").write_text("\n".join(f"the {i} of {i * i % 97} is {i % 7}" for i in range(2000)))
    model = ["problem=nanochat", "data=text", f"data.path={tmp_path}/text", "model.n_layer=4", "model.n_embd=192",
             "model.sequence_len=16", "model.vocab_size=300", "problem.batch=1"]  # fmt: skip
    given = [*model, "cluster.workers=3", "server.compute_threads=2", "budget.updates=12", "run.report=false",
             "geometry=scion", "method.eta=0.001"]  # fmt: skip
    done = ringmaster("train", f"run.dir={tmp_path / 'run'}", *given)
    assert done.returncode == 0, done.stderr
    outcome = recompute(tmp_path / "run")
    assert outcome.same, outcome.message
    term = json.loads((tmp_path / "run/terms.jsonl").read_text())
    chosen, other = ("mixed", "float32") if has_bfloat16("cpu") else ("float32", "mixed")
    assert term["precision"] == chosen
    (tmp_path / "run/terms.jsonl").write_text(json.dumps(term | {"precision": other}) + "\n")
    assert not recompute(tmp_path / "run").same


def test_a_round_may_take_longer_than_a_call(tmp_path):
    """The fast worker waits for the slow one longer than its call timeout and its patience, and is not lost."""
    paces = ["cluster.workers=2", "cluster.profile=file", "cluster.times=[0.05,7]", "cluster.jitter=0"]
    short = ["server.call_seconds=2", "server.start_seconds=1.5", "server.patience_seconds=4"]
    with Run(tmp_path / "run", "method=synchronous", *paces, *short, "budget.updates=1") as run:
        summary = check_finished(run)
    assert summary["num_workers"] == 2
    assert summary["accepted"] == 2


def test_a_damaged_trace_does_not_replay(tmp_path):
    """The replay finds a changed loss, a changed order, a missing line, and a changed bit of the result."""
    with Run(tmp_path / "run", "budget.updates=30") as run:
        check_finished(run)
    trace = tmp_path / "run" / "trace.jsonl"
    lines = trace.read_text().splitlines(keepends=True)
    records = [json.loads(line) for line in lines]
    record = records[9]
    taken = [r["verdict"] == "accepted" for r in records]
    fresh = next(i for i in range(1, len(records)) if taken[i - 1] and taken[i] and records[i]["delay"] == 0)
    for damaged, word in (
        (
            [*lines[:9], json.dumps({**record, "loss": record["loss"] + 1e-9}) + "\n", *lines[10:]],
            "the loss at version",
        ),
        (
            [*lines[: fresh - 1], lines[fresh], lines[fresh - 1], *lines[fresh + 1 :]],
            f"arrival {fresh - 1} was computed at",
        ),
        (lines[:-1], "numbers of updates differ"),
    ):
        trace.write_text("".join(damaged))
        outcome = recompute(tmp_path / "run")
        assert not outcome.same
        assert word in outcome.message
    trace.write_text("".join(lines) + '{"time": 1.0, "wor')
    broken = replay(tmp_path / "run")
    assert broken.returncode == 2
    assert "not JSON" in broken.stderr
    trace.write_text("".join(lines))
    final = tmp_path / "run" / "final.safetensors"
    content = bytearray(final.read_bytes())
    content[-20] ^= 1
    final.write_bytes(content)
    replayed = replay(tmp_path / "run")
    assert replayed.returncode == 1
    assert "DIFFERENT" in replayed.stdout


@pytest.mark.alone
def test_interruption_saves_compute(tmp_path):
    """A worker that is fifty times too slow is stopped early with interruption. Without interruption its gradients
    are wasted."""
    outcomes = {}
    for interrupt in ("true", "false"):
        overrides = [
            "cluster.workers=2",
            "cluster.profile=linear",
            "method.threshold=1",
            f"method.interrupt={interrupt}",
        ]
        with Run(tmp_path / interrupt, *overrides, "cluster.unit_seconds=0.03", "budget.updates=80") as run:
            outcomes[interrupt] = check_finished(run)
    assert outcomes["true"]["interrupted"] > 10
    assert outcomes["false"]["interrupted"] <= 1  # the end of the run interrupts everybody
    assert outcomes["false"]["stale"] > 10


@pytest.mark.alone
def test_a_forecast_agrees_with_the_real_run(tmp_path):
    """Compares the forecast in virtual time with what the paced cluster then does."""
    threshold, seconds = 2, 8.0
    overrides = ["cluster.workers=4", "cluster.unit_seconds=0.08", "budget.updates=null", f"budget.seconds={seconds}"]
    with Run(tmp_path / "run", "method=ringmaster", f"method.threshold={threshold}", *overrides) as run:
        summary = check_finished(run)
    times = [0.08 * (1 + i) for i in range(4)]
    method = Method(Constant(0.1, 0.1, threshold))
    expected = forecast(times, method, jitter=0.05, interrupt=True, horizon_seconds=100.0)
    assert summary["updates_per_second"] == pytest.approx(expected.updates_per_second, rel=0.15)
    bound = seconds_of_run([t * 1.2 for t in times], summary["updates"], lambda k: threshold)  # with room for jitter
    assert summary["seconds"] <= bound


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_sigint_and_sigterm_end_a_run_cleanly(number, tmp_path):
    with Run(tmp_path / "run", *LONG) as run:
        until(lambda: run.version() > 20, "twenty updates")
        run.children()
        run.process.send_signal(number)
        code, output, _ = run.wait()
        assert code == 128 + number
        assert f"stopped early by you; continue with ringmaster train resume={tmp_path}/run" in output
        summary = check_finished(run)
    assert summary["ended"] == "stopped by the user"
    assert summary["updates"] > 20


@pytest.mark.parametrize("seconds", [0.0, 1.0])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_a_run_starts_leaves_nothing_behind(number, seconds, tmp_path):
    """Ctrl+C reaches every process of the terminal, here those of a session. The fork server is importing."""
    command = [sys.executable, "-m", "ringmaster_dist", "train", f"run.dir={tmp_path}/run", *QUICK, *LONG]
    with (tmp_path / "output").open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    until(lambda: descendants(process.pid), "the first process was started")
    time.sleep(seconds)
    started = descendants(process.pid)
    os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
    until(lambda: process.poll() is not None, "it has obeyed", 20)
    assert process.returncode in (128 + number, -number)
    until(lambda: not any(alive(pid) for pid in started), "every process has ended", 20)
    assert "Traceback" not in (tmp_path / "output").read_text()


@pytest.mark.alone
def test_a_run_ends_after_budget_seconds(tmp_path):
    with Run(tmp_path / "run", "budget.updates=null", "budget.seconds=2") as run:
        summary = check_finished(run)
    assert summary["ended"] == "budget"
    assert 2.0 <= summary["seconds"] < 3.0


def worker(*arguments, **environment):
    command = [sys.executable, "-m", "ringmaster_dist.worker", *arguments]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment}
    )


def test_workers_join_a_run_with_nothing_but_address_and_token(tmp_path):
    with Run(tmp_path / "run", "cluster.workers=1", *LONG) as run:
        address = (
            until(lambda: (tmp_path / "run/address").exists(), "an address") and (tmp_path / "run/address").read_text()
        )
        until(lambda: run.version() > 5, "the run goes on")
        guest = worker(f"server={address}", f"token_file={tmp_path}/run/token")
        stranger = worker(f"server={address}", RINGMASTER_TOKEN="wrong")
        _, errors = stranger.communicate()
        assert stranger.returncode == 2
        assert "has another token" in errors
        until(lambda: any(m["worker"] == 1 for m in run.members()), "the guest has joined")
        useful = ("accepted", 1)
        until(lambda: any((a["verdict"], a["worker"]) == useful for a in run.arrivals()), "the guest is of use")
        run.children()
        run.process.send_signal(signal.SIGINT)
        summary = check_finished(run)
        assert guest.wait() == 0
    assert summary["per_worker"]["1"]["accepted"] > 0
    assert (tmp_path / "run/token").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "server=HOST:PORT"),
        (["server=nowhere"], "server=HOST:PORT"),
        (["serv=a:1"], "there is no setting serv=; did you mean server=?"),
        (["server=127.0.0.1:1"], "no token"),
        (["server=127.0.0.1:1", "token_file=/nonexistent"], "No such file"),
    ],
)
def test_wrong_arguments_of_a_worker_are_refused(arguments, message):
    done = ringmaster("worker", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_worker_without_a_server_gives_up_with_one_line():
    process = worker("server=127.0.0.1:1", "patience_seconds=1", RINGMASTER_TOKEN="x")
    _, errors = process.communicate()
    assert process.returncode == 1
    assert errors.strip() == "ringmaster worker: no server at 127.0.0.1:1 (Connection refused), for 1 s"


def test_a_port_in_use_is_reported(tmp_path):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with Run(tmp_path / "run", f"server.port={port}") as run:
            code, _, errors = run.wait()
    assert code == 2
    assert f"server.port={port} cannot be listened on" in errors
    assert "Traceback" not in errors


def test_a_stopped_run_is_resumed(tmp_path, capsys):
    """It is resumed with a larger budget. Its weights are kept, and the whole replays as one run."""
    directory = tmp_path / "run"
    with Run(directory, "method=rennala", "method.batch=3", "budget.updates=40") as run:
        first = check_finished(run)
    (directory / "token").unlink()  # as in a copy without secrets
    with Run(directory, f"resume={directory}", "budget.updates=70", "cluster.workers=2") as run:
        second = check_finished(run)
    assert len((directory / "token").read_text()) >= 32
    assert (first["updates"], second["updates"]) == (40, 70)
    assert second["terms"] == 2
    assert second["seconds"] > first["seconds"]
    assert second["num_workers"] == 5
    assert run.arrivals()[0]["version"] == 0
    best = min(row.evaluation["gap"] for row in RunFiles(directory).metrics())
    assert second["best_value"] == best
    capsys.readouterr()
    assert main(["eval", str(directory), "checkpoint=best"]) == 0
    shown = f"best.safetensors ({second['best_version']} updates): gap {best:.4f}"
    assert capsys.readouterr().out.startswith(shown)  # the weights in the file have that gap
    exported = ringmaster("export", directory, tmp_path / "weights")
    assert "50 parameters after 70 updates" in exported.stdout, exported.stderr
    weights, final = load_file(tmp_path / "weights"), load_file(directory / "final.safetensors")
    assert torch.equal(weights["x"], final["x"])
    with safe_open(tmp_path / "weights", framework="pt") as file:
        assert file.metadata()["version"] == "70"


def test_the_memory_of_the_server_does_not_grow(tmp_path):
    """It does not grow over 1,500 updates after the first thousand. With large iterates the server and a
    worker hold only what they need."""
    with Run(tmp_path / "run", "cluster.profile=none", "problem.dim=2000", "budget.updates=2500") as run:
        until(lambda: run.version() > 1000, "the first thousand")
        early, server = resident_bytes(run.server()), run.server()
        late = early
        while run.version() < 2400 and run.process.poll() is None:
            late = resident_bytes(server) or late
        summary = check_finished(run)
    assert summary["updates"] == 2500
    assert late - early < 10e6, f"it grew by {(late - early) / 1e6:.1f} MB"

    big, size = ["cluster.profile=none", "problem.dim=1000000", "checkpoint.every=null", "run.samples=1"], 8e6
    with Run(tmp_path / "big", *big, "budget.updates=200") as run:
        server, worker, most, workers_most = run.server(), until(run.workers, "a worker")[0], 0, 0
        while run.process.poll() is None:
            most, workers_most = max(most, resident_bytes(server)), max(workers_most, resident_bytes(worker))
        check_finished(run)
    iterate_momentum_scratch, snapshots, gradients, evaluation = 3, 3 + 1, 3, 3  # of three workers
    needed = (iterate_momentum_scratch + snapshots + gradients + evaluation) * size
    assert most - early < needed + 20e6, f"{(most - early) / 1e6:.0f} MB, needed {needed / 1e6:.0f}"
    # Of the sixty-odd snapshots a worker has got, and the gradients it has made, it keeps a few.
    assert workers_most - early < 25 * size, f"a worker took {(workers_most - early) / 1e6:.0f} MB"


def resident_bytes(pid):
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


@pytest.mark.parametrize(("method", "dtype", "steps"), [("ringmaster", "int8", 4), ("rennala", "bfloat16", 1)])
def test_a_narrow_wire_replays_to_the_same_bits(method, dtype, steps, tmp_path):
    """The distance of local steps travels as a gradient does."""
    wire = [f"wire.gradient_dtype={dtype}", "wire.iterate_dtype=float32", f"local.steps={steps}"]
    with Run(tmp_path / "run", f"method={method}", *METHODS[method], *wire, "budget.updates=40") as run:
        summary = check_finished(run)
    assert summary["updates"] == 40
    assert summary["final_gap"] < 100
    last = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[-1])
    received, rest = divmod(last["bytes_received"], {"bfloat16": 100, "int8": 54}[dtype])  # of 50 numbers
    assert rest == 0
    assert len(run.arrivals()) <= received <= len(run.arrivals()) + 3  # those after the end are not in the trace


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["resume=/nowhere"], "there is no run in it"),
        (["resume={run}", "method.eta=1"], "method.eta: a run is resumed as it began"),
        (["resume={run}", "method=rennala"], "method: a run is resumed as it began"),
        (["resume={run}", "budget.updatess=9"], "updatess"),
        (["resume={run}"], "has used up its budget"),
    ],
)
def test_wrong_arguments_of_resume_are_refused(overrides, message, tmp_path_factory):
    base = tmp_path_factory.getbasetemp() / "finished"
    if not (base / "summary.json").exists():
        with Run(base, "budget.updates=5", "cluster.workers=1") as run:
            check_finished(run)
    before = sorted((path.name, path.stat().st_size) for path in base.iterdir())
    done = ringmaster("train", *(o.format(run=base) for o in overrides))
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert sorted((path.name, path.stat().st_size) for path in base.iterdir()) == before


def test_a_run_under_torchrun(tmp_path):
    """Rank 0 is the server, and the other ranks are workers."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3", "-m",
        "ringmaster_dist.train", f"run.dir={tmp_path}/run", *QUICK, "method=rennala", "method.batch=2",
        "budget.updates=40",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["updates"] == 40
    assert summary["num_workers"] == 2
    assert replay(tmp_path / "run").returncode == 0


def test_torchrun_resumes_its_run_after_it_restarted_all_ranks(tmp_path):
    """With ``--max-restarts`` torchrun ends and restarts all ranks when one of them dies."""
    run = tmp_path / "run"
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3", "--max-restarts=2", "-m",
        "ringmaster_dist.train", f"run.dir={run}", *QUICK, "budget.updates=600", "checkpoint.every=20",
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        until(lambda: len(list((run / "checkpoints").glob("*"))) > 1, "there is a checkpoint")
        ranks = {pid: Path(f"/proc/{pid}/environ").read_bytes() for pid in processes_with(f"run.dir={run}")}
        server = next(pid for pid, environment in ranks.items() if b"\0RANK=0\0" in environment)
        os.kill(server, signal.SIGKILL)
        _, errors = process.communicate()
    finally:
        process.kill()
    assert process.returncode == 0, errors
    assert json.loads((run / "summary.json").read_text())["updates"] == 600
    assert len((run / "terms.jsonl").read_text().splitlines()) == 2
    assert replay(run).returncode == 0
    before = (run / "summary.json").read_text()
    other = subprocess.run([*command, "method=rennala", "budget.updates=900"], capture_output=True, text=True)
    assert other.returncode != 0  # however often torchrun tries: that is another run
    assert "already holds a run" in other.stderr
    assert (run / "summary.json").read_text() == before


def test_no_orphan_when_the_supervisor_is_killed(tmp_path):
    with Run(tmp_path / "run", *LONG) as run:
        until(lambda: run.version() > 5, "the run goes on")
        children = run.children()
        assert len(run.children("server")) == 1
        assert len(run.workers()) == 3
        run.process.kill()
        until(lambda: not any(alive(pid) for pid in children), "the children have ended")
