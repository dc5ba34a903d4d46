"""The records of a run: they are written as ever, and read whatever version wrote them."""

import json
import math

import numpy as np
import pytest

from ringmaster_dist.observe.measures import UpdateTimes, quantile
from ringmaster_dist.observe.records import Arrival, MetricsRow, Summary, WorkerRow, WorkerSummary
from ringmaster_dist.observe.run_directory import RunDirectory
from ringmaster_dist.observe.run_files import RunDirectoryError, RunFiles
from ringmaster_dist.protocol import Receipt, Verdict
from ringmaster_dist.simulation.replay import on_accelerators

LINE = ('{"time": 1.5, "worker": 2, "sequence": 3, "gradient_version": 4, "version": 6, "delay": 2, '
        '"verdict": "stale", "loss": null, "compute_seconds": 0.1')  # fmt: skip


@pytest.fixture
def directory(tmp_path):
    return RunDirectory(str(tmp_path / "run"), name="x")


@pytest.mark.parametrize(
    ("extra", "text"), [((), "}"), ((1,), ', "term": 1}'), ((1, 9), ', "term": 1, "lost_version": 9}')]
)
def test_an_arrival_is_written_and_read_back(directory, extra, text):
    trace = directory.open_trace()
    trace.arrival(1.5, 2, 3, 4, Receipt(Verdict.STALE, 2, 6, 6), math.nan, 0.1, *extra)
    trace.close()
    assert directory.read("trace.jsonl") == LINE + text
    assert directory.arrivals() == [Arrival(1.5, 2, 3, 4, 6, 2, Verdict.STALE, None, 0.1, *extra)]
    assert directory.last_version() == 6


def test_a_simulated_row_has_its_keys_and_a_real_one_has_nulls():
    simulated = MetricsRow(1.0, 2, {"time": math.inf, "gap": 0.5}, threshold=3, accepted=2)
    assert json.dumps(simulated.to_json()) == (
        '{"time": 1.0, "gap": 0.5, "version": 2, "evaluation": {"time": null, "gap": 0.5}, "threshold": 3, '
        '"accepted": 2, "stale": 0, "invalid": 0, "diverged": false}'
    )
    real = MetricsRow(1.0, 2, workers=1, per_worker={"0": WorkerRow(accepted=2, tau=0.5)}).to_json()
    assert (real["train_loss"], real["threshold"], real["per_worker"]["0"]["tau"]) == (None, None, 0.5)
    assert not {"evaluation", "delay_mean", "queue_seconds", "gradient_norm"} & real.keys()
    assert MetricsRow.from_json(real).to_json() == real


def test_older_rows_and_keys_of_others_are_read(directory):
    (directory.path / "metrics.jsonl").write_text('{"time": 1, "version": 2, "loss": 3.0, "colour": "red"}\n{"time": 2')
    (row,) = directory.metrics()
    assert (row.version, row.evaluation, row.diverged) == (2, {"loss": 3.0}, False)
    (directory.path / "summary.json").write_text('{"updates": 7, "final_gap": null, "per_worker": {"1": {"stale": 3}}}')
    summary = directory.outcome()
    assert (summary.updates, summary.evaluation, summary.version_of_program) == (7, {"gap": None}, "")
    assert summary.per_worker == {"1": WorkerSummary(stale=3)}


def test_a_summary_is_read_as_it_was_written(directory):
    summary = Summary("rennala", updates=3, evaluation={"loss": 1.5}, per_worker={"0": WorkerSummary(accepted=3)})
    directory.write_summary(summary)
    assert directory.summary() == summary
    assert "terms" not in summary.to_json()  # of a simulation


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("trace.jsonl", LINE + "}\n" + LINE, "line 2 is not JSON"),  # of a run that has ended
        ("terms.jsonl", '{"term": 0}\n', "line 1 is not a record"),
        ("metrics.jsonl", '{"time": "late", "version": 1}\n', "line 1 is not a record"),
        ("members.jsonl", "[1, 2]\n", "line 1 is not a record"),
    ],
)
def test_a_damaged_line_is_named_in_one_line(directory, name, text, words):
    (directory.path / name).write_text(text)
    files = RunFiles(directory.path, complete=True)
    with pytest.raises(RunDirectoryError, match=words) as error:
        {"trace.jsonl": files.arrivals, "terms.jsonl": files.terms, "metrics.jsonl": files.metrics,
         "members.jsonl": files.members}[name]()  # fmt: skip
    assert "\n" not in str(error.value)
    assert RunFiles(directory.path, tolerant=True).metrics() == []


@pytest.mark.parametrize("pieces", [1, 2, 7])
def test_the_parts_of_a_delay_do_not_depend_on_when_they_are_asked_for(pieces):
    """An update is made by every second accepted gradient; each gradient took 2.5 s."""
    times, versions = np.arange(1.0, 15.0), np.arange(14) // 2
    accepted, delays = np.ones(14, dtype=bool), np.minimum(np.arange(14) // 2, 3)
    decided, found = UpdateTimes(), []
    for mine in np.array_split(np.arange(14), pieces):
        decided.add(times[mine], versions[mine], accepted[mine])
        found += decided.computing_part(times[mine], versions[mine], delays[mine], np.full(len(mine), 2.5)).tolist()
    made = [2.0 * version for version in range(1, 7)]
    assert found == [
        min(sum(now - 2.5 < at <= now - 1.0 for at in made), delay)
        for now, delay in zip(times, delays.tolist(), strict=True)
    ]


def test_a_quantile_is_one_of_the_values():
    assert [quantile([1, 2, 3, 10], fraction) for fraction in (0.0, 0.5, 0.75, 0.95, 1.0)] == [1, 2, 3, 10, 10]


def test_a_replay_names_the_accelerators_that_the_members_had(tmp_path):
    """A line of an older version says nothing about devices."""
    path = tmp_path / "members.jsonl"

    def explained(*devices):
        lines = [{"worker": w, "event": e, "pushes": 0, "slot": w, **d} for w, d in enumerate(devices)
                 for e in ("join", "leave")]  # fmt: skip
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return on_accelerators(RunFiles(tmp_path).members())

    cpu, h100 = {"device": "cpu", "device_title": "CPU"}, {"device": "cuda:0", "device_title": "NVIDIA H100"}
    assert explained(cpu, h100, {}).startswith("worker 1 computed on cuda:0 (NVIDIA H100), and the replay ")
    assert explained(*[h100] * 6).count("NVIDIA") == 4
    assert "(and 2 more on accelerators)" in explained(*[h100] * 6)
    assert "workers on an accelerator, on another kind of CPU" in explained(cpu, {})
    assert "accelerator" not in explained(cpu, cpu)
