"""The quadratic, compared with dense linear algebra."""

import numpy as np
import pytest
import torch

from ringmaster_dist.problems.quadratic import Quadratic
from tests.transcription import quadratic


@pytest.mark.parametrize("dim", [1, 2, 3, 17, 60])
def test_gradient_loss_and_gap(dim):
    problem = Quadratic(dim, noise=0.0)
    matrix, b, x0 = quadratic(dim)
    assert problem.initial(0).tolist() == x0.tolist()
    x = np.random.default_rng(dim).normal(size=dim)
    gradient, loss = problem.gradient(torch.from_numpy(x), 0, 0, 0)
    np.testing.assert_allclose(gradient.numpy(), matrix @ x - b, rtol=1e-12, atol=1e-12)
    assert loss == pytest.approx(x @ matrix @ x / 2 - b @ x, rel=1e-12)
    best = np.linalg.solve(matrix, b)
    smallest = best @ matrix @ best / 2 - b @ best
    assert problem.evaluate(torch.from_numpy(x))["gap"] == pytest.approx(loss - smallest, rel=1e-9)
    assert problem.evaluate(torch.from_numpy(best))["gap"] == pytest.approx(0, abs=1e-20)


def test_noise_is_one_number_for_all_coordinates_and_a_function_of_its_draw():
    problem = Quadratic(9, noise=0.5)
    x = torch.zeros(9, dtype=torch.float64)
    clean, _ = Quadratic(9, noise=0.0).gradient(x, 0, 0, 0)
    draws = []
    for worker in range(40):
        for sequence in range(50):
            noise = problem.gradient(x, 7, worker, sequence)[0] - clean
            assert noise.std() < 1e-12
            draws.append(float(noise[0]))
    assert len(set(draws)) == 2000
    assert np.mean(draws) == pytest.approx(0, abs=0.05)
    assert np.std(draws) == pytest.approx(0.5, rel=0.05)
    assert float((problem.gradient(x, 7, 3, 4)[0] - clean)[0]) == draws[3 * 50 + 4]
    assert float((problem.gradient(x, 8, 3, 4)[0] - clean)[0]) != draws[3 * 50 + 4]


def test_gradient_is_fresh_memory():
    problem = Quadratic(5, noise=0.0)
    x = torch.ones(5, dtype=torch.float64)
    first, _ = problem.gradient(x, 0, 0, 0)
    kept = first.clone()
    problem.gradient(2 * x, 0, 0, 1)
    assert torch.equal(first, kept)
    assert torch.equal(x, torch.ones(5, dtype=torch.float64))
