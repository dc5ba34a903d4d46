"""The flat layout and the batched update, compared with a loop over parameters."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ringmaster_dist.algorithm import update as update_module
from ringmaster_dist.algorithm.geometry import reference_lmo
from ringmaster_dist.algorithm.layout import GEOMETRY_MAPS, ROLES, Layout, Norm, Parameter
from ringmaster_dist.algorithm.names import MIXED
from ringmaster_dist.algorithm.update import Update, quick_precision
from ringmaster_dist.bench import arithmetic
from ringmaster_dist.bench.arithmetic import paper_parameters
from ringmaster_dist.crew import Crew

PARAMETERS = [
    Parameter("wte", (11, 4), "embedding"),
    Parameter("a.q", (4, 4)),
    Parameter("a.fc", (16, 4)),
    Parameter("a.proj", (4, 16)),
    Parameter("b.q", (4, 4)),
    Parameter("b.fc", (16, 4)),
    Parameter("gate", (3, 2)),
    Parameter("head", (11, 4), "output"),
    Parameter("lambdas", (6,), "scalar"),
]


PLAIN = dict.fromkeys(ROLES, (1.0, 0.0))
UNEQUAL = {"matrix": (1.0, 0.1), "embedding": (50.0, 0.0), "output": (0.2, 0.3), "scalar": (0.5, 0.0)}


@pytest.mark.parametrize("radius_and_decay", [PLAIN, dict.fromkeys(ROLES, (1.0, 0.1)), UNEQUAL])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("geometry", GEOMETRY_MAPS)
def test_the_update_equals_a_loop_over_parameters(geometry, nesterov, radius_and_decay):
    roles = GEOMETRY_MAPS[geometry]
    layout = Layout(PARAMETERS, {role: Norm(roles[role], *radius_and_decay[role]) for role in ROLES})
    update = Update(layout, dtype=torch.float64, nesterov=nesterov, orthogonalization="exact")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(layout.size, dtype=torch.float64, generator=generator)
    m = torch.zeros_like(x)
    plain_x = {name: view.clone() for name, view in layout.views(x).items()}
    plain_m = {name: torch.zeros_like(view) for name, view in plain_x.items()}
    for eta, alpha in ((0.1, 1.0), (0.2, 0.05), (0.05, 0.7)):
        g = torch.randn(layout.size, dtype=torch.float64, generator=generator)
        for parameter in PARAMETERS:
            name, gradient = parameter.name, layout.views(g)[parameter.name]
            plain_m[name] = (1 - alpha) * plain_m[name] + alpha * gradient
            u = (1 - alpha) * plain_m[name] + alpha * gradient if nesterov else plain_m[name]
            step = reference_lmo(u.view(parameter.matrix_shape), roles[parameter.role]).view(parameter.shape)
            radius, decay = radius_and_decay[parameter.role]
            plain_x[name] = (1 - eta * decay) * plain_x[name] + eta * radius * step
        out = torch.empty_like(x)
        update.apply(x, m, g, eta=eta, alpha=alpha, out=out)
        x = out
    for name, view in layout.views(x).items():
        torch.testing.assert_close(view, plain_x[name], rtol=1e-10, atol=1e-10)
    for name, view in layout.views(m).items():
        torch.testing.assert_close(view, plain_m[name], rtol=1e-12, atol=1e-12)


def test_a_step_is_as_long_as_its_radius_in_its_norm():
    """By the oracle of ``max |x_b| / radius_b`` every block moves to the boundary of its own ball."""
    norms = {role: Norm(GEOMETRY_MAPS["scion"][role], UNEQUAL[role][0]) for role in ROLES}
    layout = Layout(PARAMETERS, norms)
    x, m, g = torch.zeros(3, layout.size, dtype=torch.float64)
    g.copy_(torch.randn(layout.size, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))
    Update(layout, dtype=torch.float64, orthogonalization="exact").apply(x, m, g, eta=0.1, alpha=1.0, out=x)
    moved = layout.views(x)
    torch.testing.assert_close(moved["wte"].norm(dim=1), torch.full((11,), 0.1 * 50, dtype=torch.float64))
    torch.testing.assert_close(moved["head"].abs(), torch.full((11, 4), 0.1 * 0.2, dtype=torch.float64))
    torch.testing.assert_close(moved["lambdas"].abs(), torch.full((6,), 0.1 * 0.5, dtype=torch.float64))
    assert float(torch.linalg.matrix_norm(moved["a.q"], 2)) == pytest.approx(0.1)
    assert float((g * x).sum()) < 0


def test_radii_of_one_change_no_bit_and_other_radii_the_fingerprint():
    named, radii = GEOMETRY_MAPS["scion"], [0.5, 2.0]
    plain, spelled = Layout(PARAMETERS, named), Layout(PARAMETERS, {r: Norm(named[r], 1.0) for r in ROLES})
    assert plain.offsets == spelled.offsets
    assert plain.fingerprint == spelled.fingerprint
    x, g = torch.randn(2, plain.size)
    results = []
    for layout in (plain, spelled):
        out = torch.empty_like(x)
        Update(layout).apply(x, torch.zeros_like(x), g, eta=0.1, alpha=0.05, out=out)
        results.append(out)
    assert torch.equal(*results)
    others = [Layout(PARAMETERS, {r: Norm(named[r], radius) for r in ROLES}).fingerprint for radius in radii]
    assert len({plain.fingerprint, *others}) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_update_is_deterministic_and_in_place(dtype):
    layout = Layout(PARAMETERS, {role: Norm(name, 1.0, 0.1) for role, name in GEOMETRY_MAPS["muon"].items()})
    x, g = torch.randn(2, layout.size, dtype=dtype)
    results = []
    for in_place in (False, True, False):
        own, m = x.clone(), torch.zeros_like(x)
        out = own if in_place else torch.empty_like(x)
        Update(layout, dtype=dtype).apply(own, m, g, eta=0.1, alpha=0.05, out=out)
        results.append((out, m))
        assert in_place or torch.equal(own, x)
    assert torch.equal(results[0][0], results[2][0])
    torch.testing.assert_close(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


class LargestAllocation(TorchDispatchMode):
    """Records the largest tensor that any operation makes."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        known = {t.untyped_storage().data_ptr() for t in _tensors((args, kwargs or {}))}
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            if tensor.untyped_storage().data_ptr() not in known:
                self.elements = max(self.elements, tensor.numel())
        return result


