"""The documents name files, functions and links that exist, and their examples run."""

import ast
import copy
import importlib
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringmaster_dist.algorithm.layout import GEOMETRY_MAPS, Layout
from ringmaster_dist.algorithm.schedules import Constant
from ringmaster_dist.algorithm.update import Update
from ringmaster_dist.config.compose import load
from ringmaster_dist.observe.run_directory import RunDirectory
from ringmaster_dist.problems.quadratic import Quadratic
from ringmaster_dist.protocol import Verdict
from ringmaster_dist.server.core import ServerCore
from ringmaster_dist.simulation.session import simulate
from ringmaster_dist.simulation.simulator import Simulator
from ringmaster_dist.simulation.speeds import Speeds
from tests.syntax import parsed

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "ringmaster_dist"
LINKING = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "docker/README.md")]
LINKING += sorted((ROOT / "docs").glob("*.md"))

_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def names_of(path):
    """Returns the functions and classes of a module, with members of a class as ``Class.name``."""
    found = set()
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    for node in parsed(path.read_text()).body:
        if isinstance(node, kinds):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, kinds)}
    return found


def test_architecture_names_files_and_functions_that_exist():
    text = (ROOT / "docs/architecture.md").read_text()
    files = set(re.findall(r"[\w/]+\.py\b", text))
    functions = set(re.findall(r"`([\w/]+\.py): ([\w.]+)`", text))
    assert len(files) > 20
    assert len(functions) > 25
    assert len(re.findall(r"`[\w/]+\.py: ", text)) == len(re.findall(r"`[\w/]+\.py: [\w.]+`", text))
    assert sorted(name for name in files if not ((PACKAGE / name).is_file() or (ROOT / name).is_file())) == []
    assert sorted((name, item) for name, item in functions if item not in names_of(PACKAGE / name)) == []


def test_architecture_steps_are_few_and_name_code():
    text = (ROOT / "docs/architecture.md").read_text()
    section = text.partition("## Follow one gradient\n")[2].partition("\n## ")[0]
    steps = re.split(r"^\d+\. ", section.partition("\nThe simulator")[0], flags=re.MULTILINE)[1:]
    assert 1 < len(steps) <= 15
    assert [step for step in steps if not re.search(r"`[\w/]+\.py: [\w.]+`", step)] == []


