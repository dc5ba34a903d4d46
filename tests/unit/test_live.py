"""The table of a run that is being written, from files that grow, are cut, and grow again."""

import io
import json

from rich.console import Console

from ringmaster_dist.observe.closing import print_summary
from ringmaster_dist.observe.console import LiveRun, LiveTable
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


def member(worker, slot, event="join", **more):
    return json.dumps({"worker": worker, "event": event, "pushes": 0, "slot": slot, "device": "cpu", **more}) + "\n"


def test_a_restarted_worker_is_one_row_and_stopped_work_is_shown(tmp_path):
    (tmp_path / "members.jsonl").write_text(member(0, 0) + member(1, 1) + member(1, 1, "leave") + member(2, 1))
    (tmp_path / "trace.jsonl").write_text(line(1, 0) + line(2, 1) + line(3, 2))
    per_worker = {str(worker): {"interrupted": 40 + worker, "rows": 3} for worker in range(3)}
    row = {"time": 3.0, "version": 3, "used_seconds": 3.0, "wasted_seconds": 1.0, "per_worker": per_worker}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    screen = io.StringIO()
    console = Console(file=screen, width=100)
    table = LiveTable(tmp_path, console, 60.0, 1000.0)
    table._run.refresh()
    console.print(table._render())
    lines = [text.split() for text in screen.getvalue().splitlines()]
    assert [words[:7] for words in lines if words and words[0] in ("0", "1", "2")] == [
        ["0", "0.500", "3", "1", "0", "0", "40"],  # rows, then accepted, stale, invalid, stopped
        ["1", "0.500", "3", "2", "0", "0", "83"],
    ]
    assert "wasted compute 25%" in screen.getvalue()


def test_a_slot_is_gone_when_no_live_worker_has_it(tmp_path):
    members = tmp_path / "members.jsonl"
    members.write_text(member(0, 0) + member(1, 1) + member(2, 1) + member(1, 1, "leave"))  # the lease ends later
    run = LiveRun(tmp_path)
    run.refresh()
    assert [run.workers[slot].is_gone for slot in (0, 1)] == [False, False]
    with members.open("a") as file:
        file.write(member(2, 1, "leave"))
    run.refresh()
    assert [run.workers[slot].is_gone for slot in (0, 1)] == [False, True]


def test_joins_and_leaves_are_told_once(tmp_path):
    (tmp_path / "terms.jsonl").write_text("{}\n")
    (tmp_path / "members.jsonl").write_text(member(0, 0, host="old"))  # an earlier start has told it
    screen = io.StringIO()
    table = LiveTable(tmp_path, Console(file=screen, width=200), 60.0, 1000.0, awaited=2)
    (tmp_path / "address").write_text("10.0.0.1:29400")
    with (tmp_path / "members.jsonl").open("a") as file:
        file.write(member(1, 1, host="far", device_title="CPU") + member(0, 0, "leave", why="lost its lease"))
    for _ in range(2):
        table._next = 0.0
        table.update()
    assert screen.getvalue().splitlines()[:4] == [
        "the server listens at 10.0.0.1:29400; a worker joins with",
        f"  ringmaster worker server=10.0.0.1:29400 token_file={tmp_path}/token",
        "worker-1 joined from far, computes on cpu (2 of 2)",
        "worker-0 lost its lease (1 of 2)",
    ]
    assert screen.getvalue().count("joined") == 1
    with (tmp_path / "members.jsonl").open("a") as file:
        file.write(member(1, 1, "leave"))
    (tmp_path / "address").unlink()
    table.close()  # sooner than the next refresh
    assert screen.getvalue().splitlines()[-1] == "worker-1 left (0 of 2)"


def test_the_closing_table_is_measured_and_says_how_to_resume(tmp_path):
    (tmp_path / "config.yaml").write_text(
        "{method: {}, problem: {target: 'own:make'}, cluster: {}, local: {steps: 8}, checkpoint: {mirror: 's3://b'}}"
    )
    (tmp_path / "members.jsonl").write_text(member(0, 0) + member(1, 0))
    first = WorkerSummary(accepted=3, base_seconds=9.0, gradient_seconds=1.0, interrupted=2, device="cpu")
    second = WorkerSummary(accepted=1, base_seconds=9.0, gradient_seconds=2.0, device="cpu")
    summary = Summary("ringmaster", clock="real", num_workers=2, profile="none", ended="stopped by the user",
                      per_worker={"0": first, "1": second})  # fmt: skip
    screen = io.StringIO()
    print_summary(Console(file=screen, width=200), RunFiles(tmp_path), summary)
    shown = screen.getvalue()
    assert "on 1 real worker (1 restarted), each at its own speed" in shown
    assert "s/push is the measured time of 8 local steps" in shown
    assert (
        f"stopped early by you; continue with ringmaster train resume={tmp_path} target=own:make checkpoint.mirror=s3://b"
        in shown
    )
    row = next(text.split() for text in shown.splitlines() if " cpu " in text)
    assert row[:6] == ["0", "cpu", "1.25", "4", "0", "2"]
