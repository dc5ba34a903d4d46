"""The default step size trains with every method, on every kind of problem."""

import pytest
import torch
from torch import nn

from ringmaster_dist.config.compose import groups, load
from ringmaster_dist.observe.records import objective_of
from ringmaster_dist.observe.run_directory import RunDirectory
from ringmaster_dist.problems.module import ModuleProblem
from ringmaster_dist.simulation.session import simulate

PROBLEMS = {
    "quadratic": ["problem=quadratic", "budget.updates=400"],
    "nanochat": ["problem=nanochat", "problem.validation_rows=8", "problem.final_tokens=1024", "budget.updates=15"],
    "cnn": ["problem=python", "problem.target=tests.unit.test_defaults:cnn", "budget.updates=100"],
}


def cnn(seed, device):
    """Returns a problem with two classes of 6 x 6 pictures. The upper half is brighter or darker."""
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Dropout(0.1),
                           nn.Linear(8 * 16, 2))  # fmt: skip

    def pictures(key, count):
        generator = torch.Generator().manual_seed(key)
        labels = torch.randint(2, (count,), generator=generator)
        x = torch.randn(count, 1, 6, 6, generator=generator)
        x[:, :, :3] += (2.0 * labels - 1.0)[:, None, None, None]
        return x, labels

    def loss(model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    return ModuleProblem(
        module,
        lambda seed, worker, sequence: [pictures(1 + 1000 * worker + sequence, 16)],
        loss,
        evaluate=lambda model: {"loss": float(loss(model, pictures(0, 128)))},
        device=device,
    )


def fallen_to(directory, summary):
    """The objective at the end, as a part of its first value."""
    name = objective_of(summary.evaluation)
    return summary.evaluation[name] / directory.metrics()[0].evaluation[name]


@pytest.mark.parametrize("method", groups()["method"])
@pytest.mark.parametrize("problem", PROBLEMS)
def test_the_default_step_lowers_the_loss_with_every_method(problem, method, tmp_path):
    words = [f"method={method}", *PROBLEMS[problem], "cluster.workers=4", "budget.seconds=null", "run.trace=false"]
    directory = RunDirectory(str(tmp_path / "run"), name="x")
    summary = simulate(load(words), directory)
    assert fallen_to(directory, summary) < 0.99
    assert summary.diverged is False


@pytest.mark.parametrize("geometry", groups()["geometry"])
def test_the_default_step_lowers_the_loss_with_every_geometry(geometry, tmp_path):
    for problem in ("quadratic", "cnn"):  # a language model in each of them is what ``experiment steps`` plays
        words = PROBLEMS[problem]
        shared = [f"geometry={geometry}", "cluster.workers=4", "budget.seconds=null", "run.trace=false"]
        directory = RunDirectory(str(tmp_path / problem), name="x")
        assert fallen_to(directory, simulate(load([*words, *shared]), directory)) < 0.99, problem
