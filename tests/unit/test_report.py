"""The report of traces written by hand, for which every number is known."""

import json
import time

import pytest

from ringmaster_dist.config.compose import compose
from ringmaster_dist.config.describe import annotated
from ringmaster_dist.observe import run_files
from ringmaster_dist.observe.page_data import labels, page_data
from ringmaster_dist.observe.report import page, write_report
from ringmaster_dist.observe.run_directory import RunDirectory
from ringmaster_dist.observe.run_files import Recording, RunDirectoryError

# Worker 0 is quick; worker 1 is stopped once and is late once; worker 2 sends nonsense.
ARRIVALS = [
    # time, worker, sequence, version, delay, verdict, loss, compute_seconds
    (1.0, 0, 0, 0, 0, "accepted", 4.0, 1.0),
    (2.0, 0, 1, 1, 0, "accepted", 3.0, 0.75),
    (3.0, 0, 2, 2, 0, "accepted", 2.0, 1.0),
    (4.0, 1, 1, 3, 3, "stale", 5.0, 2.5),
    (5.0, 2, 0, 3, 1, "invalid", None, 1.0),
    (6.0, 1, 2, 3, 0, "accepted", 1.0, 2.0),
]


def line(time, worker, sequence, version, delay, verdict, loss, compute_seconds):
    return json.dumps({"time": time, "worker": worker, "sequence": sequence, "gradient_version": version - delay,
                       "version": version, "delay": delay, "verdict": verdict, "loss": loss,
                       "compute_seconds": compute_seconds}) + "\n"  # fmt: skip


def make(directory, *overrides, arrivals=ARRIVALS, metrics=(), summary=None, name="train"):
    directory.mkdir(parents=True)
    (directory / "config.yaml").write_text(annotated(compose(overrides, name)))
    (directory / "trace.jsonl").write_text("".join(line(*arrival) for arrival in arrivals))
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    if summary is not None:
        (directory / "summary.json").write_text(json.dumps(summary))
    return directory


def test_every_figure_of_a_small_run(tmp_path):
    (run,) = page_data([Recording(make(tmp_path / "run"))])["runs"]
    totals = run["totals"]
    assert [totals[key] for key in ("updates", "accepted", "stale", "invalid", "interrupted")] == [4, 4, 1, 1, 1]
    assert totals["wasted_fraction"] == pytest.approx(3.5 / (4.75 + 3.5))
    assert run["training"]["value"] == [4.0, 3.0, 2.0, 1.0]
    assert run["training"]["updates"] == [1, 2, 3, 4]
    assert run["delays"]["accepted"] == [4, 0, 0, 0]
    assert run["delays"]["stale"] == [0, 0, 0, 1]
    assert run["delays"]["invalid"] == [0, 1, 0, 0]
    # Of the delay of 3, two updates were made in the 2.5 s of computing, one before; the 1 of worker 2 before, too.
    assert run["delays"]["parts"] == pytest.approx({"compute": 2 / 6, "queue": 2 / 6})
    assert [(w["worker"], w["share"], w["interrupted"]) for w in run["workers"]] == [
        (0, 0.75, 0),
        (1, 0.25, 1),
        (2, 0, 0),
    ]
    assert run["workers"][1]["tau"] == pytest.approx(2.25)


def test_the_timeline_adds_up(tmp_path):
    shown = page_data([Recording(make(tmp_path / "run"))])
    kinds, timeline = shown["kinds"], shown["runs"][0]["timeline"]
    width = timeline["seconds"] / len(timeline["shares"][0][0])
    seconds = [
        {kind: sum(shares) * width for kind, shares in zip(kinds, row, strict=True)} for row in timeline["shares"]
    ]
    assert seconds[0] == pytest.approx(
        {"accepted": 2.75, "stale": 0, "invalid": 0, "interrupted": 0, "waiting": 0.25}, abs=0.02
    )
    assert seconds[1] == pytest.approx(
        {"accepted": 2, "stale": 2.5, "invalid": 0, "interrupted": 1.5, "waiting": 0}, abs=0.02
    )
    spans = [(begin, end, kinds[kind]) for row, begin, end, kind in timeline["close"]["spans"] if row == 1]
    assert spans == [(1.0, 1.5, "interrupted"), (1.5, 4.0, "stale"), (4.0, 6.0, "accepted")]


