"""The model of how large a cluster one server supports."""

import pytest

from ringmaster_dist.bench.scale import (
    Machine,
    Model,
    fitted,
    host_seconds,
    largest_cluster,
    orthogonalization_flops,
    transfer_seconds,
    update_seconds,
)

MODEL = Model("m", 1_000_000, 2e9)


def test_flops_of_a_square_and_a_wide_matrix():
    assert orthogonalization_flops([(10, 10)]) == 5 * 2 * 3 * 10**3
    assert orthogonalization_flops([(10, 40)]) == orthogonalization_flops([(40, 10)]) == 5 * 2 * (2 * 4000 + 1000)


def test_the_fit_recovers_the_rates_of_a_machine():
    machine = Machine("x", 3e10, 7e9)
    other = Model("n", 5_000_000, 1e8)
    found = fitted("y", [(model, update_seconds(model, machine)) for model in (MODEL, other)])
    assert found.flops_per_second == pytest.approx(3e10)
    assert found.memory_bytes_per_second == pytest.approx(7e9)


def test_how_much_each_remedy_helps():
    link = 1e9
    assert transfer_seconds(MODEL, link, 2) == transfer_seconds(MODEL, link, 4) / 2
    assert transfer_seconds(MODEL, link, 4, shards=4) == transfer_seconds(MODEL, link, 4) / 4
    machine = Machine("x", 1e10, 1e10)
    assert update_seconds(MODEL, machine, shards=4) == update_seconds(MODEL, machine) / 4
    assert largest_cluster(100.0, 2.0) == 50
    assert largest_cluster(100.0, 2.0, per_exchange=8) == 400
    gpu = machine._replace(copy_bytes_per_second=1e9, cores=4, cpu_seconds_per_byte=2e-9)
    assert host_seconds(MODEL, gpu, 4) == pytest.approx(4e6 / 1e9)  # the copies take longer than the cores
    assert host_seconds(MODEL, gpu._replace(cores=1), 2) == pytest.approx(2e6 * 2e-9)
