"""A mistake in the user's code is reported once, with the user's own frames, before any process is started."""

import json
import random

import pytest
import torch

from ringmaster_dist.cli.main import main
from ringmaster_dist.config.build import build_layout, build_problem
from ringmaster_dist.config.compose import load
from ringmaster_dist.observe.page_data import page_data
from ringmaster_dist.observe.run_files import Recording

HEAD = """
import random, torch
from torch import nn
from ringmaster_dist.problems.module import ModuleProblem
from ringmaster_dist.problems.quadratic import Quadratic
def batches(seed, worker, sequence):
    return [torch.ones(2, 3) * sequence]
def loss(model, batch):
    return model(batch).square().mean()
"""
HEAD += """
def clamping(model, batch):
    with torch.no_grad():
        model.weight.clamp_(-0.01, 0.01)
    return loss(model, batch)
class Growing(nn.Linear):
    def forward(self, x):
        self.extra = nn.Parameter(torch.ones(1))
        return super().forward(x)
"""
PLAIN = "def factory(seed, device):\n    return ModuleProblem({module}, batches, {loss}{more})\n"


def plain(module="nn.Linear(3, 1)", loss="loss", more=""):
    return HEAD + PLAIN.format(module=module, loss=loss, more=more)


def own(body):
    return f"{HEAD}class Own(Quadratic):\n    {body}\ndef factory(seed, device):\n    return Own(4)\n"


def deep(where):
    return plain(more=f", {where}=broken").replace("def loss", "def broken(*given):\n    return [][7]\ndef loss")


