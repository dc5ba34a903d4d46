"""Time to loss: the arithmetic of its table, its keys and selection, and the twins that tune it."""

import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ringmaster_dist.bench import contest_tables, time_to_loss, twins
from ringmaster_dist.bench.contest import (
    CLUSTERS,
    CONTENDERS,
    Point,
    Trial,
    arrival,
    races,
    settings_of,
)
from ringmaster_dist.bench.contest_tables import Result, standing, verdict, waste
from ringmaster_dist.bench.rivals import batch_of, config_of, local_steps, optimizers_of, problem_of, victim_of
from ringmaster_dist.config.errors import UserError
from ringmaster_dist.profiles import rate_at
from ringmaster_dist.runtime.preparation import prepare
from ringmaster_dist.worker.job import Job

FALLING = [Point(0.0, 6.0), Point(10.0, 5.0, 100, 400, 30.0, 2e9), Point(20.0, 4.0, 300, 800, 70.0, 4e9)]


def test_the_time_of_arrival_is_between_two_evaluations():
    """The loss was 5 after 10 s and 4 after 20 s. So it was 4.5 after 15 s, and all else was half way too."""
    assert arrival(FALLING, 4.5) == Point(15.0, 4.5, 200, 600, 50.0, 3e9)
    assert arrival(FALLING, 6.0) == FALLING[0]
    assert arrival(FALLING, 3.9) is None
    assert arrival([Point(1.0, math.inf), Point(2.0, 4.0)], 4.5) == Point(2.0, 4.0)


def test_the_figures_of_a_contender():
    cluster = CLUSTERS["linear8"]._replace(workers=4, target=4.0, limit_seconds=60.0)
    trial = Trial(cluster, CONTENDERS["ddp"], (("factor", 2.0),), 1, "real")
    late = [point._replace(seconds=2 * point.seconds) for point in FALLING]
    once, slower, never = (Result.of(trial, curve, "", "") for curve in (FALLING, late, FALLING[:2]))
    row = standing(cluster, [slower, once, slower], ours=10.0)
    assert row["seconds"] == "40.0 (20.0 to 40.0)"
    assert row["x ringmaster"] == "4.00"
    assert (row["updates"], row["rows used"], row["bytes"]) == ("300", "800", "4.00 GB")
    assert row["waste"] == "56%"  # 70 of 160 worker seconds were used
    assert waste(FALLING[-1], 4) == pytest.approx(1 - 70 / 80)
    one_missed = standing(cluster, [once, slower, never], ours=None)
    assert (one_missed["seconds"], one_missed["x ringmaster"]) == ("40.0 (20.0 to never)", "")
    two_missed = standing(cluster, [never, once, never], ours=10.0)
    assert (two_missed["seconds"], two_missed["waste"]) == ("not in 60, 1 of 3 did", "")
    assert standing(cluster, [never], ours=10.0)["seconds"] == "not in 60, lowest loss 5.00"
    virtual = never._replace(clock="virtual")
    assert standing(cluster, [virtual], ours=10.0)["seconds"] == "not in 60, lowest loss 5.00 in virtual time"


def result(cluster, contender, seconds, seed=1, **facts):
    reached = None if seconds is None else Point(seconds, 3.8, 300, 800, 70.0, 4e9)
    known = {"setting": "factor 2", "clock": "real", "date": "2026-11-18", "machine": "a laptop", "lowest_loss": 3.7}
    return Result(cluster, contender, seed=seed, reached=reached, **{**known, **facts})


def test_results_of_a_part_join_the_others(tmp_path):
    """A second part replaces one contender of the first cluster and adds another cluster. Nothing else changes."""
    path = tmp_path / "runs.csv"
    first = [
        result("linear8", "ringmaster", 20.0),
        result("linear8", "ddp", 50.0),
        result("linear8", "ddp", None, seed=2),
    ]
    contest_tables.write(path, first)
    assert contest_tables.read(path) == first
    second = [result("change", "ringmaster", 30.0), result("linear8", "ringmaster", 10.0, date="2026-11-19")]
    joined = contest_tables.merged(contest_tables.read(path), second)
    assert joined == [second[1], *first[1:], second[0]]
    linear, change = contest_tables.tables(joined)
    assert [row["seconds"] for row in linear.rows] == ["10.0", "not in 120, 1 of 2 did"]
    assert linear.words == "The quickest of ours is ringmaster. No rival reached the target."
    assert linear.seconds == {"ringmaster": [10.0], "ddp": [50.0, math.inf]}
    assert linear.origin == "2026-11-18 and 2026-11-19, 2 seeds, a laptop"
    assert change.words == ""
    document = contest_tables.markdown([linear, change])
    assert "| ringmaster, a fixed threshold | 10.0 | 1.00 | 300 | 800 | 12% | 4.00 GB | factor 2 |" in document


