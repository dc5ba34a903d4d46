"""The paper's experiments: rungs, training losses, the time to a gap and the verdicts, for answers that are known."""

import json
import math
from contextlib import nullcontext

import pytest

from ringmaster_dist.config.compose import load
from ringmaster_dist.experiment import claims, curves, gaps, plan, results, runner
from ringmaster_dist.observe import style
from ringmaster_dist.observe.run_directory import RunDirectory
from ringmaster_dist.simulation.session import simulate


@pytest.fixture
def played(monkeypatch):
    """Replaces the runs by results that ``result(job)`` makes, and notes what was run."""

    def fake(result):
        stages = []

        def play_all(jobs, folder, pool, progress, cost):
            stages.append(list(jobs))
            progress(1.0, "")
            return [result(job) for job in stages[-1]]

        monkeypatch.setattr(runner, "play_all", play_all)
        monkeypatch.setattr(runner, "processes", nullcontext)
        return stages

    return fake


def number(job, key):
    words = dict(word.split("=", 1) for word in (*job.common, *job.overrides))
    return float(words[key])


def test_the_best_third_of_each_method_plays_the_next_rung(played, tmp_path):
    """A setting that is last after a sixteenth is dropped. One that leads there and falls back does not win."""

    def result(job):
        eta, seconds = number(job, "method.eta"), number(job, "budget.seconds")
        early = {5: 1.0, 1: 2.0, 0.2: 3.0, 0.04: 4.0}.get(eta, 5.0)
        loss = early if seconds < 1000 else {5: 9.0, 1: 1.0}.get(eta, 5.0)
        loss += 0.01 * abs(number(job, "method.threshold") - 4) if job.method == "ringmaster" else 0.0
        return runner.Result(job, [(seconds, loss)], 1, 0.0, 0.0, 1.0, [(0.5 * seconds, 7.0), (seconds, loss)])

    stages = played(result)
    fractions = []
    nanochat = plan.nanochat("cpu", 3).only(["linear-32"])
    outcome = runner.run(nanochat, tmp_path, 1, lambda fraction, text: fractions.append(fraction))
    methods = ("ringmaster", "ringmaster_agnostic", "rennala", "delay_adaptive", plan.EVERY_ETA)
    counts = [[sum(job.method == method for job in stage) for method in methods] for stage in stages]
    assert counts == [[20, 5, 5, 4, 20], [7, 2, 2, 2, 7], [3, 2, 2, 2, 3], [3, 3, 3, 3, 3], [0] * 5]
    assert [{number(job, "budget.seconds") for job in stage} for stage in stages[:4]] == [{125}, {500}, {1000}, {2000}]
    assert [{number(job, "run.samples") for job in stage} for stage in stages[:4]] == [{3}, {12}, {25}, {50}]
    assert [{job.seed for job in stage} for stage in stages[:4]] == [{0}, {0}, {0}, {1, 2, 3}]
    assert {number(job, "method.eta") for job in stages[1] if job.method == "ringmaster"} == {5, 1}
    chosen = {method: " ".join(job.overrides) for (_, method), job in outcome.winners.items()}
    assert chosen["delay_adaptive"] == "method.eta=1"
    assert chosen["rennala"] == "method.eta=5 method.batch=1"
    assert fractions == sorted(fractions)
    assert fractions[-1] == pytest.approx(1)
    load(outcome.winners["linear-32", "rennala"].shortened(1 / 16).all_overrides)
    assert "| rennala | eta=5 batch=1* | 9 |" in results.summary(outcome)  # one eta has no edge
    assert all(path.exists() for path in results.write(outcome, tmp_path))


def test_a_run_costs_what_it_accepts():
    """The figures are those of simulated runs of 2000 s."""
    jobs = {(job.regime, *job.overrides): job for job in plan.nanochat("cpu", 1).tuning() if job.method == "ringmaster"}
    for regime, threshold, accepted in [("similar-32", 1, 1990), ("similar-32", 16, 30880), ("similar-8", 16, 15360)]:
        estimate = jobs[regime, "method.eta=1", f"method.threshold={threshold}"].gradients
        assert estimate == pytest.approx(accepted, rel=0.06)


def test_the_training_loss_is_the_mean_since_the_point_before(tmp_path):
    config = load(["problem.dim=5", "cluster.workers=4", "cluster.profile=linear", "method.threshold=2",
                   "budget.seconds=20", "run.samples=4", "simulation.engine=core"])  # fmt: skip
    directory = RunDirectory(str(tmp_path / "run"), name="x")
    summary = simulate(config, directory)
    arrivals = [json.loads(line) for line in (tmp_path / "run/trace.jsonl").read_text().splitlines()]
    losses = [(a["time"], a["loss"]) for a in arrivals if a["verdict"] == "accepted"]
    times = [row.time for row in directory.metrics()]
    found = runner._train_losses(directory, times, summary)
    assert [seconds for seconds, _ in found] == [5, 10, 15, 20]
    for seconds, value in found:
        own = [loss for time, loss in losses if seconds - 5 < time <= seconds]
        assert value == pytest.approx(sum(own) / len(own))
    summary.ended = "diverged"
    assert curves.end(runner._train_losses(directory, times, summary)) == math.inf


