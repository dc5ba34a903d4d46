"""The threshold that chooses itself: its rule, its pace, what it hears, and that it can be taken up again."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringmaster_dist.algorithm.auto import AutoThreshold
from ringmaster_dist.algorithm.layout import GEOMETRY_MAPS, Layout
from ringmaster_dist.algorithm.schedules import Constant
from ringmaster_dist.algorithm.update import Update
from ringmaster_dist.problems.quadratic import Quadratic
from ringmaster_dist.server.core import ServerCore
from ringmaster_dist.simulation.simulator import Simulator
from ringmaster_dist.simulation.speeds import Phase, Rates, Speeds
from ringmaster_dist.theory import seconds_of_updates, sufficient_threshold

TIMES = st.lists(st.floats(0.01, 100.0), min_size=1, max_size=12)


@given(TIMES, st.floats(1.2, 4.0))
@settings(max_examples=200, deadline=None)
def test_the_sufficient_threshold_is_the_smallest_that_is(times, slack):
    chosen = sufficient_threshold(times, slack)
    best = 2 / sum(1 / t for t in times)  # seconds per update that R = infinity guarantees

    def per_update(threshold):
        return seconds_of_updates(times, threshold) / threshold

    assert per_update(chosen) <= slack * best * (1 + 1e-9)
    if chosen > 1:
        assert per_update(chosen - 1) > slack * best * (1 - 1e-9)


def played(times, seconds, *, alpha=0.05, phases=(), interrupt=True, seed=0, jitter=0.05):
    """A simulated run; the thresholds after each update, and the reasons."""
    problem = Quadratic(3)
    layout = Layout(problem.parameters, GEOMETRY_MAPS["euclidean"])
    method = AutoThreshold(Constant(0.1, alpha))
    core = ServerCore(problem.initial(0), method, Update(layout, dtype=problem.dtype))
    rates = Rates.from_phases(list(phases), len(times)) if phases else None
    simulator = Simulator(core, problem, Speeds(times, jitter=jitter, seed=seed, rates=rates), interrupt=interrupt)
    thresholds, changes = [method.threshold(0)], []
    while simulator.now < seconds:
        simulator.run(updates=core.version + 1, seconds=seconds)
        thresholds.append(method.threshold(core.version))
        changes += [(simulator.now, change) for change in method.changes()]
    return thresholds, changes, core


@given(TIMES, st.sampled_from([0.05, 0.2, 1.0]), st.booleans(), st.integers(0, 5))
@settings(max_examples=40, deadline=None)
def test_it_rises_by_one_at_most_and_never_beyond_what_the_momentum_allows(times, alpha, interrupt, seed):
    thresholds, _, core = played(times, 30 * min(times), alpha=alpha, interrupt=interrupt, seed=seed)
    assert all(later <= earlier + 1 for earlier, later in itertools.pairwise(thresholds))
    assert all(1 <= threshold <= round(1 / alpha) for threshold in thresholds)
    assert core.accepted > 0


@pytest.mark.parametrize("times", [[1.0] * 6, [1.0, 2, 3, 4, 5, 6, 7, 8], [1.0, 1, 20, 20, 20]])
def test_it_settles_where_the_rule_says(times):
    thresholds, _, _ = played(times, 100.0)
    heard = [t for t in times if t < 20]  # the others never finish within 1/alpha updates of the quick
    assert thresholds[-1] == sufficient_threshold(heard, 2.0)


def test_it_follows_speeds_that_change():
    """Six of eight become twenty times slower, and quick again later."""
    slow = [Phase(100.0, 0.05, [2, 3, 4, 5, 6, 7]), Phase(300.0, 1.0, None)]
    thresholds, changes, _ = played([1.0] * 8, 400.0, phases=slow)
    in_force = {
        moment: [c.threshold for at, c in changes if at <= moment][-1] for moment in (99.0, 299.0, 399.0)
    }  # fmt: skip
    assert in_force == {99.0: 8, 299.0: 2, 399.0: 8}
    assert thresholds[-1] == 8
    assert any("listening for" in change.reason for _, change in changes)


def test_it_goes_on_from_its_state_as_if_nothing_had_been():
    one = AutoThreshold(Constant(0.1, 0.1))
    arrivals = [(k % 3, 0.1 + 0.7 * (k % 3) + 0.01 * (k % 7)) for k in range(200)]
    for count, (worker, seconds) in enumerate(arrivals):
        if count == 90:
            other = AutoThreshold(Constant(0.1, 0.1))
            other.load_state_dict(one.state_dict())
        for method in (one, other) if count >= 90 else (one,):
            method.observe(worker, seconds)
            method.admit(worker, {0, 1, 2, 3})
        if count >= 90:
            assert one.state_dict() == other.state_dict()


@pytest.mark.parametrize("nonsense", [math.nan, math.inf, -1.0, 0.0])
def test_a_worker_that_says_nonsense_of_its_time_is_not_listened_to(nonsense):
    method, sane = AutoThreshold(Constant(0.1, 0.1)), AutoThreshold(Constant(0.1, 0.1))
    for k in range(60):
        for one in (method, sane):
            one.observe(k % 2, 1.0)
            one.admit(k % 2, {0, 1})
        method.observe(k % 2, nonsense)
    assert method.state_dict() == sane.state_dict()