def test_files_are_made_of_any_part_of_the_races(tmp_path, capsys):
    """A contender that missed the target, and a cluster without the contenders of the overview, are no failure."""
    missed = [result("change", "rows", 9.0), result("change", "diloco-scaled", None), result("equal", "ray", None)]
    time_to_loss._write_files(tmp_path, missed)
    assert contest_tables.read(tmp_path / "runs.csv") == missed
    sizes = [(tmp_path / name).stat().st_size for name in ("time-to-loss.png", "overview.png")]
    assert min(sizes) > 5000
    assert f"{tmp_path}/overview.png" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["cluster,contender\nlinear8,ddp\n", "not a table", None])
def test_a_damaged_file_of_results_is_noticed_before_the_races(text, tmp_path, monkeypatch):
    path = tmp_path / "runs.csv"
    path.write_text(text) if text else contest_tables.write(path, [result("linear9", "ddp", 3.0)])
    monkeypatch.setattr(time_to_loss, "race", lambda *_: pytest.fail("hours later"))
    with pytest.raises(UserError, match="has no results of this version"):
        time_to_loss.run(False, False, ["linear8"], ["ringmaster"], 3, tmp_path)


def test_the_table_says_who_wins():
    assert verdict({"ringmaster": 20.0, "rows": 10.0, "ddp": 25.0, "diloco": None}) == (
        "The quickest of ours is rows. The quickest rival, ddp, takes 2.50 times as long."
    )
    assert verdict({"ringmaster": 20.0, "ddp": 10.0}).startswith("We lose here: ddp is quickest")
    assert verdict({"ringmaster": None, "ddp": 10.0}).endswith("takes longer than the limit.")
    assert verdict({"ringmaster": 20.0}) == ""


def test_a_trial_is_found_by_what_decides_its_outcome():
    ddp, ray, kills = CONTENDERS["ddp"], CONTENDERS["ray"], CLUSTERS["kills"]
    setting = next(settings_of(ddp))
    virtual = Trial(CLUSTERS["linear8"], ddp, setting, 0, "virtual")
    real = virtual._replace(clock="real")
    same = [virtual._replace(contender=ray), virtual._replace(cluster=kills)]
    assert {trial.key for trial in same} == {virtual.key}
    others = [real, real._replace(contender=ray), real._replace(cluster=kills), virtual._replace(seed=1),
              virtual._replace(setting=(("factor", 3.0),)),
              virtual._replace(contender=CONTENDERS["ddp-sgd"])]  # fmt: skip
    assert len({virtual.key, *(trial.key for trial in others)}) == 1 + len(others)


def test_who_races_where():
    everywhere = {cluster.name: {each.name for each in named} for cluster, named in races(None, None)}
    assert everywhere["linear8"] == set(CONTENDERS)
    assert everywhere["kills"] == {"ringmaster", "auto", "rows", "ddp", "diloco", "diloco-scaled"}
    assert [(c.name, [each.name for each in named]) for c, named in races(["change"], ["ddp"])] == [("change", ["ddp"])]
    with pytest.raises(UserError, match="contenders=ddq: 'ddq' is not one of ringmaster"):
        races(None, ["ddq"])


def test_every_member_is_killed_in_turn():
    assert {victim_of(seed=2, number=number, members=8) for number in range(8)} == set(range(8))


def test_the_rate_is_that_of_the_newest_phase_of_a_worker():
    phases = [SimpleNamespace(start_seconds=20.0, rate=4.0, workers=[0]),
              SimpleNamespace(start_seconds=10.0, rate=0.5, workers=None)]  # fmt: skip
    assert [rate_at(phases, 0, seconds) for seconds in (9.0, 10.0, 20.0)] == [1.0, 0.5, 4.0]
    assert rate_at(phases, 1, 30.0) == 0.5
    job = Job(None, "cpu", "", 0, 1.0, 4, 0.0, True, False, None, slot=0, phases=phases)
    assert [job.pace(rows, seconds) for rows, seconds in ((0, 9.0), (0, 10.0), (2, 20.0))] == [1.0, 2.0, 0.125]


def test_a_real_worker_has_a_pace_that_never_stops():
    with pytest.raises(UserError, match="a rate of 0 is for simulations"):
        prepare(["cluster.phases=[{start_seconds: 1, rate: 0}]"])
    with pytest.raises(UserError, match=r"cluster\.profile=none sets none"):
        prepare(["cluster.phases=[{start_seconds: 1, rate: 2}]", "cluster.profile=none"])


