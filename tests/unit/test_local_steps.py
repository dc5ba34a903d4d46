"""Several steps per push, compared with loops that share no code with the package."""

import json

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from ringmaster_dist import randomness
from ringmaster_dist.algorithm.names import MIXED
from ringmaster_dist.config import build
from ringmaster_dist.config.build import accepted_tokens, build_core, build_layout, build_problem
from ringmaster_dist.config.compose import compose, from_yaml, load
from ringmaster_dist.config.errors import UserError
from ringmaster_dist.config.profile_file import cluster_seconds
from ringmaster_dist.observe.run_directory import RunDirectory
from ringmaster_dist.problems import Interrupted
from ringmaster_dist.problems.local_steps import LocalSteps, sequence_of_step
from ringmaster_dist.problems.module import ModuleProblem
from ringmaster_dist.problems.quadratic import Quadratic
from ringmaster_dist.problems.ranks import gradient_in_turn, sequence_of
from ringmaster_dist.profiles import base_seconds, jittered_seconds
from ringmaster_dist.protocol import Interruptions, Verdict
from ringmaster_dist.server import weights
from ringmaster_dist.server.meter import WorkerMeasurements
from ringmaster_dist.simulation.cluster_times import gradient_times
from ringmaster_dist.simulation.session import simulate
from tests.transcription import play

STEPS, ETA, BETA, SEED, WORKER = 3, 0.05, 0.8, 7, 2


@pytest.mark.parametrize(("method", "given"), [("ringmaster", ["method.threshold=4"]), ("synchronous", [])])
def test_a_simulation_equals_the_transcription(method, given, tmp_path):
    """Every event and the final iterate. A push takes as long as its steps together."""
    config = load([
        "problem.dim=40", "problem.noise=0", "cluster.workers=5", "cluster.profile=linear", "cluster.jitter=0.1",
        f"method={method}", *given, "method.eta=0.5", "method.beta=0.6", f"local.steps={STEPS}", "local.eta=0.2",
        f"local.beta={BETA}", "budget.seconds=90",
    ])  # fmt: skip
    base = [STEPS * float(seconds) for seconds in base_seconds("linear", 5, 1.0)]
    keys = [randomness.worker_key(0, randomness.STREAM_JITTER, worker) for worker in range(5)]
    events, iterate, _ = play(
        method, 5, lambda i, sequence: jittered_seconds(base[i], 0.1, keys[i], sequence),
        eta=0.5, dim=40, seconds=90, threshold=4, beta=0.6, local=(STEPS, 0.2, BETA),
    )  # fmt: skip
    summary = simulate(config, RunDirectory(str(tmp_path / "run"), name="x"))
    records = [json.loads(line) for line in (tmp_path / "run/trace.jsonl").read_text().splitlines()]
    assert [(r["time"], r["worker"], r["gradient_version"], r["version"], r["verdict"]) for r in records] == events
    assert len(events) > 20
    expected = Quadratic(40).evaluate(torch.from_numpy(iterate))["gap"]
    assert summary.evaluation["gap"] == pytest.approx(expected, rel=1e-9)


