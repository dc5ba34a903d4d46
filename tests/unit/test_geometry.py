"""The oracles, compared with the exact SVD and their defining properties."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringmaster_dist.algorithm import geometry as g
from ringmaster_dist.algorithm.layout import GEOMETRY_MAPS, Layout, Parameter
from ringmaster_dist.algorithm.update import Update

SHAPES = [(1, 1), (1, 40), (40, 1), (5, 5), (6, 8), (6, 9), (4, 24), (24, 4), (32, 3)]


def oracle(matrices, geometry, orthogonalization="polar_express", precision=""):
    """Returns the lmo of a batch, from an update with alpha = 1 and eta = 1 that starts at zero."""
    count, rows, cols = matrices.shape
    roles = dict.fromkeys(("matrix", "embedding", "output", "scalar"), geometry)
    layout = Layout([Parameter(f"p{i}", (rows, cols)) for i in range(count)], roles)
    flat = matrices.reshape(-1).clone()
    out = torch.empty_like(flat)
    update = Update(layout, dtype=flat.dtype, orthogonalization=orthogonalization, precision=precision)
    update.apply(torch.zeros_like(flat), torch.zeros_like(flat), flat, eta=1.0, alpha=1.0, out=out)
    return out.view(count, rows, cols)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("geometry", g.GEOMETRIES)
def test_exact_paths_equal_the_reference(geometry, shape):
    matrices = torch.randn(3, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    result = oracle(matrices, geometry, "exact")
    for matrix, ours in zip(matrices, result, strict=True):
        torch.testing.assert_close(ours, g.reference_lmo(matrix, geometry), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("name", "low", "high"), [("polar_express", 0.8, 1.2), ("jordan", 0.65, 1.25)])
def test_orthogonalization_keeps_directions_and_levels_singular_values(name, low, high, dtype, shape):
    """U and V are those of the matrix. Singular values are in a band around one, times Muon's factor."""
    generator = torch.Generator().manual_seed(2)
    rank = min(shape)
    left = torch.linalg.qr(torch.randn(shape[0], rank, dtype=torch.float64, generator=generator)).Q
    right = torch.linalg.qr(torch.randn(shape[1], rank, dtype=torch.float64, generator=generator)).Q
    singular = torch.logspace(0, -1.5, rank, dtype=torch.float64)
    matrix = (left * singular) @ right.T
    result = -oracle(matrix[None].to(dtype), "spectral", name)[0].double() / g.spectral_scale(*shape)
    levels = left.T @ result @ right
    tolerance = 2e-3 if dtype == torch.float32 else 1e-9
    off_diagonal = levels - torch.diag(levels.diagonal())
    assert off_diagonal.abs().max() < tolerance
    assert low < levels.diagonal().min() <= levels.diagonal().max() < high


@pytest.mark.parametrize("coefficients", g.COEFFICIENTS)
@pytest.mark.parametrize("shape", [(48, 48), (48, 96), (96, 48), (64, 256)])
@pytest.mark.parametrize("decades", [0.0, 1.5, 3.0, 5.0])
def test_bfloat16_stays_near_the_exact_result_and_in_bounds(shape, decades, coefficients):
    """It holds for ill-conditioned matrices. Here a polynomial of one Gram matrix in bfloat16 has singular values in
    the hundreds."""
    generator = torch.Generator().manual_seed(4)
    rank = min(shape)
    left, right = (torch.linalg.qr(torch.randn(4, n, rank, dtype=torch.float64, generator=generator)).Q for n in shape)
    matrices = (left * torch.logspace(0, -decades, rank, dtype=torch.float64)) @ right.mT
    exact = oracle(matrices, "spectral", coefficients)
    rough = oracle(matrices.float(), "spectral", coefficients, precision="bfloat16").double()
    assert torch.linalg.svdvals(rough).max() < 1.25 * g.spectral_scale(*shape)
    assert (torch.cosine_similarity(exact.flatten(1), rough.flatten(1)) > 0.97).all()


@pytest.mark.parametrize("coefficients", g.COEFFICIENTS)
@pytest.mark.parametrize("shape", [(6, 9), (4, 24), (1, 40), (24, 4), (7, 7)])
def test_every_path_is_the_same_polynomial(shape, coefficients):
    """The Gram and vector shortcuts equal the iteration as the specification prints it."""
    matrix = torch.randn(2, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    result = oracle(matrix, "spectral", coefficients)
    single = oracle(matrix[:1], "spectral", coefficients)
    for m, ours in zip(matrix, result, strict=True):
        y = m / (m.norm() + 1e-7)
        tall = shape[0] > shape[1]
        y = y.T if tall else y
        for a, b, c in g.COEFFICIENTS[coefficients]:
            gram = y @ y.T
            y = a * y + (b * gram + c * gram @ gram) @ y
        expected = -g.spectral_scale(*shape) * (y.T if tall else y)
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(single[0], result[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("geometry", g.GEOMETRIES)
@pytest.mark.parametrize("name", g.ORTHOGONALIZATIONS)
@pytest.mark.parametrize("shape", [(1, 30), (5, 5), (4, 24), (24, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_lmo_of_zero_is_zero(geometry, name, shape, dtype):
    matrices = torch.zeros(2, *shape, dtype=dtype)
    matrices[1, 0, 0] = 1.0  # a neighbour in the batch must not matter
    result = oracle(matrices, geometry, name)
    assert torch.isfinite(result).all()
    assert not result[0].any()
    assert result[1].any()
    assert not oracle(matrices[:1], geometry, name).any()


@settings(max_examples=40)
@given(st.sampled_from(["spectral", "euclidean", "sign", "column", "row"]), st.integers(0, 1000))
def test_the_oracle_minimizes_over_the_ball(geometry, seed):
    """<m, lmo(m)> is below <m, u> for every other u in the unit ball."""
    generator = torch.Generator().manual_seed(seed)
    m, other = torch.randn(2, 4, 7, dtype=torch.float64, generator=generator)
    u = oracle(m[None], geometry, "exact")[0]
    sizes = {
        "spectral": lambda t: torch.linalg.matrix_norm(t, 2),
        "euclidean": torch.linalg.vector_norm,
        "sign": lambda t: t.abs().max(),
        "column": lambda t: t.norm(dim=0).max(),
        "row": lambda t: t.norm(dim=1).max(),
    }
    size = sizes[geometry]
    assert size(u) <= 1 + 1e-9
    assert (m * u).sum() <= (m * (other / size(other))).sum() + 1e-9


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e12, 1e30])
def test_vectors_of_any_scale_give_a_finite_direction(scale):
    vector = torch.randn(1, 1, 50, dtype=torch.float64) * scale
    length = oracle(vector, "spectral")[0].norm()
    expected = oracle(vector / scale, "spectral")[0].norm() if scale > 1 else None
    assert torch.isfinite(length)
    if expected is not None:
        assert length == pytest.approx(float(expected), rel=1e-6)


def test_maps_are_those_of_the_paper():
    assert GEOMETRY_MAPS["muon"] == {"matrix": "spectral", "embedding": "none", "output": "none", "scalar": "none"}
    assert set(GEOMETRY_MAPS["euclidean"].values()) == {"euclidean"}
    assert set(GEOMETRY_MAPS["sign"].values()) == {"sign"}
