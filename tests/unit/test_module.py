"""A user's module as a problem: which parameters are trained, what a gradient depends on, which errors are raised."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from ringmaster_dist.algorithm.layout import GEOMETRY_MAPS, Layout
from ringmaster_dist.errors import Mistake
from ringmaster_dist.problems.module import STATISTICS_WORKER, ModuleProblem
from ringmaster_dist.problems.seeding import seeded


def batches(seed, worker, sequence):
    generator = torch.Generator().manual_seed(1 + sequence + 1000 * worker + 10_000_000 * seed)
    return [torch.randn(16, 4, generator=generator) for _ in range(2)]


def loss(model, batch):
    return (model(batch) - batch.sum(dim=1, keepdim=True)).square().mean()


def bound(module, draw=batches, its_loss=loss, **keywords):
    problem = ModuleProblem(module, draw, its_loss, **keywords)
    problem.bind(Layout(problem.parameters, GEOMETRY_MAPS["muon"]))
    return problem, problem.initial(0)


def small(*middle):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), *middle, nn.Linear(8, 1))


def test_a_gradient_with_dropout_repeats_and_differs_between_draws():
    problem, start = bound(small(nn.Dropout(0.5)))
    first = problem.gradient(start, 0, 1, 7)[0].clone()
    torch.rand(3)  # moves the generator that dropout uses
    assert torch.equal(problem.gradient(start, 0, 1, 7)[0], first)
    # The same batches with another draw of the mask: only the stream of the model differs.
    fixed, start = bound(small(nn.Dropout(0.5)), lambda seed, worker, sequence: batches(0, 0, 0))
    masks = [fixed.gradient(start, 0, worker, sequence)[0].clone() for worker, sequence in ((0, 0), (0, 1), (1, 0))]
    assert not torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[0], masks[2])


def test_every_global_generator_is_seeded_and_restored():
    def draws():
        return torch.rand(1).item(), random.random(), np.random.rand()

    def careless(seed, worker, sequence):
        seen.append(draws())
        return batches(seed, worker, sequence)

    seen = []
    problem, start = bound(small(), careless)
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    expected = [draws(), draws()]
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    got = [draws()]
    for sequence in (0, 1, 0):
        problem.gradient(start, 5, 0, sequence)
    got.append(draws())
    assert got == expected
    assert seen[0] == seen[2]
    assert all(a != b for a, b in zip(seen[0], seen[1], strict=True))


def test_seeding_may_be_nested():
    with seeded(1):
        inside = np.random.rand(), random.random(), torch.rand(1).item()
    with seeded(1):
        with seeded(2):
            np.random.rand(), random.random(), torch.rand(1)
        assert (np.random.rand(), random.random(), torch.rand(1).item()) == inside


class Counting(nn.Module):
    """Changes buffers in its forward pass in three ways: by a norm, in place, and by assignment."""

    def __init__(self):
        super().__init__()
        self.inner = small(nn.BatchNorm1d(8))
        self.register_buffer("table", torch.zeros(2, 2))
        self.register_buffer("assigned", torch.ones(3))
        self.register_buffer("absent", None)

    def forward(self, x):
        self.table += 1
        self.assigned = self.assigned * 2
        return self.inner(x) + self.table.sum() + self.assigned.sum() + self.inner[1].running_mean.sum()


def test_buffers_are_restored_before_the_next_gradient():
    module = Counting()
    problem, start = bound(module)
    before = {name: tensor.clone() for name, tensor in module.named_buffers()}
    first, its_loss = problem.gradient(start, 0, 0, 0)
    first = first.clone()
    changed = {name for name, tensor in module.named_buffers() if not torch.equal(tensor, before[name])}
    assert changed == set(before)  # so there is something to put back
    again, its_loss_again = problem.gradient(start, 0, 0, 0)
    assert its_loss == its_loss_again
    assert torch.equal(first, again)


def test_the_statistics_of_an_evaluation_are_those_of_its_weights():
    """Compares with an independent batch norm: the mean over batches of each batch's mean and unbiased variance."""
    module = small(nn.BatchNorm1d(8), nn.Dropout(0.5))
    seen = []

    def watch(model):
        seen.append((model[1].running_mean.clone(), model[1].running_var.clone(), model.training, model[2].training))
        return {"loss": float(loss(model, batches(0, 0, 0)[0]))}

    problem, start = bound(module, evaluate=watch, statistics_batches=5, seed=3)
    elsewhere = start + 0.3 * torch.randn(len(start), generator=torch.Generator().manual_seed(1))
    figures = problem.evaluate(elsewhere)
    mean, variance, *modes = seen[0]
    assert modes == [False, False]
    with torch.no_grad():
        inputs = [module[0](b) for i in range(5) for b in batches(3, STATISTICS_WORKER, i)]
    torch.testing.assert_close(mean, torch.stack([x.mean(0) for x in inputs]).mean(0))
    torch.testing.assert_close(variance, torch.stack([x.var(0, unbiased=True) for x in inputs]).mean(0))
    problem.gradient(start, 0, 0, 0)
    assert problem.evaluate(elsewhere) == figures  # whatever came between
    assert problem.evaluate(start) != figures
    assert module[1].momentum == 0.1