def _tensors(tree):
    if isinstance(tree, torch.Tensor):
        return [tree]
    items = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (tuple, list)) else ()
    return [tensor for item in items for tensor in _tensors(item)]


def test_paper_layout_and_its_temporaries():
    layout = Layout(paper_parameters(), GEOMETRY_MAPS["muon"])
    assert layout.size == 10_518_828
    spectral = [block for block in layout.blocks if block.geometry == "spectral"]
    assert sum(block.size for block in spectral) == 2_654_496
    shapes = {(b.num_matrices, b.rows, b.cols) for b in spectral}
    assert shapes == {(24, 192, 192), (6, 768, 192), (6, 192, 768), (3, 3, 32)}
    update = Update(layout)
    assert update._desk._scratch.numel() < layout.size / 5
    x, m, g = torch.zeros(layout.size), torch.zeros(layout.size), torch.ones(layout.size)
    with LargestAllocation() as watch:
        update.apply(x, m, g, eta=0.1, alpha=0.05, out=x)
    assert 0 < watch.elements < 100  # the norms of a batch; everything large was made before


def test_layout_order_views_and_fingerprint():
    layout = Layout(PARAMETERS, GEOMETRY_MAPS["muon"])
    flat = torch.arange(layout.size, dtype=torch.float64)
    views = layout.views(flat)
    assert {name: tuple(view.shape) for name, view in views.items()} == {p.name: p.shape for p in PARAMETERS}
    assert sorted(torch.cat([v.reshape(-1) for v in views.values()]).tolist()) == flat.tolist()
    assert layout.offsets["b.q"] - layout.offsets["a.q"] == 16  # neighbours, though declared apart
    views["lambdas"].fill_(-1)
    assert (flat == -1).sum() == 6
    assert layout.fingerprint == Layout(PARAMETERS, GEOMETRY_MAPS["muon"]).fingerprint
    renamed = [p._replace(name="other") if p.name == "gate" else p for p in PARAMETERS]
    assert layout.fingerprint != Layout(renamed, GEOMETRY_MAPS["muon"]).fingerprint


@pytest.mark.parametrize(
    ("parameters", "geometry", "message"),
    [
        ([Parameter("a", (2,)), Parameter("a", (3,))], GEOMETRY_MAPS["muon"], "repeat"),
        ([], GEOMETRY_MAPS["muon"], "no parameters"),
        ([Parameter("a", (2, 0))], GEOMETRY_MAPS["muon"], "empty"),
        ([Parameter("a", (2,), "bias")], GEOMETRY_MAPS["muon"], "role"),
        ([Parameter("a", (2,))], {"matrix": "nuclear"}, "nuclear"),
    ],
)
def test_impossible_layouts_are_refused(parameters, geometry, message):
    with pytest.raises(ValueError, match=message):
        Layout(parameters, geometry)


