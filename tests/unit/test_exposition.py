"""/metrics, read by a strict parser of Prometheus' text format, and the conditions of /healthz."""

import json
import os
import re
import time

import pytest

from ringmaster_dist.observe.exposition import exposition, health
from ringmaster_dist.observe.run_files import Recording
from tests.unit.test_report import ARRIVALS, make

_NAME, _LABEL = r"[a-zA-Z_:][a-zA-Z0-9_:]*", r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\\\|\\"|\\n)*"'
_SAMPLE = re.compile(rf"({_NAME})(?:\{{({_LABEL}(?:,{_LABEL})*)\}})? (NaN|[+-]Inf|[-+0-9.e]+)")


def parsed(text):
    """The samples by name and labels. Each family has its help and type before its samples, once."""
    assert text.endswith("\n")
    found, helped, kinds = {}, set(), {}
    for line in text.splitlines():
        if line.startswith("# HELP "):
            name = line.split(" ")[2]
            assert name not in helped
            helped.add(name)
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name in helped
            assert name not in kinds
            assert kind == ("counter" if name.endswith("_total") else "gauge")
            kinds[name] = kind
        else:
            whole = _SAMPLE.fullmatch(line)
            assert whole, line
            name, labels, value = whole.groups()
            assert name == list(kinds)[-1]  # a family is not interrupted
            pairs = re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', labels or "")
            unescaped = {key: re.sub(r"\\(.)", lambda m: {"n": "\n"}.get(m[1], m[1]), text) for key, text in pairs}
            assert len(unescaped) == len(pairs)
            key = (name.removeprefix("ringmaster_"), *unescaped.values())
            assert key not in found
            found[key] = float(value)
    assert helped == kinds.keys()
    return found


def row(time, **more):
    return {"time": time, "version": 4, "workers": 2, "threshold": 3, "bytes_received": 10, "bytes_sent": 20, **more}


def members(directory, *events):
    lines = [json.dumps({"worker": worker, "event": event, "pushes": 0, "slot": 0}) for worker, event in events]
    (directory / "members.jsonl").write_text("".join(line + "\n" for line in lines))


def age(directory, seconds):
    for path in directory.iterdir():
        os.utime(path, (time.time() - seconds, time.time() - seconds))


def test_every_figure_of_a_small_run(tmp_path):
    per_worker = {"0": {"accepted": 3, "rows": 5}, "1": {"accepted": 1, "interrupted": 7}, "2": {"invalid": 1}}
    run = make(tmp_path / "run", metrics=[row(6.0, loss=1.5, per_worker=per_worker)])
    members(run, (0, "join"), (1, "join"), (2, "join"), (2, "leave"))
    (run / "checkpoints").mkdir()
    (run / "checkpoints/a.safetensors").touch()
    age(run / "checkpoints", 50)
    found = parsed(exposition(Recording(run), time.time()))
    assert found["info", "run", "ringmaster", "quadratic"] == 1
    assert found["updates",] == found["version",] == 4
    assert found["evaluation", "loss"] == 1.5
    assert found["train_loss",] == 2.5
    assert [found["gradients", "1", kind] for kind in ("accepted", "stale", "invalid", "stopped")] == [1, 1, 0, 7]
    assert found["delay_updates", "max"] == 3
    assert found["delay_updates", "mean"] == pytest.approx(4 / 6)
    assert found["threshold_updates",] == 3
    assert found["workers",] == 2
    assert (found["received_bytes_total",], found["sent_bytes_total",]) == (10, 20)
    assert found["checkpoint_age_seconds",] == pytest.approx(50, abs=5)
    assert found["healthy",] == 1


def test_names_that_others_choose_cannot_break_the_format(tmp_path):
    hostile = 'a"} 1\nringmaster_updates 99\\'
    run = make(tmp_path / "run", metrics=[row(6.0, evaluation={hostile: 2.0, "loss": 1.0})])
    renamed = run.rename(tmp_path / 'run"}\n\\')
    found = parsed(exposition(Recording(renamed), time.time()))
    assert found["evaluation", hostile] == 2.0
    assert found["updates",] == 4
    assert 'run"}\n\\' in next(key for key in found if key[0] == "info")


@pytest.mark.parametrize(
    ("case", "good", "reason"),
    [
        ({}, True, "the run makes progress"),
        ({"arrivals": [], "seconds": 0.0, "events": (), "quiet": 9999}, True, "waits for its first workers"),
        ({"events": ("join", "leave"), "quiet": 100}, True, "the server waits for workers"),
        ({"events": ("join", "leave"), "quiet": 400}, False, "no sign of life for 400 s"),
        ({"quiet": 290}, True, "the run makes progress"),
        ({"quiet": 400}, False, "no accepted gradient for 400 s"),
        ({"quiet": 400, "arrivals": [(1000.0, 0, 0, 0, 0, "accepted", 1.0, 900.0)]}, True, "the run makes progress"),
        (
            {"old": 900, "arrivals": [*ARRIVALS, (506.0, 0, 3, 4, 4, "stale", 1.0, 1.0)]},
            False,
            "accepted gradient for 500",
        ),
        ({"at_work": False}, False, "no server is at work"),
        ({"at_work": False, "summary": {"ended": "budget"}}, True, "finished"),
        ({"at_work": False, "summary": {"ended": "diverged", "diverged": True}}, False, "diverged"),
    ],
)
def test_health_by_what_the_run_does(case, good, reason, tmp_path, monkeypatch):
    """``quiet``: nothing was written for so long. ``old``: nothing but the trace."""
    monkeypatch.setattr(Recording, "is_running", case.get("at_work", True))
    files = {"arrivals": case.get("arrivals", ARRIVALS), "summary": case.get("summary")}
    run = make(tmp_path / "run", metrics=[row(case.get("seconds", 6.0))], **files)
    members(run, *((0, event) for event in case.get("events", ("join",))))
    age(run, case.get("quiet", 0) or case.get("old", 0))
    if "old" in case:
        os.utime(run / "trace.jsonl")
    found = health(Recording(run), time.time())
    assert found.good is good
    assert reason in found.reason
