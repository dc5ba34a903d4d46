"""The automatic threshold: what it measures, where it puts the limit, the step of a late gradient, and its state."""

import itertools
import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringmaster_dist.algorithm.auto import AGAINST, TOO_DIFFERENT, AutoThreshold
from ringmaster_dist.algorithm.layout import GEOMETRY_MAPS, Layout, Parameter
from ringmaster_dist.algorithm.schedules import Constant
from ringmaster_dist.algorithm.sketch import Sketcher, difference
from ringmaster_dist.algorithm.update import Update
from ringmaster_dist.problems.quadratic import Quadratic
from ringmaster_dist.server.core import ServerCore
from ringmaster_dist.simulation.simulator import Simulator
from ringmaster_dist.simulation.speeds import Speeds

LAYOUT = Layout([Parameter("a", (40, 30), "matrix"), Parameter("b", (500,), "scalar")], GEOMETRY_MAPS["scion"])


def turning(period, noise, seed=0, first=0):
    """Gradients of an iterate that turns: their angle is proportional to their version. Each has noise of its own."""
    plane = np.random.default_rng(7).normal(size=(2, LAYOUT.size))
    generator = np.random.default_rng(seed)
    for version in itertools.count(first):
        angle = 2 * math.pi * version / period
        clean = math.cos(angle) * plane[0] + math.sin(angle) * plane[1]
        yield torch.from_numpy(clean + noise * generator.normal(size=LAYOUT.size)).float()


def settled(period, noise, updates=400):
    method = AutoThreshold(Constant(0.1, 0.05), LAYOUT)
    thresholds = [method.threshold(0)]
    for version, gradient in zip(range(updates), turning(period, noise), strict=False):
        method.inspect(gradient, version)
        thresholds.append(method.threshold(version + 1))
    return method, thresholds


def test_the_difference_of_two_gradients_is_one_minus_their_cosine_block_by_block():
    sketcher = Sketcher(LAYOUT, 0)
    one, other = torch.randn(2, LAYOUT.size, generator=torch.Generator().manual_seed(0))
    blocks = [slice(block.start, block.stop) for block in LAYOUT.blocks]
    scaled = one.clone()
    for factor, block in zip((1e-3, 1e5), blocks, strict=True):
        scaled[block] *= factor
    assert difference(sketcher.sketch(one), sketcher.sketch(scaled)) == pytest.approx(0.0, abs=1e-3)
    assert difference(sketcher.sketch(one), sketcher.sketch(-one)) == pytest.approx(2.0, abs=1e-3)
    assert difference(sketcher.sketch(one), sketcher.sketch(other)) == pytest.approx(1.0, abs=0.1)
    mixed = sketcher.sketch(0.6 * one + 0.8 * other)
    assert difference(sketcher.sketch(one), mixed) == pytest.approx(0.4, abs=0.1)
    assert difference(sketcher.sketch(torch.zeros(LAYOUT.size)), mixed) == 1.0


@pytest.mark.parametrize(("period", "noise"), [(100, 0.1), (100, 0.5), (400, 0.5), (400, 1.0)])
def test_the_limit_is_where_gradients_differ_too_much(period, noise):
    """Of a turning iterate the difference at any distance is known: one minus the cosine, and the noise."""
    _, thresholds = settled(period, noise)

    def difference_at(distance):
        return 1 - math.cos(2 * math.pi * distance / period) / (1 + noise**2)

    first = next(d for d in range(1, period) if difference_at(d) > TOO_DIFFERENT * difference_at(1))
    assert first / 4 <= thresholds[-1] <= 2 * first


def test_noise_that_hides_the_movement_leaves_no_limit():
    method, thresholds = settled(period=1000, noise=5.0)
    assert thresholds[-1] == math.inf
    assert not method.changes()


@pytest.mark.parametrize(("noise", "is_seen"), [(1.5, True), (4.0, False)])
def test_gradients_that_point_against_each_other_lower_the_limit(noise, is_seen):
    """Noise hides the movement from the differences, but not that the iterate has turned round."""
    method, thresholds = settled(period=60, noise=noise)
    assert (1 / (1 + noise**2) > AGAINST) == is_seen
    assert (thresholds[-1] <= 15) == is_seen
    assert any("oscillates" in change.reason for change in method.changes()) == is_seen


