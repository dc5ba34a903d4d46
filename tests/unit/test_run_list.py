"""``ringmaster runs``: the state of each run, comparisons, and what is never removed; and multiruns."""

import fcntl
import json
import os
import re
import time

import pytest

from ringmaster_dist.cli.main import main
from ringmaster_dist.observe import report

CONFIG = """method: {name: NAME, eta: 0.1}
problem: {name: quadratic}
cluster: {workers: 4}
"""
SMALL = ["problem.dim=10", "cluster.workers=2", "budget.updates=20"]


def make(folder, method="ringmaster", *, gap=None, age=3600.0, **summary):
    """A run that has written its configuration and metrics, and its summary if there is one. It is an hour old."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(CONFIG.replace("NAME", method))
    rows = [{"time": 1.0, "version": 7, "evaluation": {"gap": 5.5}}, {"time": 2.0, "version": 9}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"time": 3.0, "ver')
    if summary:
        written = {"method": method, "problem": "quadratic", "clock": "virtual", "final_gap": gap, **summary}
        (folder / "summary.json").write_text(json.dumps(written))
    for path in folder.iterdir():
        os.utime(path, (time.time() - age,) * 2)
    return folder


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """A folder runs with one run of each state, in the working directory."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs"
    make(folder / "a", gap=3.0, ended="budget", updates=1234, seconds=60.0, age=400)
    make(folder / "sweep/0", "rennala", gap=1.0, ended="stopped by the user", updates=50, age=300)
    make(folder / "sweep/1", gap=9e9, ended="budget", diverged=True, updates=60, age=200)
    make(folder / "lost", age=100)
    make(folder / "now", age=0)
    make(folder / "torn", ended="budget", updates=1)
    (folder / "torn/summary.json").write_text('{"updates": 1')
    make(folder / "edited", gap="low", ended="budget", updates=1)
    make(folder / "broken", gap=3.0, ended="budget", updates=1)
    (folder / "broken/config.yaml").write_text("method: {name: ringm")
    (folder / "other").mkdir()
    (folder / "other/config.yaml").write_text("colour: red\n")  # another program's
    return folder


