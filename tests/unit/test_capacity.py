"""What one server carries, on paper."""

import pytest

from ringmaster_dist.bench.scale import (
    Machine,
    Model,
    fitted,
    largest_cluster,
    orthogonalization_flops,
    transfer_seconds,
    update_seconds,
)

MODEL = Model("m", 1_000_000, 2e9)


def test_flops_of_a_square_and_a_wide_matrix():
    assert orthogonalization_flops([(10, 10)]) == 5 * 2 * 3 * 10**3
    assert orthogonalization_flops([(10, 40)]) == orthogonalization_flops([(40, 10)]) == 5 * 2 * (2 * 4000 + 1000)


def test_the_rates_of_a_machine_are_found_again():
    machine = Machine("x", 3e10, 7e9)
    other = Model("n", 5_000_000, 1e8)
    found = fitted("y", [(model, update_seconds(model, machine)) for model in (MODEL, other)])
    assert found.flops_per_second == pytest.approx(3e10)
    assert found.memory_bytes_per_second == pytest.approx(7e9)


def test_what_each_remedy_buys():
    link = 1e9
    assert transfer_seconds(MODEL, link, 2) == transfer_seconds(MODEL, link, 4) / 2
    assert transfer_seconds(MODEL, link, 4, shards=4) == transfer_seconds(MODEL, link, 4) / 4
    machine = Machine("x", 1e10, 1e10)
    assert update_seconds(MODEL, machine, shards=4) == update_seconds(MODEL, machine) / 4
    assert largest_cluster(100.0, 2.0) == 50
    assert largest_cluster(100.0, 2.0, accumulation=8) == 400
