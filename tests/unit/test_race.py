"""The race of automatic contenders versus the others, for curves whose answers are known."""

import math

import pytest

from ringmaster_dist.config.compose import load
from ringmaster_dist.config.errors import UserError
from ringmaster_dist.experiment import before_after, curves, race, standings
from ringmaster_dist.experiment.machines import SPEEDS, Cell, machines
from ringmaster_dist.experiment.plan import AUTO, PROBLEMS
from ringmaster_dist.experiment.runner import Result
from ringmaster_dist.observe.run_directory import RunDirectory
from ringmaster_dist.simulation.session import simulate

ETAS = {"method.eta": [0.1, 0.2, 0.4, 0.8, 1.6]}
CELL = Cell(
    "scion", 4, "similar", 4 * 60, 60, True, {"asynchronous": ETAS, "rennala": {"method.eta": [0.1]}, AUTO: ETAS}
)


def falling(speed, seconds=60, points=60):
    """A curve whose logarithm is straight, so that smoothing changes it at its ends only."""
    return [(t * seconds / points, math.exp(-speed * t * seconds / points)) for t in range(points + 1)]


def test_a_curve_reaches_a_loss_between_its_points_or_never():
    curve = falling(0.02)
    assert curves.seconds_to(curve, math.exp(-0.02 * 17)) == pytest.approx(17)
    between = (math.exp(-0.02 * 17) + math.exp(-0.02 * 18)) / 2
    assert curves.seconds_to(curve, between) == pytest.approx(17.5)
    assert curves.value_at(curve, 17.5) == pytest.approx(between)
    assert curves.seconds_to(curve, math.exp(-2)) == math.inf
    broken = [(time, math.nan if time > 30 else value) for time, value in curve]  # it diverged
    assert curves.seconds_to(broken, math.exp(-0.02 * 20)) == pytest.approx(20)
    assert curves.seconds_to(broken, math.exp(-0.02 * 40)) == curves.last(broken) == math.inf


def test_noise_does_not_decide_when_a_loss_is_reached():
    lucky = [(time, value * (0.9 if time == 10 else 1.0)) for time, value in falling(0.02)]
    assert curves.seconds_to(lucky, math.exp(-0.02 * 15)) == pytest.approx(15, abs=1)


@pytest.fixture
def played(monkeypatch):
    """Replaces the runs by curves, which are falling at the speed that ``speed(job)`` says, and notes what was run."""

    def fake(speed):
        stages = []

        def play_all(jobs, folder, pool, progress, cost):
            jobs = list(jobs)
            stages.append(jobs)
            budget = [float(w.partition("=")[2]) for job in jobs for w in job.common if w.startswith("budget.seconds")]
            return [
                Result(job, falling(speed(job), seconds), 1, 0.0, 0.25, 0.5)
                for job, seconds in zip(jobs, budget, strict=True)
            ]

        monkeypatch.setattr(race, "play_all", play_all)
        return stages

    return fake


def eta(job):
    return float(job.overrides[0].partition("=")[2])


def test_the_best_third_and_at_least_two_run_the_whole_budget(played, tmp_path):
    # A larger eta is quicker at first; from 0.4 on it stops at a higher loss, which only the whole budget shows.
    stages = played(lambda job: 0.01 * (1 if eta(job) > 0.4 and float(job.common[-3].split("=")[1]) > 30 else eta(job)))
    grid = {"method.eta": [0.1, 0.2, 0.4, 0.8, 1.6], "method.threshold": [2.0, 4]}
    cell = CELL._replace(grids={"ringmaster": grid, "rennala": {"method.eta": [0.4]}, AUTO: ETAS})
    done = race.run(machines("full", 2)._replace(cells=(cell,)), tmp_path, 1)
    looked, whole, final = stages
    assert [len(looked), len(whole), len(final)] == [10 + 5, 4 + 1 + 2, 2 * 3]
    assert {job.method for job in looked} == {"ringmaster", AUTO}  # one setting needs no first look
    assert {eta(job) for job in whole if job.method == AUTO} == {0.8, 1.6}
    assert eta(done.winners[cell.name, AUTO]) in (0.8, 1.6)
    assert {job.seed for job in looked + whole} == {0}
    assert {job.seed for job in final} == {1, 2}
    stages.clear()
    race.run(machines("full", 2)._replace(cells=(cell._replace(is_long=False),)), tmp_path, 1)
    assert [len(stage) for stage in stages] == [0, 3 * (10 + 1 + 5), 2 * 3]
    assert {job.seed for job in stages[1]} == {0, 10, 11}  # where runs are quick, none is dropped