def test_tokens_follow_each_worker_s_rows(tmp_path):
    overrides = ["problem=nanochat", "cluster.batch=[8,2]", "model.sequence_len=10"]
    (run,) = page_data([Recording(make(tmp_path / "run", *overrides))])["runs"]
    assert run["training"]["tokens"] == [80, 160, 240, 260]
    assert run["totals"]["tokens"] == 260


def test_runs_are_named_by_what_differs(tmp_path):
    a = make(tmp_path / "a", "method.eta=0.1")
    b = make(tmp_path / "b", "method=rennala", "method.eta=0.1", "cluster.workers=7")
    c = make(tmp_path / "c", "method.eta=0.1")
    assert labels([Recording(a)]) == ["a"]
    assert labels([Recording(a), Recording(b)]) == [
        "method=ringmaster, threshold=auto, workers=4", "method=rennala, batch=8, workers=7"]  # fmt: skip
    assert [text.partition(":")[0] for text in labels([Recording(a), Recording(c)])] == ["a", "c"]


def test_a_trace_is_read_further_and_from_the_start_when_it_was_cut(tmp_path, monkeypatch):
    monkeypatch.setattr(run_files, "_BLOCK_BYTES", 300)  # lines lie across blocks
    directory = make(tmp_path / "run")
    path = directory / "trace.jsonl"
    whole = path.read_text()
    path.write_text(whole + '{"time": 7.0, "wor')
    recording = Recording(directory)
    assert recording.trace["time"].tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    path.write_text(whole + line(7.0, 0, 3, 4, 0, "accepted", 1.0, 1.0))
    recording.refresh()
    assert recording.trace["time"].tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    path.write_text(whole.splitlines(keepends=True)[0])
    recording.refresh()
    assert recording.trace["verdict"].tolist() == [0]


def test_the_report_says_whether_a_run_is_in_progress_crashed_or_finished(tmp_path):
    going = Recording(make(tmp_path / "going"))
    assert going.state == "running"
    import os

    for name in ("trace.jsonl", "metrics.jsonl"):
        os.utime(tmp_path / "going" / name, (time.time() - 100, time.time() - 100))
    assert going.state == "ended without a summary"
    assert Recording(make(tmp_path / "done", summary={"ended": "budget"})).state == "finished"