class Small(nn.Module):
    """Matrices and vectors in turn, so that the order of a layout with oracles is not that of the module."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def batch_of(seed, worker, sequence):
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(1000 * seed + 100 * worker + sequence))


def loss_of(module, x):
    return (module(x) - x[:, :2]).square().mean()


def make(seed, device, bad_from=10**9):
    """A factory of a user. From the draw ``bad_from`` on, gradients are not numbers."""
    drawn = []

    def batches(seed, worker, sequence):
        drawn.append(sequence)
        return [batch_of(seed, worker, sequence) * (float("nan") if sequence >= bad_from else 1.0)]

    torch.manual_seed(seed)
    problem = ModuleProblem(Small(), batches, loss_of)
    problem.drawn = drawn
    return problem


def built(*overrides):
    config = load([
        "problem=python", "problem.target=tests.unit.test_local_steps:make", "geometry.matrix=euclidean",
        "geometry.scalar=sign", "geometry.radius.scalar=0.3", "geometry.weight_decay.matrix=0.2", "run.seed=7",
        f"local.steps={STEPS}", f"local.eta={ETA}", f"local.beta={BETA}", "method.eta=0.7", "method.beta=0.9",
        *overrides,
    ])  # fmt: skip
    problem = build_problem(config)
    return problem, build_core(config, problem)


def travelled(named, sequence):
    """The parameters after the steps, by name, and the losses. The norms are those of `built`."""
    module = Small()
    module.load_state_dict(named)
    momenta = {name: torch.zeros_like(p) for name, p in module.named_parameters()}
    losses = []
    for step in range(STEPS):
        module.zero_grad()
        loss = loss_of(module, batch_of(SEED, WORKER, STEPS * sequence + step))
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for name, p in module.named_parameters():
                momenta[name] = BETA * momenta[name] + (1 - BETA) * p.grad
                u = BETA * momenta[name] + (1 - BETA) * p.grad
                if p.ndim == 2:
                    p.copy_((1 - ETA * 0.2) * p - ETA * u / u.norm())
                else:
                    p.copy_(p - ETA * 0.3 * u.sign())
    return module.state_dict(), losses


def test_a_module_travels_as_in_a_plain_loop_and_the_server_adds_momentum():
    problem, core = built()
    assert isinstance(problem, LocalSteps)
    layout, start = core.update.layout, core.snapshot.iterate.clone()
    named = weights.by_name(problem, layout, start)
    assert named.keys() == Small().state_dict().keys()
    distance, loss = problem.gradient(start, SEED, WORKER, 5)
    ends, losses = travelled(named, 5)
    assert problem.drawn[-STEPS:] == [15, 16, 17]
    assert loss == pytest.approx(sum(losses) / STEPS)
    for name, view in layout.views(distance).items():
        assert torch.allclose(view, named[name] - ends[name], atol=1e-6), name
        assert view.abs().max() > 0.01
    core.join(WORKER)
    assert core.push(WORKER, 0, 0, distance).verdict is Verdict.ACCEPTED
    # The momentum is a tenth of the distance, and Nesterov's direction is 0.9 of it and another tenth.
    assert torch.allclose(core.snapshot.iterate, start - 0.7 * (0.9 * 0.1 + 0.1) * distance, atol=1e-6)


def test_a_push_does_not_depend_on_earlier_ones_and_can_be_interrupted_between_steps():
    problem, core = built()
    start = core.snapshot.iterate.clone()
    first = problem.gradient(start, SEED, WORKER, 0)[0].clone()
    asked = iter([False, False, True])  # a gradient of this module asks once, as does the loop before each step
    with pytest.raises(Interrupted):
        problem.gradient(start, SEED, WORKER, 1, lambda: next(asked))
    assert problem.drawn[STEPS:] == [3]
    assert torch.equal(problem.gradient(start, SEED, WORKER, 0)[0], first)
    assert torch.equal(built()[0].unwrapped.initial(7), start)
    assert problem.evaluate(start) == problem.unwrapped.evaluate(start)


def test_a_gradient_that_is_no_number_is_refused_by_the_server():
    problem, core = built("problem.args.bad_from=1", "geometry.matrix=spectral", "geometry.orthogonalization=exact")
    core.join(WORKER)
    distance, _ = problem.gradient(core.snapshot.iterate, SEED, WORKER, 0)
    assert problem.drawn == [0, 1]
    assert core.push(WORKER, 0, 0, distance).verdict is Verdict.INVALID


def test_no_two_steps_draw_the_same():
    """Steps of all ranks of a group together draw what one worker would draw in turn."""
    drawn = [
        sequence_of_step(step, 4, sequence_of(rank, 3, sequence))
        for sequence in range(5) for rank in range(3) for step in range(4)
    ]  # fmt: skip
    assert drawn == list(range(60))
    problem, core = built()
    start = core.snapshot.iterate
    mean, _ = gradient_in_turn(problem, 2, start, SEED, WORKER, 1)
    parts = [problem.gradient(start, SEED, WORKER, 2 + rank)[0].clone() for rank in range(2)]
    assert torch.equal(mean, (parts[0] + parts[1]) / 2)


def test_one_step_is_the_problem_itself():
    config = load(["local.steps=1"])
    problem = build_problem(config)
    assert type(problem) is Quadratic
    assert build_layout(config, problem).fingerprint == build_layout(load([]), Quadratic()).fingerprint


def test_times_and_tokens_are_those_of_a_push():
    config = load(["problem=nanochat", "local.steps=5", "cluster.workers=3", "cluster.profile=linear"])
    assert cluster_seconds(config, 3).tolist() == [5.0, 10.0, 15.0]
    worker = WorkerMeasurements(0, 0, 3, 0, 0, Interruptions(), 0.0, 0.0, ranks=2)  # with 3 accepted pushes
    assert accepted_tokens(config)(worker) == 3 * 2 * 5 * 4 * 128
    assert gradient_times({"times": "2,1"}, False, config)[0] == [5.0, 10.0]
    assert gradient_times({}, False, config)[0] == [5.0, 10.0, 15.0]


def test_defaults_and_mistakes_of_the_keys():
    config = load(["problem=nanochat", "geometry=scion", "local.steps=8"])
    assert (config.local.eta, config.local.beta) == (0.01, 0.95)
    assert (config.method.eta, config.method.beta) == (0.25, 0.0)
    assert load(["method.beta=null"]).method.beta == 0.95
    old = compose([], "train")
    del old.local
    assert from_yaml(OmegaConf.to_yaml(old)).local.steps == 1
    for overrides, message in [
        (["local.steps=0"], "local.steps=0: must be a whole number of at least 1"),
        (["local.eta=0.1"], "local.eta=0.1 counts only with local.steps above 1"),
        (["local.steps=2", "method.schedule=theory", "budget.updates=9", "method.constants.smoothness=1",
          "method.constants.noise=1", "method.constants.initial_gap=1"], "method.schedule=theory is for single"),
    ]:  # fmt: skip
        with pytest.raises(UserError, match=message):
            load(overrides)


def test_only_a_server_s_precision_depends_on_its_processor(monkeypatch):
    """A replay takes the steps of all workers on one machine, and a simulation is the same on every machine."""
    monkeypatch.setattr(build, "quick_precision", lambda *given: MIXED)
    words = ["problem=python", "problem.target=tests.unit.test_local_steps:make", "local.steps=2"]
    for given, of_steps, of_server in (("auto", "float32", MIXED), ("null", "float32", "float32"),
                                       ("bfloat16", "bfloat16", "bfloat16")):  # fmt: skip
        config = load([*words, f"geometry.precision={given}"])
        problem = build_problem(config)
        assert problem._update.precision == of_steps
        assert build_core(config, problem).update.precision == of_steps
        assert build_core(config, problem, precision="auto").update.precision == of_server
    config = load([*words, "geometry.precision=auto"])
    assert build_core(config, build_problem(config), precision="bfloat16").update.precision == "bfloat16"  # a replay