def test_instance_norm_averages_too():
    module = nn.Sequential(nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten(), nn.Linear(8, 1))
    problem, start = bound(
        module, lambda *draw: [b.reshape(8, 2, 4) for b in batches(*draw)], lambda model, x: model(x).square().mean(),
        statistics_batches=3,
    )  # fmt: skip
    state = problem.state_dict(start)
    inputs = [b.reshape(8, 2, 4) for i in range(3) for b in batches(0, STATISTICS_WORKER, i)]
    torch.testing.assert_close(state["0.running_mean"], torch.stack([x.mean((0, 2)) for x in inputs]).mean(0))


class FrozenNorm(nn.Module):
    """A model for fine-tuning, whose backbone stays in evaluation mode and keeps its statistics."""

    def __init__(self):
        super().__init__()
        self.backbone, self.head = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)), nn.Linear(8, 1)
        self.backbone.requires_grad_(False)
        self.backbone[1].running_mean.fill_(0.5)

    def train(self, mode=True):
        super().train(mode)
        self.backbone.eval()
        return self

    def forward(self, x):
        return self.head(self.backbone(x))


def test_frozen_parameters_are_not_trained_and_not_sent():
    torch.manual_seed(0)
    module = FrozenNorm()
    before = {name: tensor.clone() for name, tensor in module.backbone.state_dict().items()}
    problem, start = bound(module)
    assert sorted(p.name for p in problem.parameters) == ["head.bias", "head.weight"]
    assert len(start) == 9
    gradient, _ = problem.gradient(start, 0, 0, 0)
    assert gradient.abs().min() > 0
    state = problem.state_dict(start + 1.0)
    assert all(torch.equal(state[f"backbone.{name}"], tensor) for name, tensor in before.items())
    assert torch.equal(state["head.weight"], problem._layout.views(start + 1.0)["head.weight"])


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(10, 6), nn.Linear(6, 10, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Linear(3, 3)
        self.register_buffer("passing", torch.zeros(2), persistent=False)

    def forward(self, tokens):
        return self.head(self.embed(tokens))


def tokens(seed, worker, sequence):
    return [torch.randint(0, 10, (5, 4), generator=torch.Generator().manual_seed(sequence))]


def test_tied_weights_integers_and_unused_parameters():
    torch.manual_seed(0)
    problem, start = bound(
        Tied(), tokens, lambda model, x: nn.functional.cross_entropy(model(x).reshape(-1, 10), x.reshape(-1))
    )
    assert sorted(p.name for p in problem.parameters) == ["embed.weight", "unused.bias", "unused.weight"]
    gradient, _ = problem.gradient(start, 0, 0, 0)
    views = problem._layout.views(gradient)
    assert views["embed.weight"].abs().sum() > 0
    assert views["unused.weight"].abs().sum() == 0
    state = problem.state_dict(start + 1.0)
    assert set(state) == {"embed.weight", "head.weight", "unused.weight", "unused.bias"}
    assert torch.equal(state["head.weight"], state["embed.weight"])
    assert state["head.weight"].data_ptr() != state["embed.weight"].data_ptr()
    other = Tied()
    other.load_state_dict(state, strict=True)
    assert torch.equal(other.head.weight, problem._layout.views(start + 1.0)["embed.weight"])


def test_a_sparse_gradient_is_the_dense_one():
    def gradient(sparse):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Embedding(10, 3, sparse=sparse), nn.Linear(3, 1))
        problem, start = bound(module, tokens, lambda model, x: model(x).square().mean())
        return problem.gradient(start, 0, 0, 0)[0].clone()

    assert torch.equal(gradient(True), gradient(False))


def frozen(module):
    return module.requires_grad_(False)


@pytest.mark.parametrize(
    ("module", "keywords", "words"),
    [
        (frozen(small()), {}, ["no parameters that require a gradient"]),
        (nn.ReLU(), {}, ["ReLU", "no parameters that require a gradient"]),
        (small().half(), {}, ["'0.weight'", "float16", "float32"]),
        (small(), {"role": lambda name, p: "bias"}, ["'0.weight'", "'bias'", "matrix, embedding, output, scalar"]),
    ],
)
def test_modules_that_cannot_be_trained_are_refused(module, keywords, words):
    with pytest.raises(ValueError, match=words[0]) as raised:
        ModuleProblem(module, batches, loss, **keywords)
    assert isinstance(raised.value, Mistake)
    assert all(word in str(raised.value) for word in words)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("draw", "its_loss", "words"),
    [
        (lambda *draw: [], loss, "gave nothing"),
        (lambda *draw: iter(()), loss, "gave nothing"),
        (lambda *draw: None, loss, "gave None"),
        (batches, lambda model, x: model(x), r"shape \(16, 1\)"),
        (batches, lambda model, x: loss(model, x).item(), "loss gave float"),
        (batches, lambda model, x: loss(model, x).detach(), "does not require a gradient"),
    ],
)
def test_batches_and_losses_without_a_gradient_are_refused(draw, its_loss, words):
    problem, start = bound(small(), draw, its_loss)
    with pytest.raises(Mistake, match=words):
        problem.gradient(start, 0, 0, 0)