def test_a_run_without_a_trace_shows_its_metrics(tmp_path):
    rows = [{"time": float(t), "version": 10 * t, "gap": 5.0 - t, "accepted": 10 * t, "stale": t, "invalid": 0}
            for t in range(4)]  # fmt: skip
    (run,) = page_data([Recording(make(tmp_path / "run", arrivals=[], metrics=rows))])["runs"]
    assert run["objective"] == "gap"
    assert run["evaluation"]["value"] == [5.0, 4.0, 3.0, 2.0]
    assert run["over_time"]["accepted"] == pytest.approx([10 / 11] * 3)
    assert run["totals"]["updates"] == 30
    assert len(write_report([tmp_path / "run"], tmp_path / "out")) == 4


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (None, "is not a directory"),
        ({}, "no config.yaml"),
        ({"config.yaml": "a: [1"}, "not the configuration"),
        ({"config.yaml": "title: my notes"}, "not the configuration"),
        ({"config.yaml": True}, "nothing to show yet"),
        ({"config.yaml": True, "trace.jsonl": "", "metrics.jsonl": ""}, "nothing to show yet"),
        ({"config.yaml": True, "trace.jsonl": '{"time": 1.0, "wor'}, "nothing to show yet"),
        ({"config.yaml": True, "trace.jsonl": "hello\n"}, "line 1 is not JSON"),
        ({"config.yaml": True, "trace.jsonl": '{"epoch": 3}\n'}, "line 1 is not a record"),
        ({"config.yaml": True, "trace.jsonl": line(1.0, 0, 0, 0, 0, "maybe", 1.0, 1.0)}, '\'{"time": 1.0'),
    ],
)
def test_an_unreadable_run_is_reported_in_one_line(files, words, tmp_path):
    for name, text in (files or {}).items():
        (tmp_path / "run").mkdir(exist_ok=True)
        (tmp_path / "run" / name).write_text(annotated(compose([], "train")) if text is True else text)
    if files == {}:
        (tmp_path / "run").mkdir()
    with pytest.raises(RunDirectoryError) as error:
        write_report([tmp_path / "run"], tmp_path / "out")
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_what_the_server_measures_is_shown(tmp_path):
    """Of two rows only the second has norms, and worker 1 joins between them."""
    norms = {"gradient_norm": {"matrix": 3.0, "scalar": 4.0}, "update_norm": {"matrix": 1.0, "scalar": 0.0}}
    rows = [
        {"time": 2.0, "version": 1, "eta": 0.5, "memory_bytes": 7, "per_worker": {"0": {"rows": 2}}},
        {
            "time": 4.0,
            "version": 3,
            "eta": 0.25,
            "memory_bytes": None,
            **norms,
            "per_worker": {"0": {"rows": 3}, "1": {"rows": 1}},
        },
    ]
    directory = make(tmp_path / "run", "budget.updates=16", "budget.seconds=null", "method.eta=0.5", metrics=rows)
    (directory / "sample.txt").write_bytes(b"def \xff(x):\n    pass\n")
    RunDirectory.opened(directory).add_command("ringmaster train", ["run.dir=a b", "budget.updates=16"])
    (run,) = page_data([Recording(directory)])["runs"]
    assert run["measured"] == {"time": [2.0, 4.0], "eta": [0.5, 0.25], "memory_bytes": [7.0, None]}
    assert run["norms"]["gradient"] == {"all": [5.0], "matrix": [3.0], "scalar": [4.0]}
    assert run["norms"]["time"] == [4.0]
    assert run["rows"]["lines"] == [
        {"label": "worker 0", "value": [2.0, 3.0]},
        {"label": "worker 1", "value": [None, 1.0]},
    ]
    assert run["progress"] == {"fraction": 0.25, "seconds_left": 18.0}  # four of sixteen updates took six seconds
    assert run["sample"] == "def \ufffd(x):\n    pass"
    assert run["commands"] == ["ringmaster train 'run.dir=a b' budget.updates=16"]
    assert ["method.eta", "0.5"] in run["config"]
    assert ["budget.seconds", "null"] in run["config"]
    assert page_data([Recording(make(tmp_path / "over", summary={"ended": "budget"}))])["runs"][0]["progress"] is None


def test_a_long_run_gives_a_small_page(tmp_path):
    many = [(0.01 * i, i % 7, i // 7, i, i % 5, "accepted", 1.0 + 1.0 / (i + 1), 0.06) for i in range(60_000)]
    text = page(page_data([Recording(make(tmp_path / "run", arrivals=many))]))
    assert len(text) < 200_000
    assert "60000" in text


def test_nothing_in_a_run_can_break_out_of_the_page(tmp_path):
    directory = make(tmp_path / "run<script>alert(1)<", "data.path='</script><b>'", "problem=nanochat", "data=text")
    text = page(page_data([Recording(directory)]))
    assert text.count("<script") == 2
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in text


def test_a_threshold_far_above_all_delays_is_not_drawn(tmp_path):
    """It would hide the delays, of which the largest is 3. One near them is drawn."""
    rows = [{"time": float(at), "version": at, "threshold": value} for at, value in ((1, 2.0), (2, 9.0), (3, 10.0))]
    (run,) = page_data([Recording(make(tmp_path / "run", metrics=rows))])["runs"]
    assert run["threshold"]["value"] == [2.0, 9.0]