# The text of the module; what is said in one line; whether the user's frames follow.
MISTAKES = [
    (HEAD + "def factory(seed, device):\n    return len(5)\n", "the factory failed", "in factory"),
    (HEAD + "def factory(seed, device):\n    return None\n", "gave None, which has no parameters", ""),
    (HEAD + "def factory(seed, device):\n    return nn.Linear(3, 1)\n", "type Linear, which has no dtype", ""),
    (HEAD + "def factory(device):\n    return 1\n", "does not take these problem.args: got an unexpected", ""),
    (HEAD + "factory = 5\n", "factory is an object of type int, not a function", ""),
    (HEAD + "def other(): pass\n", "it has no 'factory'", ""),
    ("def factory(:\n", "cannot be imported here", "SyntaxError"),
    ("import nothing_of_that_name\n", "No module named 'nothing_of_that_name'", ""),
    ("from json import nothing\n", "cannot be imported here", "ImportError"),
    ("{}[1]\n", "cannot be imported here", "KeyError: 1"),
    (plain("nn.ReLU()"), "the factory failed: the module (ReLU) has no parameters that require", ""),
    (plain("nn.Linear(3, 1).double()"), "parameter 'weight' is torch.float64", ""),
    (plain("nn.Linear(3, 0)"), "parameter 'weight' of shape (0, 3) is empty", ""),
    (plain(more=", role=lambda name, p: 'row'"), "'weight' was given the role 'row'", ""),
    (plain(loss="lambda model, batch: model(batch)"), "loss gave a tensor of shape (2, 1)", ""),
    (plain(loss="lambda model, batch: model(batch, 1)"), "the gradient could not be computed", "in <lambda>"),
    (plain().replace("* sequence]", "* sequence][1:]"), "batches(seed=0, worker=0, sequence=0) gave nothing", ""),
    (deep("evaluate"), "the evaluation failed", "in broken\n    return [][7]"),
    (plain(more=", evaluate=lambda model: None"), "the evaluation failed: evaluate gave NoneType", ""),
    (plain(more=", evaluate=lambda model: {'loss': 'low'}"), "evaluate gave 'loss' as str", ""),
    (own("gradient = lambda self, x, *r: (x[:2], 0.0)"), "the gradient is (2,) torch.float64: it has to be", ""),
    (own("gradient = lambda self, x, *r: (x.float(), 0.0)"), "the gradient is (4,) torch.float32: it has to be", ""),
    (own("gradient = lambda self, x, *r: (x / 0, 0.0)"), "at the initial iterate is not finite", ""),
    (plain(loss="clamping"), "the gradient has changed the weights in place", ""),
    (plain("Growing(3, 1)"), "'extra' was made or removed while a gradient was computed", ""),
    (plain("nn.LazyLinear(1)"), "parameter 'weight' has no shape yet", ""),
    (
        plain("nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))").replace("* sequence]", "* (sequence, 0)[worker]]"),
        "the state for an export could not be made",
        "IndexError",
    ),
    (own("evaluate = lambda self, x: 3.0"), "evaluate gave float: evaluate has to give a mapping", ""),
    (own("evaluate = lambda self, x: {'gap': x}"), "evaluate gave 'gap': Tensor", ""),
    (own("initial = lambda self, seed: torch.zeros(4)"), "the initial iterate is (4,) torch.float32", ""),
]


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Runs a command on a module with this text. Returns the exit code and the text on stderr."""
    monkeypatch.chdir(tmp_path)

    def run(text, *words):
        name = f"own_{random.randrange(10**12)}"
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        given = ["problem=python", f"problem.target={name}:factory", "cluster.workers=2", f"run.dir={tmp_path}/run"]
        code = main([*words, *given])
        return code, capsys.readouterr().err

    return run


@pytest.mark.parametrize(("text", "line", "frames"), MISTAKES, ids=[line for _, line, _ in MISTAKES])
def test_a_mistake_is_reported_once(text, line, frames, command, tmp_path):
    code, errors = command(text, "train")
    assert code == 2
    first, *rest = errors.strip().splitlines()
    assert first.startswith("ringmaster: problem")
    assert line in first
    assert frames in errors
    assert bool(rest) == bool(frames)
    assert "ringmaster_dist/" not in errors
    assert "site-packages" not in errors
    assert errors.count("Traceback") <= 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("index", [0, 15])
def test_simulate_reports_the_same_mistake(index, command):
    text, line, frames = MISTAKES[index]
    code, errors = command(text, "simulate")
    assert code == 2
    assert line in errors.splitlines()[0]
    assert frames in errors


def test_rows_by_speed_need_a_problem_that_draws_them(command, tmp_path):
    silent, old = "does not say how to draw a number of rows", "batches() takes 3 positional arguments"
    for text, line in ((plain(), silent), (own("pass"), silent), (plain(more=", batch=4"), old)):
        code, errors = command(text, "train", "cluster.batch=auto")
        assert (code, "Traceback" in errors) == (2, False)
        assert line in errors
    draws = plain(more=", batch=4").replace("worker, sequence)", "worker, sequence, rows)")
    code, errors = command(draws.replace("ones(2, 3)", "ones(rows, 3)"), "simulate", "cluster.batch=auto",
                           "budget.updates=20")  # fmt: skip
    assert (code, errors) == (0, "")
    lines = [json.loads(line) for line in (tmp_path / "run/trace.jsonl").read_text().splitlines()]
    assert {line["rows"] for line in lines} == {1, 2, 4}


def test_a_gradient_that_does_not_repeat_is_a_warning(command, tmp_path):
    counting = plain(loss="lambda model, batch: loss(model, batch) + next(count)")
    text = "import itertools\ncount = itertools.count()\n" + counting
    code, errors = command(text, "simulate", "budget.updates=3")
    assert code == 0
    assert len(errors.strip().splitlines()) == 1
    assert "the gradient is not a function of its arguments" in errors
    assert (tmp_path / "run/summary.json").exists()


def test_a_gradient_that_repeats_gives_no_warning(command):
    """There is no warning for dropout, for random numbers in `batches`, or for a factory that ignores the seed."""
    text = plain("nn.Sequential(nn.Linear(3, 3), nn.Dropout(), nn.Linear(3, 1))").replace("torch.ones", "torch.randn")
    assert command(text, "simulate", "budget.updates=3") == (0, "")


def test_a_factory_gives_the_same_bits_with_any_number_of_threads(tmp_path, monkeypatch):
    text = f"{HEAD}def factory(seed, device):\n    m = nn.Linear(300, 300)\n    nn.init.orthogonal_(m.weight)\n"
    (tmp_path / "own_orthogonal.py").write_text(text + "    return ModuleProblem(m, batches, loss)\n")
    monkeypatch.syspath_prepend(tmp_path)
    config, threads, found = (
        load(["problem=python", "problem.target=own_orthogonal:factory"]),
        torch.get_num_threads(),
        [],
    )
    for count in (1, 2):
        torch.set_num_threads(count)
        problem = build_problem(config)
        build_layout(config, problem)
        found.append(problem.initial(0))
        assert torch.get_num_threads() == count
    torch.set_num_threads(threads)
    assert torch.equal(*found)


def test_any_name_and_number_of_an_evaluation_is_shown(command, tmp_path):
    """It shows names that contain markup, names that the package uses itself, and numbers that are not finite."""
    figures = "{'[/x] y': 1.0, 'time': 7.0, 'version': float('nan'), 'f1[macro]': 0.5, 'accepted': -1}"
    assert command(plain(more=f", evaluate=lambda model: {figures}"), "simulate", "budget.updates=3") == (0, "")
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert (rows[0]["version"], rows[0]["time"], rows[0]["accepted"]) == (0, 0.0, 0)
    assert rows[0]["evaluation"] == {"[/x] y": 1.0, "time": 7.0, "version": None, "f1[macro]": 0.5, "accepted": -1.0}
    totals = page_data([Recording(tmp_path / "run")])["runs"][0]["totals"]
    assert totals["evaluation"] == {"[/x] y": 1.0, "time": 7.0, "f1[macro]": 0.5, "accepted": -1.0}


def test_a_simulation_without_finite_gradients_ends(command, tmp_path):
    steep = plain(loss="lambda model, batch: 1e3 * model(batch + 1.0).pow(4).mean()")
    words = [
        "geometry=euclidean",
        "geometry.matrix=none",
        "geometry.scalar=none",
        "method.eta=1e3",
        "budget.updates=999",
    ]
    assert command(steep, "simulate", "budget.seconds=null", *words)[0] == 1
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["diverged"], summary["ended"]) == (True, "diverged")


def test_a_wrong_data_path_leaves_no_run_directory(tmp_path, capsys):
    words = ["problem=nanochat", "data=text", f"data.path={tmp_path}/nowhere", f"run.dir={tmp_path}/run"]
    assert main(["train", *words]) == 2
    assert "nowhere does not exist" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