def test_almost_equal_gradients_are_never_stale():
    """Without noise every difference is movement, but this one is too small to matter."""
    assert settled(period=1e5, noise=0.0)[1][-1] == math.inf


@given(st.lists(st.tuples(st.integers(10, 60), st.sampled_from([20, 200, 1e5]), st.sampled_from([0.1, 3.0]))))
@settings(max_examples=20, deadline=None)
def test_a_stale_gradient_stays_stale(parts):
    """However the gradients change, the threshold rises by at most 1 per update, and is at least 1."""
    method, version, thresholds = AutoThreshold(Constant(0.1, 0.05), LAYOUT), 0, []
    for updates, period, noise in parts:
        for gradient in itertools.islice(turning(period, noise, version, version), updates):
            method.inspect(gradient, version)
            version += 1
            thresholds.append(method.threshold(version))
    assert all(later <= earlier + 1 for earlier, later in itertools.pairwise(thresholds))
    assert all(threshold >= 1 for threshold in thresholds)


def test_the_threshold_rises_slowly_and_more_slowly_after_each_fall():
    method, version = AutoThreshold(Constant(0.1, 0.05), LAYOUT), 0
    shortest = []  # pause before a rise, after each fall
    for part in range(3):
        for period, noise, updates in ((20, 0.1, 300), (1e5, 3.0, 900)):  # it turns quickly, then noise hides all
            for gradient in itertools.islice(turning(period, noise, part, version), updates):
                method.inspect(gradient, version)
                version += 1
            changes = [(change.version, change.threshold) for change in method.changes()]
            if noise == 0.1:
                assert method.threshold(version) <= 3
                fallen = changes[-1]
                continue
            steps = list(itertools.pairwise((fallen, *changes)))
            assert len(steps) >= 3
            assert all(later[1] in (2 * earlier[1] + 1, None) for earlier, later in steps)
            shortest.append(min(later[0] - earlier[0] for earlier, later in steps))
    assert shortest == [20, 40, 80]


@given(st.integers(0, 120), st.sampled_from([10, 50, 1e4]), st.integers(0, 20))
@settings(max_examples=20, deadline=None)
def test_the_threshold_continues_exactly_from_its_saved_state(saved_at, period, most_delay):
    one = AutoThreshold(Constant(0.1, 0.1), LAYOUT, seed=3)
    other = None
    for number, gradient in zip(range(160), turning(period, 0.3), strict=False):
        if number == saved_at:
            other = AutoThreshold(Constant(0.1, 0.1), LAYOUT, seed=3)
            other.load_state_dict(json.loads(json.dumps(one.state_dict(), allow_nan=False)))
            one.changes()
        for method in (one, other) if other else (one,):
            method.inspect(gradient, max(0, number - (number * number) % (most_delay + 1)))
    assert other is not None
    assert one.state_dict() == other.state_dict()
    assert one.changes() == other.changes()


def test_a_late_gradient_has_a_smaller_step():
    method = AutoThreshold(Constant(0.1, 0.05))
    assert [method.eta(5, delay, 4) for delay in (0, 3, 99)] == pytest.approx([0.1, 0.05, 0.01])


@pytest.mark.parametrize(("noise", "uses_all"), [(0.0, False), (30.0, True)])
def test_slow_workers_contribute_where_noise_dominates(noise, uses_all):
    """Without noise the threshold leaves out slow workers. With much noise it needs all of them."""
    problem = Quadratic(300, noise)
    layout = Layout(problem.parameters, GEOMETRY_MAPS["euclidean"])
    method = AutoThreshold(Constant(0.1, 0.05), layout)
    core = ServerCore(problem.initial(0), method, Update(layout, dtype=problem.dtype))
    Simulator(core, problem, Speeds([1.0] * 4 + [30.0] * 2)).run(seconds=400)
    slow = [core.workers[worker].accepted for worker in (4, 5)]
    assert (min(slow) >= 10) == uses_all
    assert (max(slow) < 10) != uses_all
