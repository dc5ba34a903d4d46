"""The time bounds: known answers, and that simulated clusters keep them, also when speeds change."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringmaster_dist import theory as bounds
from ringmaster_dist.algorithm.layout import GEOMETRY_MAPS, Layout
from ringmaster_dist.algorithm.methods import Method
from ringmaster_dist.algorithm.schedules import Constant
from ringmaster_dist.algorithm.update import Update
from ringmaster_dist.problems.quadratic import Quadratic
from ringmaster_dist.server.core import ServerCore
from ringmaster_dist.simulation.simulator import Simulator
from ringmaster_dist.simulation.speeds import Phase, Rates, Speeds


def test_equal_workers():
    assert bounds.harmonic_means([2.0] * 4).tolist() == [2.0] * 4
    assert bounds.seconds_of_updates([2.0] * 4, 4) == pytest.approx(2 * 2.0 * (1 + 4 / 4))
    assert bounds.useful_workers([2.0] * 4, 4) == 4


def test_a_hopeless_worker_is_not_useful():
    times = [1.0, 1.0, 1e6]
    assert bounds.useful_workers(times, 2) == 2
    assert bounds.useful_workers(times, 10**7) == 3  # with a threshold that large it is


@settings(max_examples=50)
@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=12), st.integers(1, 20))
def test_useful_workers_reach_the_bound(times, threshold):
    means, m = bounds.harmonic_means(times), bounds.useful_workers(times, threshold)
    assert 2 * means[m - 1] * (1 + threshold / m) == pytest.approx(bounds.seconds_of_updates(times, threshold))


def test_the_universal_model_at_steady_speeds():
    """Two workers of 1 and 2 s: at a quarter of their speed one gradient is there after 4 s, the third after 8."""
    work = lambda time: np.array([time / 1.0, time / 2.0])  # noqa: E731
    assert bounds.seconds_of_updates_at(work, 1, 0.0) == pytest.approx(4.0, rel=1e-6)
    assert bounds.seconds_of_updates_at(work, 3, 5.0) == pytest.approx(8.0, rel=1e-6)
    stopped = lambda time: np.minimum(work(time), 3.0)  # noqa: E731
    assert math.isinf(bounds.seconds_of_updates_at(stopped, 1, 0.0))


def work_of(base, rates):
    """Gradients each worker could do by a time, summed segment by segment."""

    def work(time):
        total = np.zeros(len(base))
        for segment, start in enumerate(rates.times):
            stop = rates.times[segment + 1] if segment + 1 < len(rates.times) else math.inf
            total += max(0.0, min(time, stop) - start) * rates.factors[segment] / base
        return total

    return work


clusters = st.lists(st.floats(0.5, 5.0), min_size=1, max_size=6)
changes = st.lists(st.tuples(st.floats(1.0, 60.0), st.floats(0.2, 3.0), st.integers(0, 5)), max_size=4)


@settings(max_examples=40)
@given(clusters, changes, st.integers(1, 6))
def test_a_simulated_cluster_whose_speeds_change_keeps_the_bound(times, phases, threshold):
    base, updates = np.array(times), 30
    made = [Phase(start, rate, [worker % len(base)]) for start, rate, worker in phases]
    rates = Rates.from_phases(made, len(base))
    problem = Quadratic(4)
    layout = Layout(problem.parameters, GEOMETRY_MAPS["muon"])
    core = ServerCore(problem.initial(0), Method(Constant(0.1, 0.1, threshold)), Update(layout, dtype=problem.dtype))
    simulator = Simulator(core, problem, Speeds(base, rates=rates))
    simulator.run(updates=updates)
    bound = bounds.seconds_of_run_at(work_of(base, rates), updates, threshold)
    assert simulator.now <= bound * (1 + 1e-9)