LARGER = [
    *PARAMETERS,
    *(Parameter(f"square{i}", (24, 24)) for i in range(5)),
    *(Parameter(f"tall{i}", (48, 24)) for i in range(3)),
    *(Parameter(f"nearly{i}", (30, 24)) for i in range(3)),
    *(Parameter(f"bias{i}", (40,)) for i in range(4)),  # one vector alone is computed in another way
]


@pytest.mark.parametrize("precision", ["", "bfloat16", MIXED])
@pytest.mark.parametrize("geometry", GEOMETRY_MAPS)
@pytest.mark.parametrize("threads", [2, 3])
def test_a_crew_changes_no_bit(threads, geometry, precision, monkeypatch):
    monkeypatch.setattr(update_module, "_TASK", 1000)
    layout, usual = Layout(LARGER, GEOMETRY_MAPS[geometry]), torch.get_num_threads()
    results, crew = [], Crew(threads)
    for given in (None, crew):
        update = Update(layout, precision=precision, crew=given)
        generator = torch.Generator().manual_seed(5)
        x, m = torch.randn(layout.size, generator=generator), torch.zeros(layout.size)
        rounded = torch.empty(layout.size, dtype=torch.bfloat16)
        for dtype in (torch.float32, torch.bfloat16, torch.float32):
            g = torch.randn(layout.size, generator=generator).to(dtype)
            update.apply(x, m, g, eta=0.1, alpha=0.3, out=x, rounded=rounded)
        results.append((x, m, rounded))
    assert all(torch.equal(alone, shared) for alone, shared in zip(*results, strict=True))
    assert crew._threads is not None  # it was used
    assert torch.get_num_threads() == usual


def test_threads_of_a_crew_have_one_torch_thread_and_others_keep_theirs():
    usual = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        seen = dict.fromkeys(range(4), 0)
        crew = Crew(4)
        crew.run(lambda index: seen.update({index: torch.get_num_threads()}))
        assert seen == dict.fromkeys(range(4), 1)
        with ThreadPoolExecutor(1) as later:
            assert later.submit(torch.get_num_threads).result() == 3
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(usual)


def test_a_crew_raises_what_a_thread_raised_after_all_have_ended():
    ended = []

    def work(index):
        if index == 0:
            raise ValueError("the first fails")
        time.sleep(0.05)  # so that the first one has failed by then
        ended.append(index)

    crew = Crew(3)
    with pytest.raises(ValueError, match="the first fails"):
        crew.run(work)
    assert sorted(ended) == [1, 2]
    crew.run(ended.append)  # it can be used again
    assert sorted(ended) == [0, 1, 1, 2, 2]


def test_bfloat16_is_chosen_for_many_square_matrices_where_the_device_has_it():
    paper, small = Layout(paper_parameters(), GEOMETRY_MAPS["muon"]), Layout(LARGER, GEOMETRY_MAPS["muon"])
    assert quick_precision(paper, torch.float32, has_bfloat16=True) == MIXED
    assert quick_precision(paper, torch.float32, has_bfloat16=False) == "float32"
    assert quick_precision(paper, torch.float64, has_bfloat16=True) == "float64"
    assert quick_precision(small, torch.float32, has_bfloat16=True) == "float32"
    without_spectral = Layout(paper_parameters(), GEOMETRY_MAPS["sign"])
    assert quick_precision(without_spectral, torch.float32, has_bfloat16=True) == "float32"


def test_mixed_precision_rounds_only_what_is_about_square():
    layout = Layout(LARGER, GEOMETRY_MAPS["muon"])
    x, g = torch.randn(2, layout.size, generator=torch.Generator().manual_seed(6))
    steps = {}
    for precision in ("float32", "bfloat16", MIXED):
        out = torch.empty_like(x)
        Update(layout, precision=precision).apply(x, torch.zeros_like(x), g, eta=0.1, alpha=1.0, out=out)
        steps[precision] = layout.views(out)
    for parameter in LARGER:
        rows, cols = parameter.matrix_shape
        is_rounded = parameter.role == "matrix" and max(rows, cols) < 1.5 * min(rows, cols)
        mixed, like = steps[MIXED][parameter.name], "bfloat16" if is_rounded else "float32"
        assert torch.equal(mixed, steps[like][parameter.name]), parameter.name
    assert not torch.equal(steps["bfloat16"]["square0"], steps["float32"]["square0"])


def test_the_bench_of_gradients_draws_its_rows_as_the_problem_asks_for_them():
    cost = arithmetic._cost_of_checks(1.0, 2)  # of gradients with and without the checks
    assert cost["relative"] == f"{float(cost['relative'].removesuffix(' %')):.2f} %"