def test_batches_may_be_a_generator():
    listed, start = bound(small())
    lazy, _ = bound(small(), lambda *draw: (b for b in batches(*draw)))
    assert torch.equal(listed.gradient(start, 0, 0, 0)[0], lazy.gradient(start, 0, 0, 0)[0])


def test_the_fingerprint_covers_what_is_not_sent():
    def fingerprint(change=lambda module: None):
        torch.manual_seed(0)
        module = FrozenNorm()
        change(module)
        return ModuleProblem(module, batches, loss).data_fingerprint

    same = fingerprint()
    assert same == fingerprint()
    assert same == fingerprint(lambda m: m.head.weight.data.add_(1))  # trained: the server sends it
    assert same != fingerprint(lambda m: m.backbone[0].weight.data.add_(1e-3))
    assert same != fingerprint(lambda m: m.backbone[1].running_mean.add_(1e-3))
    assert ModuleProblem(small(), batches, loss).data_fingerprint == ""


def test_clip_can_be_changed():
    problem, start = bound(small())
    whole = float(problem.gradient(start, 0, 0, 0)[0].norm())
    problem.clip = whole / 2
    assert float(problem.gradient(start, 0, 0, 0)[0].norm()) == pytest.approx(whole / 2, rel=1e-4)


def test_spectral_norm_is_evaluated_and_exported_as_it_is_trained():
    """Its vectors restart at every gradient. An evaluation computes with the same vectors, whatever came before."""

    def made():
        torch.manual_seed(0)
        middle = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        return small(middle, nn.Tanh())

    def evaluate(model):
        return {"loss": float(loss(model, batches(9, 9, 9)[0]))}

    def one_batch(seed, worker, sequence):  # with several, each has one more power iteration
        return batches(9, 9, 9)[:1]

    problem, start = bound(made(), one_batch, evaluate=evaluate)
    moved = start + torch.randn(len(start), generator=torch.Generator().manual_seed(1))
    first = problem.evaluate(start), problem.evaluate(moved)
    other, _ = bound(made(), one_batch, evaluate=evaluate)
    assert (other.evaluate(moved), other.evaluate(start)) == first[::-1]
    loaded = made()
    loaded.load_state_dict(problem.state_dict(moved), strict=True)
    assert evaluate(loaded.eval()) == first[1]
    assert problem.gradient(moved, 0, 0, 0)[1] == pytest.approx(first[1]["loss"], rel=1e-5)
    assert problem.unusual_buffers == ["1.parametrizations.weight.0"]


def test_an_evaluation_that_writes_to_the_weights_writes_to_its_own_copy():
    def careless(model):
        with torch.no_grad():
            model[0].weight.mul_(0.5)
        return {"loss": float(loss(model, batches(9, 9, 9)[0]))}

    problem, start = bound(small(), evaluate=careless)
    kept = start.clone()
    assert problem.evaluate(start) == problem.evaluate(start)
    assert torch.equal(start, kept)


def test_large_buffers_changed_without_the_version_counter_are_restored():
    class Codebook(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("codes", torch.zeros(512, 256))

        def forward(self, x):
            if self.training:
                self.codes.data += 1.0
            return x + self.codes.mean()

    problem, start = bound(small(Codebook()), evaluate=lambda model: {"loss": 0.0})
    problem.evaluate(start)  # finds out which modules change their buffers
    first = problem.gradient(start, 0, 0, 0)[1]
    assert problem.gradient(start, 0, 0, 0)[1] == first


def test_running_statistics_stay_where_they_are_not_computed():
    """This holds without random draws, and for a norm that the loss does not reach."""
    norm = nn.BatchNorm1d(8)
    norm.running_mean.fill_(7.0)
    kept, start = bound(small(norm), statistics_batches=0)
    assert kept.state_dict(start)["1.running_mean"].tolist() == [7.0] * 8

    class Unused(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.used = nn.BatchNorm1d(3), nn.Linear(4, 1)
            self.norm.running_mean.fill_(7.0)

        def forward(self, x):
            return self.used(x)

    unused, start = bound(Unused())
    assert unused.state_dict(start)["norm.running_mean"].tolist() == [7.0] * 3


def test_a_loss_that_computes_gradients_can_have_batch_norm():
    def penalised(model, batch):
        batch = batch.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(batch).sum(), batch, create_graph=True)
        return slope.square().mean()

    problem, start = bound(small(nn.BatchNorm1d(8)), its_loss=penalised, evaluate=lambda model: {"loss": 1.0})
    assert problem.evaluate(start) == {"loss": 1.0}


def test_buffers_that_training_never_changes_are_recognised():
    module = small(nn.BatchNorm1d(8))
    module.register_buffer("table", torch.arange(3))
    module[0].bias.requires_grad_(False)
    problem, start = bound(module)
    assert set(problem.fixed_state(start)) == {"table", "0.bias"}
