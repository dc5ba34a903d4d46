"""Time to loss in real processes: ours and DDP on two paced workers, kept results, and rivals that do not start."""

import json
import os
import time
from pathlib import Path

import pytest

from ringmaster_dist.bench import rivals, time_to_loss
from ringmaster_dist.bench.contest import CLUSTERS, CONTENDERS, REAL, Trial
from ringmaster_dist.bench.contest_tables import tables
from ringmaster_dist.bench.rivals import Member
from ringmaster_dist.bench.time_to_loss import Results, race
from ringmaster_dist.config.errors import UserError


def small_cluster():
    """Two quick workers, and a target that is soon reached."""
    small = CLUSTERS["linear32"]
    words = [word for word in small.overrides if not word.startswith("data=")]
    text = ("data=text", f"data.path={Path(__file__).parent}", "cluster.unit_seconds=0.02")
    return small._replace(workers=2, target=5.9, limit_seconds=20.0, overrides=(*words, *text))


def test_ours_and_ddp_race_and_finished_trials_are_kept(tmp_path):
    """Four trials in virtual time choose the settings, and two real ones fill the table. A lost one is run again."""
    cluster = small_cluster()
    ours = CONTENDERS["ringmaster"]._replace(grid={"method.eta": (0.01, 0.02), "method.threshold": (8,)})
    ddp = CONTENDERS["ddp"]._replace(grid={"factor": (1.0, 2.0)})
    folder, steps = tmp_path / "trials", []

    def raced():
        results = Results(tmp_path)
        found = race([(cluster, [ours, ddp])], results, 1, lambda fraction, text: steps.append(text))
        assert [(result.contender, result.seed) for result in found] == [("ringmaster", 1), ("ddp", 1)]
        [table] = tables(found, {cluster.name: cluster})
        assert table.words.startswith(("The quickest of ours is ringmaster", "We lose here: ddp"))
        assert [f"{result.seconds:.1f}" for result in found] == [row["seconds"] for row in table.rows]
        return table.rows, {path: path.stat().st_mtime_ns for path in folder.iterdir()}

    (first, second), kept = raced()
    assert len(kept) == 6
    assert float(first["seconds"]) > 0
    assert first["x ringmaster"] == "1.00"
    assert float(second["x ringmaster"]) > 0
    assert first["setting"].startswith("eta 0.0")
    updates, used = int(second["updates"]), int(second["rows used"])
    assert 8 * (updates - 1) <= used <= 8 * (updates + 1)  # two ranks of four rows
    assert "tuning in virtual time, 4 of 4" in steps
    facts = {path: json.loads(path.read_text()) for path in kept}
    lost = next(path for path, fact in facts.items() if (fact["clock"], fact["contender"]) == ("real", "ddp"))
    lost.unlink()
    _, again = raced()
    assert [path for path in kept if again[path] != kept[path]] == [lost]


def test_a_contender_that_is_too_slow_in_virtual_time_is_not_run(tmp_path):
    cluster = small_cluster()._replace(limit_seconds=2.0)
    slow = CONTENDERS["ddp"]._replace(grid={"factor": (1e-6, 1e-5)})
    [result] = race([(cluster, [slow])], Results(tmp_path), 3, lambda fraction, text: None)
    assert (result.clock, result.reached) == ("virtual", None)
    assert 6.0 < result.lowest_loss < 7.0


def test_a_race_without_an_installed_contender_is_no_error(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    time_to_loss.run(False, False, ["linear8"], ["ray"], 3, tmp_path)
    assert capsys.readouterr().err == "without ray: pip install 'ringmaster-dist[compare]'\n"


def fails(trial, index, folder):
    """The main function of a rival whose second process fails, after the others have written something."""
    print("a line of a log", flush=True)
    member = Member(trial, index, folder)
    member.wait_until_all_are_built()
    if index == 1:
        raise ValueError("no such port")
    time.sleep(60)


def aborts(trial, index, folder):
    """The main function of a rival whose second process ends without an exception, after the start."""
    Member(trial, index, folder).start_together()
    if index == 1:
        print("\n".join(f"line {number}" for number in range(9)), flush=True)
        os._exit(3)
    time.sleep(60)


def hangs(trial, index, folder):
    """The main function of a rival whose first process is never ready."""
    if index == 0:
        print("looking for the others", flush=True)
        time.sleep(60)
    Member(trial, index, folder).start_together()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (fails, "{} did not start: process 1: ValueError: no such port"),
        (hangs, "{} did not start: process 0 is not ready; it wrote: looking for the others"),
        (aborts, "a process of {} died: process 1 ended with exit code 3; it wrote: line 4 / line 5 / line 6 / line 7 "
                 "/ line 8"),
    ],
)  # fmt: skip
def test_a_rival_that_fails_says_why(body, words, tmp_path, monkeypatch):
    cluster = small_cluster()
    trial = Trial(cluster, CONTENDERS["ddp"], (("factor", 1.0),), 1, REAL)
    (tmp_path / "trial").mkdir()
    with rivals.Crew(trial, body, 2, tmp_path / "trial", together=False) as crew:

        def wait():
            while True:
                if body is hangs and (tmp_path / "trial/ready-1").exists():
                    monkeypatch.setattr(rivals, "_READY_SECONDS", 0.0)
                crew.tick()
                time.sleep(0.02)

        with pytest.raises(UserError) as raised:
            wait()
    assert str(raised.value) == words.format("DDP (gloo), Muon + AdamW")
