"""Files of weights by name: of this version, of earlier versions, and of other programs."""

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ringmaster_dist.algorithm.layout import GEOMETRY_MAPS, Layout, Parameter
from ringmaster_dist.config.build import build_model_config, build_problem
from ringmaster_dist.config.compose import compose, load
from ringmaster_dist.config.describe import annotated
from ringmaster_dist.config.errors import UserError
from ringmaster_dist.observe.run_files import BEST
from ringmaster_dist.problems.nanochat.model import NanoChat
from ringmaster_dist.problems.quadratic import Quadratic
from ringmaster_dist.runtime.best_weights import BestWeights
from ringmaster_dist.runtime.saved_weights import find_weights
from ringmaster_dist.server import weights


def test_a_file_holds_the_tensors_and_the_number_of_updates(tmp_path):
    tensors = {"version": torch.arange(3), "turned": torch.arange(6.0).reshape(2, 3).t()}
    weights.write(tmp_path / "a.safetensors", tensors, 41)
    found, version = weights.read(tmp_path / "a.safetensors")
    assert version == 41
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]


@pytest.mark.parametrize("metadata", [None, {"version": "a few"}])
def test_a_file_of_another_program_has_no_number_of_updates(metadata, tmp_path):
    save_file({"w": torch.zeros(2)}, tmp_path / "a.safetensors", metadata=metadata)
    assert weights.read(tmp_path / "a.safetensors")[1] is None


def test_the_order_in_a_file_does_not_matter(tmp_path):
    parameters = [Parameter("a", (2,), "scalar"), Parameter("b", (2, 2))]
    first, second = (Layout(order, GEOMETRY_MAPS["muon"]) for order in (parameters, parameters[::-1]))
    iterate = torch.arange(6.0)
    moved = weights.flat(first.views(iterate), second, torch.float64)
    assert moved.dtype == torch.float64
    assert moved.tolist() == [2, 3, 4, 5, 0, 1]


def test_exports_of_version_0_2_are_read(tmp_path):
    """They have the number of updates as a tensor, and otherwise only the parameters."""
    file = tmp_path / "weights.safetensors"
    save_file({"x": torch.arange(5.0, dtype=torch.float64), "version": torch.tensor(12)}, file)
    (tmp_path / "weights.yaml").write_text(annotated(compose(["problem.dim=5"])))
    found = find_weights(file)
    assert (found.version, found.iterate.tolist()) == (12, [0, 1, 2, 3, 4])
    save_file({"x": torch.zeros(5)}, file)
    with pytest.raises(UserError, match="neither a checkpoint nor exported weights"):
        find_weights(file)
    save_file({"x": torch.zeros(4), "version": torch.tensor(12)}, file)
    with pytest.raises(UserError, match=r"another model: 'x' has the shape \(4,\), not \(5,\)"):
        find_weights(file)


def test_the_best_weights_are_kept_over_restarts_and_found_by_name(tmp_path, caplog):
    """Each server reads the value from the file, so a worse evaluation after a restart does not replace it."""
    layout = Layout([Parameter("x", (5,), "scalar")], GEOMETRY_MAPS["muon"])
    (tmp_path / "config.yaml").write_text(annotated(compose(["problem.dim=5"], "train")) + "\n")
    file = tmp_path / BEST
    with pytest.raises(UserError, match="the run has not evaluated yet"):
        find_weights(tmp_path, best=True)
    offered = [[3.0], [2.0, float("nan"), 2.5, 1.5], [1.75, 1.5], [float("inf")]]  # the gaps that each server finds
    version = 0
    for gaps in offered:
        best = BestWeights(file, layout, "gap")
        for gap in gaps:
            version += 10
            best.offer(torch.full((5,), gap, dtype=torch.float64), version, {"loss": 0.0, "gap": gap})
        best.offer(torch.zeros(5), 99, {"loss": 0.0})  # an evaluation without the objective
    found = find_weights(tmp_path, best=True)
    assert (found.version, found.iterate.tolist(), best.value, best.version) == (50, [1.5] * 5, 1.5, 50)
    assert sorted(path.name for path in tmp_path.iterdir()) == [BEST, "config.yaml"]
    file.write_bytes(file.read_bytes()[:40])  # torn
    BestWeights(file, layout, "gap").offer(torch.ones(5, dtype=torch.float64), 70, {"gap": 8.0})
    assert "cannot be read" in caplog.text
    assert find_weights(tmp_path, best=True).version == 70
    with pytest.raises(UserError, match="checkpoint=best is for the directory of a run"):
        find_weights(file, best=True)


def test_what_is_exported_of_the_quadratic_and_of_nanochat(tmp_path):
    quadratic = Quadratic(5)
    layout = Layout(quadratic.parameters, GEOMETRY_MAPS["muon"])
    assert weights.by_name(quadratic, layout, torch.arange(5.0))["x"].tolist() == [0, 1, 2, 3, 4]
    config = load(["problem=nanochat", "model.sequence_len=32"])
    problem = build_problem(config)
    layout = Layout(problem.parameters, GEOMETRY_MAPS["muon"])
    problem.bind(layout)
    iterate = problem.initial(0) + 1.0
    weights.write(tmp_path / "n.safetensors", weights.by_name(problem, layout, iterate), 3)
    model = NanoChat(build_model_config(config))
    model.load_state_dict(load_file(tmp_path / "n.safetensors"), strict=True)
    with safe_open(tmp_path / "n.safetensors", framework="pt") as file:
        assert set(file.keys()) == {p.name for p in layout.parameters}  # as in earlier versions
    assert torch.equal(model.lm_head.weight, layout.views(iterate)["lm_head.weight"])
