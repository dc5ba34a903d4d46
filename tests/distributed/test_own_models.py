"""The user's own models in real processes: trained, replayed, exported, loaded, evaluated and fine-tuned."""

import importlib
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ringmaster_dist.cli.main import main
from tests.distributed.processes import Run, check_finished, recompute

ROOT = Path(__file__).resolve().parents[2]

HEAD = """
import torch
from torch import nn
from torch.nn import functional as F
from ringmaster_dist.problems.module import ModuleProblem

def generator(*numbers):
    return torch.Generator().manual_seed(hash(numbers) % 2**60)

def factory(seed, device):
    return ModuleProblem(Model(), lambda *draw: [batch(*draw)], loss, evaluate=evaluate, device=device)

def evaluate(model):
    with torch.no_grad():
        return {"loss": float(loss(model, batch(7, 8, 9)))}
"""

CNN = """
class Model(nn.Sequential):  # the factory does not seed: its caller does
    def __init__(self):
        super().__init__(nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(),
                         nn.Linear(6 * 36, 2))

def batch(seed, worker, sequence):
    x = torch.randn(32, 1, 8, 8, generator=generator(seed, worker, sequence))
    return x, (x[:, 0, :4].mean((1, 2)) > x[:, 0, 4:].mean((1, 2))).long()

def loss(model, batch):
    x = batch[0] + 0.1 * torch.rand(1) if model.training else batch[0]  # draws by itself too
    return F.cross_entropy(model(x), batch[1])
"""

TIED = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.middle, self.head = nn.Embedding(12, 8), nn.Linear(8, 8), nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, tokens):
        return self.head(torch.tanh(self.middle(self.embed(tokens)))) * self.scale

def batch(seed, worker, sequence):
    return torch.randint(0, 12, (64,), generator=generator(seed, worker, sequence))

def loss(model, tokens):
    return F.cross_entropy(model(tokens), (tokens + 1) % 12)
"""

FROZEN = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh()).requires_grad_(False)
        self.middle, self.head = nn.Linear(16, 8), nn.Linear(8, 1)

    def forward(self, x):
        return self.head(torch.tanh(self.middle(self.backbone(x))))

def batch(seed, worker, sequence):
    return torch.randn(32, 6, generator=generator(seed, worker, sequence))

def loss(model, x):
    return F.mse_loss(model(x), x[:, :1])
"""

QUICK = ["problem=python", "cluster.workers=3", "cluster.unit_seconds=0.01", "budget.updates=60", "run.report=false",
         "method.eta=0.02", "resume=null"]  # fmt: skip


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Writes a module that this process and the run's processes can import, and returns it."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def write(name, text):
        (tmp_path / f"{name}.py").write_text(HEAD + text)
        importlib.invalidate_caches()
        return importlib.import_module(name)

    return write


def trained(directory, name, *overrides):
    with Run(directory, *QUICK, f"problem.target={name}:factory", f"run.dir={directory}", *overrides) as run:
        summary = check_finished(run)  # the replay is part of it
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return summary, rows[0]


def printed(capsys, *words):
    assert main(list(words)) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(("name", "text"), [("own_cnn", CNN), ("own_tied", TIED), ("own_frozen", FROZEN)])
def test_a_model_is_trained_replayed_exported_and_loaded(name, text, own, tmp_path, capsys):
    module, run = own(name, text), tmp_path / "run"
    summary, first = trained(run, name)
    assert summary["updates"] == 60
    assert summary["final_loss"] < 0.9 * first["loss"]
    evaluated = printed(capsys, "eval", str(run), f"target={name}:factory")
    assert f"loss {summary['final_loss']:.4f}" in evaluated
    printed(capsys, "export", str(run), str(tmp_path / "out.safetensors"), f"target={name}:factory")
    state = load_file(tmp_path / "out.safetensors")
    with safe_open(tmp_path / "out.safetensors", framework="pt") as file:
        assert file.metadata()["version"] == "60"
    torch.manual_seed(99)
    model = module.Model()
    untrained = module.evaluate(model.eval())["loss"]
    model.load_state_dict(state, strict=True)
    found = module.evaluate(model.eval())["loss"]
    assert found == pytest.approx(summary["final_loss"], rel=1e-6)
    assert found != pytest.approx(untrained, rel=1e-2)
    final = load_file(run / "final.safetensors")
    assert final.keys() == state.keys()
    assert all(torch.equal(final[key], state[key]) for key in state)
    for file in (tmp_path / "out.safetensors", run / "final.safetensors"):
        assert f"loss {found:.4f}" in printed(capsys, "eval", str(file), f"target={name}:factory")
    if name == "own_frozen":
        torch.manual_seed(0)  # run.seed
        untouched = module.Model().backbone.state_dict()
        for key in ("0.weight", "0.bias", "1.weight", "1.bias"):
            assert torch.equal(state[f"backbone.{key}"], untouched[key])
        fine_tune(module, run, summary, tmp_path, capsys)