def test_the_end_of_a_curve_is_the_mean_of_its_last_tenth():
    assert curves.end([(t, float(t)) for t in range(101)]) == pytest.approx(95.5)
    assert curves.end([(1.0, 5.0), (2.0, 4.0)]) == 4
    assert curves.end([]) == curves.end([(1.0, 5.0), (2.0, math.nan)]) == math.inf


def decaying(rate, floor):
    """A gap that falls from 100 at this rate, down to a floor."""
    return [(2.0 * t, max(floor, 100 * math.exp(-rate * 2 * t))) for t in range(1001)]


def test_every_method_is_tuned_for_each_gap(played, tmp_path):
    """A large eta is quick and stops early; rennala is slower by half; delay_adaptive stops above the gaps."""
    slowness = {"ringmaster": 1, "ringmaster_agnostic": 1.2, "rennala": 1.5, "delay_adaptive": 1.5}

    def result(job):
        eta = number(job, "method.eta")
        floor = 3.0 if job.method == "delay_adaptive" else 0.21 * eta
        curve = decaying(eta / slowness[job.method] / 5, floor)
        return runner.Result(job, curve, 1, 0.0, 0.0, 1.0)

    stages = played(result)
    outcome = runner.run(plan.quadratic("full", 3).only(["linear"]), tmp_path, 1)
    assert [len(stage) for stage in stages[:2]] == [56 + 8 + 56 + 8, 4 * 3]
    chosen = {key[1:]: number(job, "method.eta") for key, job in outcome.quickest.items()}
    assert [chosen["ringmaster", gap] for gap in (1.0, 0.1, 0.01)] == [1, 0.2, 0.04]
    seconds = claims.times(outcome, "linear", 1.0)
    assert seconds["ringmaster"] == pytest.approx([math.log(100) * 5] * 3, rel=0.01)
    assert seconds["delay_adaptive"] == [math.inf] * 3
    summary = results.summary(outcome)
    assert "| linear: Ringmaster level with Rennala |" in summary
    assert summary.count("**fails**: 0.67 x rennala") == 3  # it is quicker, and that is not level
    assert "| delay_adaptive | never |" in summary
    assert all(path.exists() for path in gaps.write(outcome, tmp_path))


def test_verdicts():
    values = {"ringmaster": [3.0, 3.1, 3.2], "rennala": [3.3, 3.4, 3.5], "delay_adaptive": [4.0], "other": [2.0]}
    assert claims.lowest(values, claims.BASELINES) == "holds: 3.1 (3 to 3.2), and rennala has 3.4 (3.3 to 3.5)"
    assert claims.lowest(values, ["other"]).startswith("**fails**: 3.1")
    close = {**values, "rennala": [3.15, 3.4, 3.5]}
    assert claims.lowest(close, claims.BASELINES).startswith("holds, but the seeds overlap")
    assert claims.growing([0.01, 0.02, 0.05]).startswith("holds")
    assert claims.growing([0.01, 0.05, 0.02]) == "**fails**: +0.010, +0.050, +0.020"
    equal = {method: [1.0] for method in claims.PAPER}
    for regime, own, verdict in [
        ("similar", 1.5, "holds: 1.50"), ("similar", 0.9, "**fails**: 0.90"), ("similar", 2.5, "**fails**"),
        ("sublinear", 0.9, "holds: 0.90"), ("sublinear", 1.1, "**fails**"), ("sublinear", math.inf, "**fails**"),
        ("linear", 1.2, "holds: 1.20 x rennala"), ("linear", 0.7, "**fails**"),
    ]:  # fmt: skip
        assert claims.ratio(regime, {**equal, "ringmaster": [own]}).startswith(verdict)


@pytest.mark.parametrize(
    "made", [plan.quadratic("full", 1), plan.nanochat("cpu", 1), plan.auto("full", 1), plan.radii("full", 1),
             plan.steps("full", 1)], ids=lambda made: made.name)  # fmt: skip
def test_no_two_lines_of_a_figure_look_the_same(made):
    """A number beyond the colours begins again with the first colour."""
    places = {int(results._COLOURS[method].removeprefix("C")) % len(style.LINES) for method in made.grids}
    assert len(places) == len(made.grids)