# --- twins -------------------------------------------------------------------------------------------------------

TEXT = Path(__file__).parent  # reading these files takes less time than the standard library
WORDS = [word for word in CLUSTERS["linear8"].overrides if not word.startswith("data=")]
SMALL = CLUSTERS["linear8"]._replace(
    workers=3, target=0.0, limit_seconds=0.5, overrides=(*WORDS, "data=text", f"data.path={TEXT}")
)


def played(name, limit=0.5, **setting):
    cluster = SMALL._replace(limit_seconds=limit, overrides=(*SMALL.overrides, "cluster.jitter=0"))
    trial = Trial(cluster, CONTENDERS[name], tuple(setting.items()), 0, "virtual")
    return trial, twins.play(trial, trial.cluster.limit_seconds)


def test_the_twin_of_ddp_is_a_step_with_the_mean_gradient():
    """A plain loop over the workers makes the same steps. Each takes the time of the slowest, 0.3 s."""
    trial, curve = played("ddp", factor=1.0)
    assert [point.seconds for point in curve] == pytest.approx([0.3, 0.6])
    assert [(point.updates, point.rows) for point in curve] == [(1, 12), (2, 24)]
    assert [point.used_seconds for point in curve] == pytest.approx([0.6, 1.2])
    problem = problem_of(config_of(trial))
    optimizers = optimizers_of(problem.model, "adamw", 1.0)
    for step, point in enumerate(curve):
        for worker in range(3):
            rows = batch_of(problem, 0, worker, step, 4)
            (problem.model(rows[:, :-1], rows[:, 1:]) / 3).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            assert point.loss == pytest.approx(problem.score(problem.model, 128)["loss"], rel=1e-4)


def test_the_twin_of_diloco_waits_for_its_slowest_replica():
    """With equal steps a round takes those of the slowest. With steps by speed all replicas are busy."""
    trial, equal = played("diloco", limit=1.0, factor=1.0, steps=2)
    assert local_steps(trial, config_of(trial)) == [2, 2, 2]
    assert [point.seconds for point in equal] == pytest.approx([0.6, 1.2])
    assert waste(equal[-1], 3) == pytest.approx(1 - 0.4 / 0.6)
    trial, scaled = played("diloco-scaled", factor=1.0, steps=2)
    assert local_steps(trial, config_of(trial)) == [6, 3, 2]
    assert waste(scaled[-1], 3) == pytest.approx(0.0)
    assert scaled[-1].rows == 4 * 11
    assert scaled[-1].loss < equal[-2].loss


def test_a_trial_of_the_tuning_ends_when_it_can_no_longer_win(tmp_path, monkeypatch):
    """A setting that would arrive later than another one is cut off there, and the winner is that of whole trials."""
    arrives = {0.5: 9.0, 1.0: 4.0, 2.0: 7.0, 4.0: 3.0, 8.0: 30.0, 16.0: 50.0}  # seconds by factor
    limits = {}

    def played(trial, limit_seconds):
        seconds = arrives[trial.chosen["factor"]]
        limits[seconds] = limit_seconds
        reached = [Point(seconds, 0.0)] if seconds <= limit_seconds else []
        return [Point(0.0, 1.0), *reached]

    monkeypatch.setattr(time_to_loss, "processes", lambda *_: ThreadPoolExecutor(1))
    monkeypatch.setattr(time_to_loss, "_twin", played)
    monkeypatch.setattr(time_to_loss.os, "cpu_count", lambda: 1)
    results, cluster = time_to_loss.Results(tmp_path), SMALL._replace(limit_seconds=40.0)
    time_to_loss._tune([(cluster, CONTENDERS["ddp"])], results, lambda *_: None)
    assert time_to_loss.tuned(cluster, CONTENDERS["ddp"], results).chosen == {"factor": 4.0}
    assert sorted(limits) == sorted(arrives.values())  # nobody was left out
    assert max(limits.values()) == 40.0
    assert limits[50.0] == 3.0  # the edge of the grid comes last


def test_the_twin_of_ours_outlasts_a_time_without_an_update():
    """Three workers need 1.1 s for a batch of 20, and an evaluation is due every half second. So some are empty."""
    _, curve = played("rennala", limit=4.0, **{"method.eta": 0.01, "method.batch": 20})
    assert [point.updates for point in curve] == [0, 1, 2, 3]
    assert [point.loss for point in curve] == sorted((point.loss for point in curve), reverse=True)
