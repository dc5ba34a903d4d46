"""The view of a run that goes on, from files that grow, are cut, and grow again."""

import io
import json

from rich.console import Console

from ringmaster_dist.observe.console import print_summary
from ringmaster_dist.observe.live import State, View


def line(version, worker=0, verdict="accepted", loss=1.0):
    record = {"time": float(version), "worker": worker, "sequence": version, "gradient_version": version,
              "version": version, "delay": 0, "verdict": verdict, "loss": loss, "compute_seconds": 0.5}  # fmt: skip
    return json.dumps(record) + "\n"


def test_it_follows_a_growing_file_and_one_that_was_cut(tmp_path):
    trace, terms = tmp_path / "trace.jsonl", tmp_path / "terms.jsonl"
    terms.write_text('{"term": 0}\n')
    trace.write_text("".join(line(v) for v in range(10)) + '{"time": 10.0, "wor')
    state = State(tmp_path)
    state.look()
    assert (state.version, state.workers[0]["accepted"]) == (9, 10)
    # The server came back at version 4 and has gone on beyond where we had read.
    trace.write_text("".join(line(v) for v in range(5)) + "".join(line(v, worker=1, loss=22.25) for v in range(5, 30)))
    state.look()  # in the middle of a line: nothing to see, nothing to fall over
    terms.write_text('{"term": 0}\n{"term": 1}\n')
    state.look()
    assert (state.workers[0]["accepted"], state.workers[1]["accepted"]) == (5, 25)
    assert state.version == 29


def test_what_cannot_be_shown_does_not_stop_anything(tmp_path, caplog):
    (tmp_path / "trace.jsonl").write_text('{"surprise": true}\n')
    view = View(tmp_path, Console(file=io.StringIO()), 100.0, 100.0)
    view._next = 0.0
    view.update()
    view.update()
    assert caplog.text.count("cannot be shown") == 1
    view.close()


def test_a_terminal_gets_a_table_that_fits(tmp_path):
    (tmp_path / "trace.jsonl").write_text(
        "".join(line(v, v % 3, "stale" if v % 5 == 0 else "accepted") for v in range(30))
    )
    screen = io.StringIO()
    view = View(tmp_path, Console(file=screen, force_terminal=True, width=80, height=40), 60.0, 1000.0)
    view._next = 0.0
    view.update()
    view.close()
    assert "48%" in screen.getvalue()
    assert "s/gradient" in screen.getvalue()
    assert "accepted 80%" in screen.getvalue()


def test_a_terminal_of_20_columns_breaks_nothing(tmp_path):
    (tmp_path / "trace.jsonl").write_text("".join(line(v, v % 3) for v in range(30)))
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=20, height=10)
    view = View(tmp_path, console, 60.0, 1000.0)
    view._next = 0.0
    view.update()
    view.close()
    assert "48%" in screen.getvalue()
    worker = {"accepted": 1, "stale": 0, "invalid": 0, "interrupted": 0, "base_seconds": 0.1, "wasted_seconds": 0.0}
    summary = {"method": "ringmaster", "num_workers": 1, "profile": "linear", "clock": "real", "final_loss": 1.0,
               "updates": 1, "final_bits_per_byte": 0.5, "seconds": 1.0, "pushes": 1, "accepted": 1, "stale": 0,
               "invalid": 0,
               "interrupted": 0, "wasted_fraction": 0.0, "synchronous_updates": 0, "per_worker": {"0": worker},
               "per_worker_omitted": 0}  # fmt: skip
    print_summary(console, summary, 2.0, tmp_path)
    assert "bits per byte 0.5" in screen.getvalue()
    assert "trace.jsonl" in screen.getvalue()