def headings(text):
    """Returns the anchors of the headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", _FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("document", LINKING, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_relative_links_lead_somewhere(document):
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", _FENCE.sub("", document.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = document.parent / name if name else document
        if not path.exists() or (anchor and path.suffix == ".md" and anchor not in headings(path.read_text())):
            broken.append(target)
    assert broken == []


def example(heading):
    """Runs the Python block of a section of docs/extending.md. Returns its names and its text."""
    section = (ROOT / "docs/extending.md").read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    (code,) = re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    namespace = {"__name__": "example"}
    exec(compile(code, f"docs/extending.md ({heading})", "exec"), namespace)
    return namespace, code


def test_the_problem_trains_in_the_simulator():
    names, _ = example("A problem")
    assert names["core"].version == 200
    assert names["last"] < 0.05 * names["first"]
    problem, iterate = names["problem"], names["core"].snapshot.iterate
    again = [problem.gradient(iterate, 3, 1, 5)[0] for _ in range(2)]
    assert torch.equal(*again)
    assert not torch.equal(again[0], problem.gradient(iterate, 3, 1, 6)[0])


def test_the_problem_runs_by_its_name(tmp_path, monkeypatch):
    """It is given as problem.target, which `train` and `simulate` import."""
    (tmp_path / "fit_of_the_documents.py").write_text(example("A problem")[1])
    monkeypatch.syspath_prepend(tmp_path)
    config = load([
        "problem=python", "problem.target=fit_of_the_documents:factory", "method=ringmaster", "method.eta=0.05",
        "cluster.workers=4", "budget.updates=100", "budget.seconds=null",
    ])  # fmt: skip
    directory = RunDirectory(str(tmp_path / "run"), name="x")
    summary = simulate(config, directory)
    assert summary.updates == 100
    assert summary.evaluation["loss"] < 0.5 * directory.metrics()[0].evaluation["loss"]


def test_the_method_waits_for_its_quorum():
    names, _ = example("A method")
    core, layout = names["core"], names["layout"]
    one, two, late = (names[name] for name in ("one", "two", "late"))
    assert [r.verdict for r in (one, two, late)] == [Verdict.ACCEPTED] * 3
    assert [(r.version, r.continue_at, r.delay) for r in (one, two, late)] == [(0, 1, 0), (0, 1, 0), (1, 2, 1)]
    torch.testing.assert_close(core.snapshot.iterate, torch.full((layout.size,), -0.1 / layout.size**0.5))
    again = core.push(1, 1, 0, torch.ones(layout.size))
    assert (again.verdict, again.reason) == (Verdict.INVALID, "this worker has contributed already")

    resumed = ServerCore(torch.zeros(layout.size), names["Quorum"](core.method.schedule, 2), Update(layout))
    resumed.load(copy.deepcopy(core.state()))
    for each in (core, resumed):
        assert each.version == 1
        each.leave(0)
        each.leave(2)  # the remaining worker has contributed, so the round is complete
        assert each.version == 2
    assert torch.equal(core.snapshot.iterate, resumed.snapshot.iterate)


def test_the_method_runs_in_the_simulator():
    names, _ = example("A method")
    problem = Quadratic(20, noise=0.0)
    layout = Layout(problem.parameters, GEOMETRY_MAPS["euclidean"])
    method = names["Quorum"](Constant(0.05, 0.1, 8), 2)
    core = ServerCore(problem.initial(0), method, Update(layout, dtype=problem.dtype))
    simulator = Simulator(core, problem, Speeds([1.0, 1.0, 1.0, 9.0]))
    simulator.run(seconds=100.0)
    assert core.accepted == 2 * core.version + len(method.contributors)
    assert core.invalid == 0
    assert core.version >= 100  # three workers of one second each: more than one update per second


@settings(max_examples=40)
@given(st.integers(0, 1000))
def test_the_geometry_has_its_properties(seed):
    names, _ = example("A geometry")
    generator = torch.Generator().manual_seed(seed)
    matrices, others = torch.randn(2, 3, 4, 7, dtype=torch.float64, generator=generator)
    matrices[1] = 0.0
    block = matrices.clone()
    ours = -names["entry_"](block) * block
    for matrix, direction, other in zip(matrices, ours, others, strict=True):
        assert torch.equal(direction, names["reference_entry"](matrix))
        assert names["size"](direction) <= 1 + 1e-9
        assert (matrix * direction).sum() <= (matrix * (other / names["size"](other))).sum() + 1e-9
    assert not ours[1].any()
    assert ours[0].any()


def public_names():
    section = (ROOT / "docs/extending.md").read_text().partition("\n## Public names\n")[2]
    return re.findall(r"^- `([\w.]+)` .+\.$", section, re.MULTILINE), section


def test_public_names_can_be_imported():
    names, section = public_names()
    assert len(names) == len(re.findall(r"^- ", section, re.MULTILINE)) > 15
    for name in names:
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), name


@pytest.mark.parametrize("heading", ["A problem", "A method", "A geometry"])
def test_examples_use_public_names_only(heading):
    imported = set()
    for node in ast.walk(parsed(example(heading)[1])):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("ringmaster_dist"):
            imported |= {f"{node.module}.{alias.name}" for alias in node.names}
    allowed = set(public_names()[0])
    assert {
        name for name in imported if name not in allowed and not any(a.startswith(f"{name}.") for a in allowed)
    } == set()


def test_extending_names_files_that_exist():
    text = _FENCE.sub("", (ROOT / "docs/extending.md").read_text())
    new = {"configs/method/quorum.yaml", "fit.py"}
    files = set(re.findall(r"`([\w/]+\.(?:py|yaml|md))`", text)) - new
    assert len(files) >= 8
    assert sorted(name for name in files if not (ROOT / name).is_file() and not (PACKAGE / name).is_file()) == []
    places = re.findall(r"`([\w/]+\.py)` [^`]*`(_?[A-Za-z_]+)`", text)  # the first name after a file is in it
    for path, name in places:
        source = PACKAGE / path if (PACKAGE / path).is_file() else ROOT / path
        assert re.search(rf"\b{name}\b", source.read_text()), (path, name)
