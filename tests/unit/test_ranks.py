"""The mean over the ranks of a group: in one process, and in several that exchange it by gloo."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from ringmaster_dist.problems.quadratic import Quadratic
from ringmaster_dist.problems.ranks import gradient_in_turn, mean_loss

# Each rank writes what it has seen to its own file, and the test compares the files with numpy.
RANK = """
import os, sys, time
import numpy as np, torch
from ringmaster_dist.worker.ranks import DeviceExchange, RankLost, Ranks
rank, num, folder = int(os.environ["RANK"]), 3, sys.argv[1]
ranks = Ranks(rank, num, f"test-{os.getppid()}")
assert ranks.compare(rank, 2.0**53 - 1) == [[other, 2.0**53 - 1] for other in range(num)]
assert ranks.order(*([7, -1, 2**62] if rank == 0 else [])) == [7, -1, 2**62, 0, 0, 0]
assert ranks.text(2, "zwölf" if rank == 2 else "", 6) == "zwölf"
assert ranks.text(0, "", 0) == ""
for size in (1, 2, 7, 10_001):
    for kind in (np.float32, np.float64):
        gradient = np.load(f"{folder}/{size}-{kind.__name__}.npy")[rank]
        own = torch.from_numpy(gradient)
        ranks.choose_exchange("cpu", size, own.dtype)
        exact = ranks.mean(own)
        device = DeviceExchange(rank, num, size, own.dtype, "cpu")
        library, shared_by_library = device.mean(own).clone(), device.share(own)
        shared = ranks.share(own.clone())
        if rank == 0:
            np.save(f"{folder}/{size}-{kind.__name__}-mean.npy", exact.numpy())
            assert torch.allclose(library, exact)
        assert np.array_equal(shared.numpy(), np.load(f"{folder}/{size}-{kind.__name__}.npy")[0])
        assert torch.equal(shared_by_library, shared)
assert not ranks.is_interrupted(4)
ranks.compare(0.0)
if rank == 1:
    ranks.interrupt(4)
ranks.compare(0.0)
assert ranks.is_interrupted(4) and not ranks.is_interrupted(5)
if rank == 2:
    os._exit(0)  # it dies without a word
try:
    ranks.compare(0.0)
except RankLost:
    ranks.close()
    os._exit(0)
"""


def test_the_processes_of_a_group_agree(tmp_path):
    """The mean has the bits of numpy's sum in the order of the ranks, for fewer numbers than ranks too."""
    given = {}
    for size in (1, 2, 7, 10_001):
        for kind in (np.float32, np.float64):
            numbers = np.random.default_rng(size).normal(size=(3, size)) * 10.0 ** np.arange(3)[:, None]
            given[size, kind] = numbers.astype(kind)
            np.save(tmp_path / f"{size}-{kind.__name__}.npy", given[size, kind])
    processes = [
        subprocess.Popen([sys.executable, "-c", RANK, str(tmp_path)], env={**os.environ, "RANK": str(rank)},
                         stderr=subprocess.PIPE, text=True)
        for rank in range(3)
    ]  # fmt: skip
    errors = [process.communicate()[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], errors
    for (size, kind), (first, second, third) in given.items():
        mean = np.load(tmp_path / f"{size}-{kind.__name__}-mean.npy")
        assert np.array_equal(mean, ((first + second) + third) / kind(3))


def test_a_group_of_any_size_draws_what_no_other_draw_has():
    """The noise of the quadratic is a draw. A group has the mean of those that one worker would have in turn."""
    noisy, exact = Quadratic(4, 1.0), Quadratic(4, 0.0)
    at = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
    slope, loss = exact.gradient(at, 5, 2, 0)

    def noise(worker, sequence):
        return float((noisy.gradient(at, 5, worker, sequence)[0] - slope)[0])

    drawn = []
    for sequence in range(3):
        gradient, its_loss = gradient_in_turn(noisy, 4, at, 5, 2, sequence)
        expected = [noise(2, 4 * sequence + rank) for rank in range(4)]
        assert torch.allclose(gradient, slope + sum(expected) / 4)
        assert its_loss == pytest.approx(loss)
        drawn += expected
    assert len({*drawn, *(noise(worker, sequence) for worker in (0, 1, 3) for sequence in range(12))}) == 12 + 36


def test_the_mean_of_losses_may_be_no_number():
    assert mean_loss([1.0, 2.0, 6.0]) == 3.0
    assert np.isnan(mean_loss([1.0, float("inf"), float("-inf")]))
