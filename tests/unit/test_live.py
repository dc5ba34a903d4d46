"""The table of a run that is being written, from files that grow, are cut, and grow again."""

import io
import json

from rich.console import Console

from ringmaster_dist.observe.console import LiveRun, LiveTable, print_summary
from ringmaster_dist.observe.records import Summary, WorkerSummary
from ringmaster_dist.observe.run_files import RunFiles


def line(version, worker=0, verdict="accepted", loss=1.0):
    record = {"time": float(version), "worker": worker, "sequence": version, "gradient_version": version,
              "version": version, "delay": 0, "verdict": verdict, "loss": loss, "compute_seconds": 0.5}  # fmt: skip
    return json.dumps(record) + "\n"


def test_it_follows_a_growing_file_and_one_that_was_cut(tmp_path):
    trace, terms = tmp_path / "trace.jsonl", tmp_path / "terms.jsonl"
    terms.write_text('{"term": 0}\n')
    trace.write_text("".join(line(v) for v in range(10)) + '{"time": 10.0, "wor')
    run = LiveRun(tmp_path)
    run.refresh()
    assert (run.version, run.workers[0].counts["accepted"]) == (9, 10)
    # The server came back at version 4 and has written beyond where we had read.
    trace.write_text("".join(line(v) for v in range(5)) + "".join(line(v, worker=1, loss=22.25) for v in range(5, 30)))
    run.refresh()  # in the middle of a line: nothing to see, nothing to fall over
    terms.write_text('{"term": 0}\n{"term": 1}\n')
    run.refresh()
    assert (run.workers[0].counts["accepted"], run.workers[1].counts["accepted"]) == (5, 25)
    assert run.version == 29


def test_what_cannot_be_shown_does_not_stop_anything(tmp_path, caplog):
    (tmp_path / "trace.jsonl").write_text('{"surprise": true}\n')
    table = LiveTable(tmp_path, Console(file=io.StringIO()), 100.0, 100.0)
    table._next = 0.0
    table.update()
    table.update()
    assert caplog.text.count("cannot be shown") == 1
    table.close()


def test_a_terminal_gets_a_table_that_fits(tmp_path):
    (tmp_path / "trace.jsonl").write_text(
        "".join(line(v, v % 3, "stale" if v % 5 == 0 else "accepted") for v in range(30))
    )
    screen = io.StringIO()
    table = LiveTable(tmp_path, Console(file=screen, force_terminal=True, width=80, height=40), 60.0, 1000.0)
    table._next = 0.0
    table.update()
    table.close()
    assert "48%" in screen.getvalue()
    assert "s/gradient" in screen.getvalue()
    assert "accepted 80%" in screen.getvalue()


def test_a_terminal_of_20_columns_breaks_nothing(tmp_path):
    (tmp_path / "trace.jsonl").write_text("".join(line(v, v % 3) for v in range(30)))
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=20, height=10)
    table = LiveTable(tmp_path, console, 60.0, 1000.0)
    table._next = 0.0
    table.update()
    table.close()
    assert "48%" in screen.getvalue()
    (tmp_path / "metrics.jsonl").write_text('{"time": 0.0, "version": 0, "loss": 2.0}\n')
    worker = WorkerSummary(accepted=1, base_seconds=0.1)
    summary = Summary("ringmaster", clock="real", num_workers=1, profile="linear", updates=1, seconds=1.0, pushes=1,
                      accepted=1, evaluation={"loss": 1.0, "bits_per_byte": 0.5}, per_worker={"0": worker})  # fmt: skip
    print_summary(console, RunFiles(tmp_path), summary)
    assert "loss: 2 -> " in screen.getvalue()
    assert "bits per byte 0.5" in screen.getvalue()
    assert "trace.jsonl" in screen.getvalue()