@pytest.mark.parametrize(("speed", "words"), [(1 / 1.04, "1.04 |"), (0.9, "1.11 **fails**"), (0.5, "never **fails**")])
def test_the_ratio_is_that_of_the_times_to_the_target(speed, words, played, tmp_path):
    """The target is what the quickest other contender has at two thirds, whatever the automatic one does."""
    speeds = {"asynchronous": 0.02, "rennala": 0.01, AUTO: 0.02 * speed}
    played(lambda job: speeds[job.method])
    plan = machines("full", 3)._replace(cells=(CELL,))
    done = race.run(plan, tmp_path, 1)
    (line,) = standings.lines(done)
    assert line.goal == pytest.approx(math.exp(-0.02 * 40))
    assert (line.best.contender, line.best.seconds) == ("asynchronous", pytest.approx(40))
    assert line.ratio == pytest.approx(1 / speed if speed > 0.6 else math.inf, rel=1e-3)
    summary = standings.summary(done)
    assert words in summary
    assert f"**{int(line.holds)} of 1 cells**" in summary
    assert ("It fails in NanoChat with radii, 4 workers, similar" in summary) is not line.holds
    assert "| 25% | 50% |" in summary
    assert standings.draw(done, tmp_path).exists()


@pytest.mark.parametrize("speeds", SPEEDS)
def test_the_budget_is_what_all_workers_need_for_the_gradients(speeds, tmp_path):
    """Also where speeds change in mid-run, at a quarter of the budget."""
    (cell,) = machines("full", 1).only([f"quadratic-8-{speeds}"]).cells
    job = cell.jobs("asynchronous")[0]
    config = load([*job.all_overrides, "problem.dim=1", "simulation.engine=core"])
    summary = simulate(config, RunDirectory(str(tmp_path / "run"), name="x"))
    assert 0.93 * cell.gradients < summary.accepted < cell.gradients  # jitter makes gradients up to 5 % longer
    assert all(phase.start_seconds == pytest.approx(cell.seconds / 4, rel=1e-4) for phase in config.cluster.phases)
    assert bool(config.cluster.phases) == (speeds == "change")


def test_the_runs_of_every_problem_compose():
    for problem in PROBLEMS:
        (cell,) = machines("full", 1).only([f"{problem}-32-two_speeds"]).cells
        whole, short = cell.jobs("rennala")[-1], cell.short(cell.jobs(AUTO)[-1])
        assert load(whole.all_overrides).budget.seconds == pytest.approx(cell.seconds)
        assert load(short.all_overrides).budget.seconds == pytest.approx(cell.seconds / 3, rel=1e-4)


def test_cells_are_chosen_by_parts_of_their_names():
    plan = machines("full", 3)
    assert len(plan.cells) == len(plan.only(None).cells) == 30
    assert len(plan.only(["linear", "32"]).cells) == 6 + 15 - 3
    with pytest.raises(UserError, match="'lin' is no part of"):
        plan.only(["linear", "lin"])


def test_the_picture_says_which_machines_contribute(tmp_path):
    common = ("problem.dim=5", "cluster.workers=4", "cluster.profile=file", "cluster.times=[1, 1, 1, 50]",
              "cluster.jitter=0", "budget.seconds=60", "run.samples=10", "simulation.engine=core")  # fmt: skip
    side = before_after.play(tmp_path / "before", (*common, "method.threshold=8"), lambda fraction, text: None)
    assert (side.num_contributing, side.slowness) == (3, [1, 1, 1, 50])
    assert side.choices == "method.threshold=8"
    other = before_after.play(tmp_path / "after", (*common, "method.threshold=200"), lambda fraction, text: None)
    assert before_after.draw(side, other, tmp_path / "six.png").read_bytes()[:4] == b"\x89PNG"
