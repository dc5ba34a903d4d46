"""Schedules, compared with the paper's formulas evaluated by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringmaster_dist.algorithm.schedules import Constant, Constants, Ramped, agnostic, theory


@pytest.mark.parametrize(("k", "threshold"), [(0, 1), (1, 1), (3, 1), (4, 2), (8, 2), (9, 3), (8648, 92), (8649, 93)])
def test_agnostic_threshold_is_the_exact_root(k, threshold):
    assert agnostic(1.0).threshold(k) == threshold


def test_agnostic_steps_and_weights():
    schedule = agnostic(2.0)
    assert [schedule.alpha(k) for k in (0, 1, 4, 100)] == [1.0, 1.0, 0.5, 0.1]
    assert schedule.eta(0) == 2.0
    assert schedule.eta(15) == pytest.approx(2.0 / 8.0)
    assert agnostic(2.0, generalized=True).eta(0) == pytest.approx(2.0 / 17.0)
    assert agnostic(2.0, known_l1=0.5).eta(0) == pytest.approx(1 / (17 * 0.5))


@given(st.integers(0, 10**12))
def test_the_threshold_grows_by_at_most_one(k):
    """This is why a stale computation stays stale."""
    assert 0 <= agnostic(1.0).threshold(k + 1) - agnostic(1.0).threshold(k) <= 1


def test_theorem_one():
    l0, sigma, rho, gap, k = 2.0, 0.5, 3.0, 8.0, 10_000
    smooth = theory(Constants(l0, 0.0, sigma, rho, gap, k))
    alpha = math.sqrt(gap * l0) / (rho * sigma * math.sqrt(k))
    assert smooth.alpha_value == pytest.approx(alpha)
    assert smooth.threshold_value == math.ceil(1 / alpha) == 38
    first, noisy = math.sqrt(gap / (l0 * k)), gap**0.75 / (l0**0.25 * (rho * sigma) ** 0.5 * k**0.75)
    assert smooth.eta_value == pytest.approx(min(first, noisy))
    l1 = 400.0
    general = theory(Constants(l0, l1, sigma, rho, gap, k))
    assert general.eta_value == pytest.approx(math.sqrt(gap * l0) / (8 * l1 * rho * sigma * math.sqrt(k)))
    assert general.alpha_value == smooth.alpha_value


def test_theorem_one_without_noise():
    quiet = theory(Constants(2.0, 0.0, 0.0, 1.0, 8.0, 100))
    assert (quiet.alpha_value, quiet.threshold_value) == (1.0, 1)
    assert quiet.eta_value == pytest.approx(math.sqrt(8 / 200))
    assert theory(Constants(2.0, 100.0, 0.0, 1.0, 8.0, 100)).eta_value == pytest.approx(1 / 800)


def test_warmup_and_decay():
    ramp = Ramped(Constant(1.0, 0.05, 4), warmup=3, decay=4, total=10, final_fraction=0.2)
    assert [round(ramp.eta(k), 3) for k in range(10)] == [0.25, 0.5, 0.75, 1, 1, 1, 0.8, 0.6, 0.4, 0.2]
    assert ramp.eta(50) == pytest.approx(0.2)
    assert (ramp.alpha(7), ramp.threshold(7)) == (0.05, 4)
