"""The figures of metrics.jsonl, for arrivals whose figures are known."""

import math
import re
from pathlib import Path

import pytest
import torch

from ringmaster_dist.observe.metrics import Metrics
from ringmaster_dist.protocol import Interruptions, Push, Verdict
from tests.unit.test_service import LAYOUT, Stage

COUNTS = {"pipes": 3, "received": 2, "sent": 2, "refused": 2}


@pytest.fixture
def measured():
    """Two workers: a fast one, and a slow one with one interruption and one late gradient."""
    stage = Stage(method=None)
    metrics = Metrics(LAYOUT, 0, tokens_of=lambda worker: worker.accepted * (10 + worker.slot))
    stage.notes.arrival = metrics.arrival
    quick, slow = stage.session(), stage.session()
    for sequence in range(3):
        stage.wait(1.0)
        stage.service.push(quick, Push(sequence, sequence, torch.full((6,), 1.0), 4.0 - sequence, 0.75))
        stage.service.compute()
    stage.service.fetch(slow, 0, 0, Interruptions(1, 0.5))
    stage.wait(1.0)
    stage.service.push(slow, Push(1, 0, torch.ones(6), 9.0, 2.5))
    stage.service.compute()
    return stage, metrics


def test_a_row_has_every_figure(measured):
    stage, metrics = measured
    row = metrics.row(
        stage.service.measure(), {"gap": 0.5}, {"pipes": 3, "received": 7, "sent": 8, "refused": 9}
    ).to_json()
    expected = {
        "time": 4.0, "version": 3, "gap": 0.5, "accepted_loss": 2.0, "accepted": 3, "stale": 1, "invalid": 0,
        "interrupted": 1, "workers": 2, "updates_per_second": 0.75, "gradients_per_second": 1.0, "delay_mean": 0.75,
        "delay_p50": 0, "delay_p95": 3, "delay_max": 3, "delay_histogram": [(0, 3), (3, 1)], "threshold": 2,
        "eta": 0.1, "beta": 0.5, "used_seconds": 2.25, "wasted_seconds": 3.0, "tokens": 30, "queue_seconds": 0.25,
        "bytes_received": 96, "lease_losses": 0, "reconnects": 1, "tunnel_bytes_received": 7,
        "tunnel_bytes_sent": 8, "refused_peers": 9,
    }  # fmt: skip
    assert {key: row[key] for key in expected} == expected
    # Made at 1, 2 and 3 s; the late one was computed from 1.5 s on: two while computing, one before.
    assert row["delay_compute"] == pytest.approx(2 / 4)
    assert row["delay_queue"] == pytest.approx(1 / 4)
    assert row["bytes_sent"] == 24 * (2 + 1 + 3 + 1)  # joins, a fetch, answers to three accepted and a stale one
    assert row["gradient_norm"] == {"matrix": pytest.approx(math.sqrt(6))}
    assert row["update_norm"]["matrix"] > 0
    assert row["per_worker"]["1"] == {
        "accepted": 0, "stale": 1, "invalid": 0, "interrupted": 1, "tau": 2.5, "share": 0.0, "used_seconds": 0.0,
        "wasted_seconds": 3.0, "rows": 0}  # fmt: skip


def test_rates_and_delays_are_since_the_row_before(measured):
    stage, metrics = measured
    metrics.row(stage.service.measure(), {}, COUNTS)
    stage.wait(2.0)
    row = metrics.row(stage.service.measure(), {}, COUNTS).to_json()
    assert (row["updates_per_second"], row["gradients_per_second"]) == (0.0, 0.0)
    assert "delay_mean" not in row
    assert "gradient_norm" not in row


def test_a_loss_of_nan_does_not_spoil_the_smoothed_loss(measured):
    stage, metrics = measured
    session = stage.session()
    stage.service.push(session, Push(0, 3, torch.ones(6), math.nan, 0.1))
    stage.service.compute()
    row = metrics.row(stage.service.measure(), {}, COUNTS).to_json()
    assert row["accepted"] == 4
    assert math.isfinite(row["train_loss"])


def test_the_page_of_metrics_lists_them_all(measured):
    stage, metrics = measured
    row = metrics.row(stage.service.measure(), {"gap": 0.5, "loss": 1.0, "bits_per_byte": 1.0}, COUNTS).to_json()
    text = (Path(__file__).parents[2] / "docs/metrics.md").read_text()
    listed = {
        name
        for line in text.splitlines()
        if line.startswith("| `")
        for name in re.findall(r"`(\w+)`", line.split("|")[1])
    }
    assert set(row) <= listed
    assert set(row["per_worker"]["0"]) <= listed
    assert row["delay_histogram"][0][1] == 3
    assert Verdict.ACCEPTED.value in listed
