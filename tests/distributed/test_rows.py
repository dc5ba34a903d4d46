"""Rows by speed in real processes: unequal, across a lost server and a lost worker, and replayed to the same bits."""

import json
import os
import signal

import pytest

from ringmaster_dist.algorithm.methods import Method
from ringmaster_dist.algorithm.rows import RowsBySpeed
from ringmaster_dist.algorithm.schedules import Constant
from ringmaster_dist.simulation.forecast import forecast
from tests.distributed.processes import LONG, Run, check_finished, overlapping, recompute, until

MODEL = """
import torch
from torch import nn
from ringmaster_dist.problems.module import ModuleProblem

def batches(seed, worker, sequence, rows):
    draw = torch.Generator().manual_seed(hash((seed, worker, sequence)) % 2**60)
    return [torch.randn(rows, 5, generator=draw)]

def loss(model, batch):
    return (model(batch) - batch[:, :1].sin() - 4).square().mean()

def factory(seed, device):
    return ModuleProblem(nn.Linear(5, 1), batches, loss, device=device, batch=8)
"""


@pytest.fixture
def given(tmp_path, monkeypatch):
    (tmp_path / "rowed.py").write_text(MODEL)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.syspath_prepend(tmp_path)
    return ["problem=python", "problem.target=rowed:factory", "cluster.workers=4", "cluster.batch=auto",
            "method.threshold=16", "run.report=false", f"run.dir={tmp_path}/run", "resume=auto"]  # fmt: skip


def test_rows_by_speed_replay_across_a_lost_server_and_a_lost_worker(given, tmp_path):
    """The rows of a reply are those of the gradient after the one that is computed meanwhile. The wire is int8."""
    given += ["worker.overlap=true", "wire.gradient_dtype=int8", "cluster.unit_seconds=0.02", "checkpoint.every=10"]
    with Run(tmp_path / "run", *given, *LONG) as run:
        until(lambda: run.version() > 30 and run.checkpoints(0), "the run goes on")
        os.kill(run.server(), signal.SIGKILL)
        until(lambda: len(run.terms()) == 2 and run.version() > run.terms()[1]["version"] + 20, "it goes on again")
        os.kill(run.workers()[0], signal.SIGKILL)
        until(lambda: len(run.joined()) >= 5 and run.version() > run.terms()[1]["version"] + 60, "a worker is back")
        until(lambda: overlapping(run.arrivals()) > 20, "workers compute while they push")
        run.process.send_signal(signal.SIGINT)
        summary = check_finished(run)
    recorded = tmp_path / "run/rows.jsonl"
    changes = [json.loads(line) for line in recorded.read_text().splitlines()]
    assert {change["rows"] for change in changes} >= {8, 4}
    assert all(change["reason"] for change in changes)
    assert len({arrival["rows"] for arrival in run.arrivals()[-40:]}) >= 3  # 8, 4, 3 and 2 rows
    assert {worker["rows"] for worker in summary["per_worker"].values()} >= {8, 4}
    recorded.write_text(recorded.read_text().replace('"rows": 8', '"rows": 7', 1))
    assert "other rows" in recompute(tmp_path / "run").message


@pytest.mark.alone
def test_a_forecast_of_rows_by_speed_agrees_with_the_real_run(given, tmp_path):
    with Run(tmp_path / "run", *given, "cluster.unit_seconds=0.32", "budget.seconds=8") as run:
        summary = check_finished(run)
    first, *later = [arrival["time"] for arrival in run.arrivals()]  # from when the workers have made their models
    times = [0.32 * (1 + i) for i in range(4)]
    expected = forecast(times, Method(Constant(0.1, 0.1, 16)), jitter=0.05, interrupt=True, horizon_seconds=100.0,
                        rows=RowsBySpeed(8, 1, 8))  # fmt: skip
    assert expected.rows == [8, 4, 3, 2]
    assert len(later) / (later[-1] - first) == pytest.approx(expected.updates_per_second, rel=0.1)
    assert summary["wasted_fraction"] < 0.05