def fine_tune(module, run, summary, tmp_path, capsys):
    """A run begins from its weights in another parameter order, and resumes. Weights that do not fit are refused."""
    tuned, target = tmp_path / "tuned", f"problem.target={module.__name__}:factory"
    _, first = trained(tuned, module.__name__, f"init={run}", "geometry=euclidean", "budget.updates=10")
    assert first["version"] == 0
    assert first["loss"] == summary["final_loss"]
    assert (tuned / "initial.safetensors").stat().st_mode & 0o777 == 0o600
    # The run needs nothing else when it is resumed, not even the weights it came from.
    (run / "checkpoints").rename(tmp_path / "elsewhere")
    same_line = [*QUICK[:-1], target, "geometry=euclidean", f"run.dir={tuned}", "resume=auto", "init=/nowhere"]
    with Run(tuned, *same_line, "budget.updates=20") as resumed:
        assert check_finished(resumed)["updates"] == 20
    assert f"init: {run}" in (tuned / "config.yaml").read_text()
    state = load_file(tmp_path / "out.safetensors")
    one = tmp_path / "one.safetensors"
    weight = state["head.weight"]
    for name, changed, words in (
        ("head.weight", None, "it has no 'head.weight'"),
        ("head.weight", torch.zeros(3, 8), "'head.weight' has the shape (3, 8), not (1, 8)"),
        ("head.weight", weight / 0, "not finite"),
        ("backbone.0.weight", state["backbone.0.weight"] + 1, "'backbone.0.weight', which is not trained, differs"),
    ):
        rest = {key: tensor for key, tensor in state.items() if key != name}
        save_file(rest if changed is None else {**rest, name: changed}, one)
        assert main(["train", *QUICK, target, f"init={one}", f"run.dir={tmp_path}/never"]) == 2
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert f"init={one}" in line
        assert words in line
    assert main(["train", f"resume={tuned}", f"init={one}"]) == 2
    assert "init: a run is resumed as it began" in capsys.readouterr().err
    assert main(["train", *QUICK, target, "init=/nowhere", f"run.dir={tmp_path}/never"]) == 2
    assert "/nowhere does not exist" in capsys.readouterr().err
    assert not (tmp_path / "never").exists()
    simulated = ["simulate", "problem=python", target, f"init={tmp_path}/out.safetensors", "cluster.workers=2"]
    assert main([*simulated, "budget.updates=2", f"run.dir={tmp_path}/simulated"]) == 0
    assert (tmp_path / "simulated/initial.safetensors").exists()
    row = json.loads((tmp_path / "simulated/metrics.jsonl").read_text().splitlines()[0])
    assert row["loss"] == pytest.approx(summary["final_loss"], rel=1e-6)


UNSTEADY = """
import os
class Model(nn.Linear):
    def __init__(self):
        super().__init__(4, 1)
        {start}

def batch(seed, worker, sequence):
    return torch.randn(8, 4, generator=generator(seed, worker, sequence))

def loss(model, x):
    return (model(x) - 1).square().mean() {more}
"""


@pytest.mark.parametrize(
    ("name", "changes", "warned", "words"),
    [
        ("own_noisy", {"start": "pass", "more": "* (1 + int.from_bytes(os.urandom(4)) / 2**39)"}, True,
         "the gradient is not a function of its arguments: computed twice at version"),
        ("own_forgetful", {"start": "self.weight.data.fill_(int.from_bytes(os.urandom(4)) / 2**32)", "more": ""}, False,
         "the factory own_forgetful:factory gives other weights each time"),
    ],
)  # fmt: skip
def test_a_replay_names_the_cause_when_a_gradient_does_not_repeat(name, changes, warned, words, own, tmp_path):
    own(name, UNSTEADY.format(**changes))
    target = f"problem.target={name}:factory"
    with Run(tmp_path / "run", *QUICK, target, f"run.dir={tmp_path}/run", "budget.updates=5") as run:
        code, _, errors = run.wait()
    assert code == 0, errors
    assert ("the gradient is not a function of its arguments" in errors) == warned
    outcome = recompute(tmp_path / "run")
    assert not outcome.same
    assert words in outcome.message
