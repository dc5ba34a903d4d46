"""Random draws: the scalar and vector versions agree, and their moments are right."""

import math
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringmaster_dist import profiles, randomness


@given(st.integers(0, 2**63), st.integers(0, 9), st.integers(0, 400), st.integers(0, 2**40))
def test_scalar_and_vector_draws_agree(seed, stream, worker, sequence):
    key = randomness.worker_key(seed, stream, worker)
    keys = randomness.worker_keys(seed, stream, worker + 1)
    assert int(keys[worker]) == key
    bits = randomness.bits(key, sequence)
    assert int(randomness.bits_of_many(keys[-1:], np.array([sequence]))[0]) == bits
    assert 0 < randomness.unit(bits) < 1


@given(st.floats(2.0**-53, 1 - 2.0**-53))
def test_half_normal_is_above_its_tangent(u):
    assert -NormalDist().inv_cdf(0.5 * u) >= randomness.HALF_NORMAL_SLOPE * (1 - u) * (1 - 1e-9)


def test_moments_and_independence():
    keys = randomness.worker_keys(1, randomness.STREAM_JITTER, 300)
    table = np.array([[randomness.half_normal(int(k), s) for s in range(100)] for k in keys])
    assert table.mean() == pytest.approx(math.sqrt(2 / math.pi), rel=0.02)
    assert table.std() == pytest.approx(math.sqrt(1 - 2 / math.pi), rel=0.02)
    assert abs(np.corrcoef(table[:-1].ravel(), table[1:].ravel())[0, 1]) < 0.03
    assert abs(np.corrcoef(table[:, :-1].ravel(), table[:, 1:].ravel())[0, 1]) < 0.03


def test_profiles():
    assert profiles.base_seconds("similar", 3, 2.0).tolist() == [2, 2, 2]
    assert profiles.base_seconds("sublinear", 5, 1.0).tolist() == pytest.approx([1, 2, 1 + 2**0.5, 1 + 3**0.5, 3])
    assert profiles.base_seconds("linear", 4, 0.5).tolist() == [0.5, 1, 1.5, 2]
    gpus = profiles.base_seconds("gpus", 9, 22.74e-3)
    assert gpus.tolist() == pytest.approx(
        [0.01418, 0.02274, 0.02653, 0.03842, 0.06415, 0.1286, 0.2152, 0.01418, 0.02274]
    )
    assert profiles.base_seconds("linear", 32, 22.74e-3)[-1] == pytest.approx(0.72768, rel=1e-3)


def test_jitter_is_half_normal_around_the_base_time():
    key = randomness.worker_key(0, randomness.STREAM_JITTER, 0)
    draws = [profiles.jittered_seconds(2.0, 0.05, key, s) for s in range(4000)]
    assert min(draws) >= 2.0
    assert np.mean(draws) - 2.0 == pytest.approx(0.1 * math.sqrt(2 / math.pi), rel=0.05)
    assert profiles.jittered_seconds(2.0, 0.0, key, 5) == 2.0