def listed(capsys, *words):
    capsys.readouterr()
    assert main(["runs", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_each_run_has_one_line_with_its_state(runs, capsys):
    found = {line["path"]: line for line in listed(capsys)}
    states = {name.removeprefix("runs/"): line["state"] for name, line in found.items()}
    assert states == {"a": "finished", "sweep/0": "stopped", "sweep/1": "diverged", "lost": "crashed",
                      "now": "running", "torn": "damaged", "edited": "damaged", "broken": "damaged"}  # fmt: skip
    lost = found["runs/lost"]
    assert (lost["updates"], lost["seconds"], lost["value"], lost["method"]) == (9, 2.0, 5.5, "ringmaster")
    assert main(["runs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(found)
    assert "runs/torn is damaged: summary.json cannot be read" in lines
    assert any(line.startswith("runs/broken is damaged: config.yaml is not the configuration") for line in lines)
    assert any(line.split()[:8] == ["runs/a", "finished", "quadratic", "ringmaster", "gap", "3", "1,234", "60.0"]
               for line in lines)  # fmt: skip


def test_runs_are_sorted_and_filtered(runs, capsys):
    def names(*words):
        return [line["path"].removeprefix("runs/") for line in listed(capsys, *words)]

    assert names("sort=loss", "limit=3") == ["sweep/0", "a", "lost"]
    assert names("sort=updates", "method=ringmaster", "limit=2") == ["a", "sweep/1"]
    assert names("method=ringmaster", "limit=2") == ["now", "lost"]  # the newest first
    assert names("state=running") == ["now"]
    assert names("runs/sweep", "sort=name") == ["sweep/0", "sweep/1"]
    assert main(["runs", "nowhere"]) == 2
    assert main(["runs", "sort=colour"]) == 2
    assert "must be one of changed" in capsys.readouterr().err


def test_a_comparison_shows_the_keys_that_differ_and_the_results(runs, capsys):
    with (runs / "a/config.yaml").open("a") as file:
        file.write("watch_port: 9400\nwatch_metrics: true\n")  # these do not change what is computed
    assert main(["runs", "compare", "runs/a", "runs/sweep/0"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["method.name", "ringmaster", "rennala"] in rows
    assert ["result", "gap", "3", "gap", "1"] in rows
    assert not any(row[:1] in (["method.eta"], ["watch_port"], ["watch_metrics"]) for row in rows)
    for words in (["runs/a"], ["runs/a", "runs/torn"], ["runs/a", "runs/other"]):
        assert main(["runs", "compare", *words]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["stat=crashed"], "there is no setting stat=; did you mean state=?"),
        (["--out", "x"], "--out has no effect with runs list; runs compare takes it"),
        (["compare", "runs/a", "runs/sweep/0", "sort=loss"], "sort= has no effect with runs compare; runs list"),
        (["remove", "runs/a", "limit=1"], "limit= has no effect with runs remove; runs list takes it"),
        (["compare", "runs/a", "runs/sweep/0", "--yes"], "--yes has no effect with runs compare; runs remove"),
    ],
)
def test_a_word_without_effect_is_refused(runs, capsys, words, said):
    assert main(["runs", *words]) == 2
    assert capsys.readouterr().err.startswith(f"ringmaster: {said}")


def test_the_page_of_a_multirun_is_not_taken_for_a_run(runs, capsys, monkeypatch):
    """A shell gives it too for runs/sweep/*. A run of this name counts, and the page alone is a mistake."""
    monkeypatch.setattr(report, "draw", lambda data, folder: [])
    (runs / "sweep/report").mkdir()
    paths = [str(path) for path in sorted((runs / "sweep").iterdir())]
    assert main(["runs", "compare", *paths]) == 0
    assert "[3]" not in capsys.readouterr().out
    assert main(["report", *paths, "--out", "out"]) == 0
    assert (runs.parent / "out/report.html").exists()
    assert main(["report", "runs/sweep/report"]) == 2
    assert "holds no run" in capsys.readouterr().err
    (runs / "sweep/report").rmdir()
    make(runs / "sweep/report", gap=3.0, ended="budget")
    assert main(["runs", "compare", *paths]) == 0
    assert "[3] runs/sweep/report" in capsys.readouterr().out.replace(f"{runs.parent}/", "")


def test_only_runs_that_are_over_are_removed_and_only_their_own_files(runs, capsys):
    (runs / "a/notes.txt").write_text("mine")
    (runs / "a/checkpoints").mkdir()
    (runs / "a/checkpoints/one").write_bytes(bytes(5000))
    held = (runs / "sweep/1/.lock").open("w")
    fcntl.flock(held, fcntl.LOCK_EX)  # as a server that is still evaluating
    for refused, reason in [("now", "is running"), ("other", "not the directory of a run"), ("sweep", "not the dir"),
                            ("sweep/1", "at work"), ("nowhere", "not the directory of a run")]:  # fmt: skip
        before = sorted(runs.rglob("*"))
        assert main(["runs", "remove", "runs/a", f"runs/{refused}", "--yes"]) == 2
        assert reason in capsys.readouterr().err
        assert sorted(runs.rglob("*")) == before
    held.close()
    assert main(["runs", "remove", "runs/a"]) == 2  # there is no terminal to ask
    assert "add --yes" in capsys.readouterr().err
    size = sum(path.stat().st_size for path in (runs / "a").rglob("*") if path.is_file()) - len("mine")
    assert main(["runs", "remove", "runs/a", "runs/sweep/0", "runs/a/", "--yes"]) == 0
    output = capsys.readouterr().out
    assert f"{size / 1000:.3g} kB in " in output
    assert "notes.txt stays" in output
    assert [path.name for path in (runs / "a").iterdir()] == ["notes.txt"]
    assert not (runs / "sweep/0").exists()


def test_a_multirun_names_its_jobs_and_ends_with_a_table_and_a_page(tmp_path, monkeypatch, capsys):
    """A job that diverges does not end it, and without run.dir its jobs have one folder."""
    monkeypatch.chdir(tmp_path)
    code = main(["simulate", "-m", *SMALL, "method=ringmaster,rennala", "method.eta=1e30,0.3"])
    assert code == 1  # two jobs have diverged
    output = capsys.readouterr().out
    assert "job 2 of 4: method=ringmaster method.eta=0.3\n" in output
    (folder,) = (tmp_path / "runs").iterdir()
    rows = output.partition("all 4 jobs\n")[2].splitlines()[1:5]
    assert [row.split()[:4] for row in rows] == [
        ["1", "method=ringmaster", "method.eta=1e+30", "diverged"],
        ["2", "method=ringmaster", "method.eta=0.3", "finished"],
        ["3", "method=rennala", "method.eta=1e+30", "diverged"],
        ["4", "method=rennala", "method.eta=0.3", "finished"],
    ]
    assert rows[3].endswith(f"runs/{folder.name}/3")
    labels = re.findall(r'"label":"(method=\w+),[^"]*(eta=[^",]+)', (folder / "report/report.html").read_text())
    assert [" method.".join(label) for label in labels] == [" ".join(row.split()[1:3]) for row in rows]


def test_a_multirun_does_not_show_the_runs_of_another_one(tmp_path, monkeypatch, capsys):
    """All directories are checked before the first job. A job that is refused later has no result."""
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "m/1", gap=3.0, ended="budget", updates=1234)
    words = ["simulate", "-m", *SMALL, "method.eta=0.1,0.2", "run.dir=m", "run.report=false"]
    assert main(words) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("ringmaster: run.dir=m/1 already holds a run")
    assert not (tmp_path / "m/0").exists()
    (tmp_path / "m/0").write_text("")  # not a directory, which is found when the job begins
    assert main([*words, "run.overwrite=true"]) == 2
    rows = capsys.readouterr().out.partition("all 2 jobs\n")[2].splitlines()[1:]
    assert rows[0].split() == ["1", "method.eta=0.1", "refused", "0", "m/0"]
    assert rows[1].split()[:3] == ["2", "method.eta=0.2", "finished"]
    assert "1,234" not in rows[1]


def test_several_values_without_multirun_say_what_to_do(capsys):
    assert main(["simulate", "method.eta=0.1,0.2"]) == 2
    assert capsys.readouterr().err.startswith("ringmaster: method.eta=0.1,0.2: these are several values; with -m")
    assert main(["train", "-m", "method.eta=0.1,0.2", "resume=runs/a"]) == 2
    assert "resume=auto" in capsys.readouterr().err
    for one in (["--cfg", "job"], ["--dry-run"]):
        assert main(["train", "-m", "method.eta=0.1,0.2", *one]) == 2
        assert "leave out -m" in capsys.readouterr().err
