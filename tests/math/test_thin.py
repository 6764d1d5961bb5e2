"""Factors kept as rows, against covariances that are formed and inverted in float64."""

from dataclasses import replace

import pytest
import torch

from mkor.factors import thin
from mkor.factors.lowrank import LowRank
from mkor.factors.window import Window

CLOSE = {"rtol": 1e-9, "atol": 1e-9}
DECAY, DAMPING = 0.8, 0.05
CPU = torch.device("cpu")


def fill(kind, batches, dtype=torch.float64, scale=1.0):
    """A representation that took the batches of vectors [G, d, r] in."""
    stack, side, _ = batches[0].shape
    parts = kind.init(stack, side, dtype, CPU)
    use = torch.ones(stack, dtype=torch.bool)
    for batch in batches:
        vectors = thin.prepare((scale * batch).to(parts["sizes"].dtype))
        assert kind.absorb_(parts, vectors, use).all()
    return parts


def factor(parts):
    """J [G, d, d] as the rows make it."""
    rows = parts["root"] @ parts["rows"].to(parts["root"].dtype)
    return torch.eye(rows.shape[-1], dtype=rows.dtype) - rows.mT @ rows


def windowed(batches, count):
    """Σ w_i v_i v_iᵀ over the last `count` vectors, weights by the age in updates."""
    columns = torch.cat(batches, dim=-1)[..., -count:]
    ages = [len(batches) - 1 - j for j, batch in enumerate(batches) for _ in range(batch.shape[-1])]
    weights = DECAY ** torch.tensor(ages[-count:], dtype=torch.float64)
    weights /= weights.sum()
    return (columns * weights) @ columns.mT


def averaged(batches):
    """The moving average from zero."""
    out = torch.zeros(1, dtype=torch.float64)
    for batch in batches:
        out = DECAY * out + (1 - DECAY) * batch @ batch.mT
    return out


def inverted(covariance, damping=DAMPING):
    """β(C + βI)⁻¹ with β = μ·tr(C)."""
    beta = damping * covariance.diagonal(dim1=-2, dim2=-1).sum(dim=-1)[:, None, None]
    return beta * torch.linalg.inv(covariance + beta * torch.eye(covariance.shape[-1]).double())


def random_batches(updates, side, vectors, stack=2):
    sizes = [vectors] * updates
    return [torch.randn(stack, side, r, dtype=torch.float64) * (1 + j) for j, r in enumerate(sizes)]


@pytest.mark.parametrize(("count", "vectors"), [(1, 1), (5, 1), (6, 2), (7, 3), (4, 4), (30, 2)])
def test_a_window_is_the_inverse_of_its_covariance(count, vectors):
    batches = random_batches(9, 8, vectors)
    parts = fill(Window(count, DECAY, DAMPING), batches)
    torch.testing.assert_close(factor(parts), inverted(windowed(batches, count)), **CLOSE)


def test_the_gram_matrix_of_a_window_follows_its_rows():
    parts = fill(Window(7, DECAY, DAMPING), random_batches(9, 8, 3))
    torch.testing.assert_close(parts["gram"], parts["rows"] @ parts["rows"].mT, **CLOSE)


@pytest.mark.parametrize(
    ("side", "count", "vectors"), [(8, 8, 2), (8, 40, 3), (3, 5, 6), (9, 7, 1)]
)
def test_enough_eigenvectors_are_the_whole_average(side, count, vectors):
    """Seven updates of a vector have no more than seven directions."""
    batches = random_batches(7, side, vectors)
    parts = fill(LowRank(count, DECAY, DAMPING), batches)
    assert parts["rows"].shape[1] == min(side, count)
    torch.testing.assert_close(factor(parts), inverted(averaged(batches)), rtol=1e-7, atol=1e-7)


def test_fewer_are_the_truncation_of_the_average_at_every_update():
    count, batches = 3, random_batches(6, 8, 2)
    covariance, trace = torch.zeros(2, 8, 8, dtype=torch.float64), torch.zeros(2).double()
    for batch in batches:
        covariance = DECAY * covariance + (1 - DECAY) * batch @ batch.mT
        trace = DECAY * trace + (1 - DECAY) * batch.square().sum(dim=(-2, -1))
        values, turns = torch.linalg.eigh(covariance)
        values[:, :-count] = 0
        covariance = turns @ torch.diag_embed(values) @ turns.mT
    beta = (DAMPING * trace)[:, None, None]
    expected = beta * torch.linalg.inv(covariance + beta * torch.eye(8).double())
    parts = fill(LowRank(count, DECAY, DAMPING), batches)
    torch.testing.assert_close(factor(parts), expected, **CLOSE)
    torch.testing.assert_close(parts["trace"].square(), trace)
    assert (parts["sizes"].square().sum(dim=-1) < trace).all()


KINDS = [Window(6, DECAY, DAMPING), LowRank(6, DECAY, DAMPING), LowRank(20, DECAY, DAMPING)]
kinds = pytest.mark.parametrize("kind", KINDS, ids=str)


@kinds
@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1e6, 1e30])
def test_the_scale_of_the_vectors_changes_nothing(kind, scale):
    batches = random_batches(7, 9, 2)
    one = fill(kind, batches, torch.float32)
    other = fill(kind, batches, torch.float32, scale)
    torch.testing.assert_close(factor(other), factor(one), rtol=0, atol=1e-5)


@kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("damping", [1e-12, 1e-3])
def test_a_factor_is_positive_definite_in_every_dtype(kind, dtype, damping):
    """Vectors that nearly repeat each other are the hard case."""
    main = torch.randn(1, 9, 1, dtype=torch.float64)
    batches = [main + 1e-3 * batch for batch in random_batches(60, 9, 2, stack=1)]
    parts = fill(replace(kind, damping=damping), batches, dtype)
    exact = {key: tensor.double() for key, tensor in parts.items()}
    values = torch.linalg.eigvalsh(factor(exact))
    assert float(values.min()) > 0 and float(values.max()) < 1 + 1e-5


@kinds
def test_a_statistic_that_may_not_be_used_leaves_every_bit(kind):
    parts = fill(kind, random_batches(3, 9, 2))
    before = {key: tensor.clone() for key, tensor in parts.items()}
    vectors = thin.prepare(torch.randn(2, 9, 2, dtype=torch.float64))
    kind.absorb_(parts, vectors, torch.tensor([True, False]))
    assert all(torch.equal(parts[key][1], before[key][1]) for key in parts)
    assert not torch.equal(parts["rows"][0], before["rows"][0])
    alone = {key: tensor[:1].clone() for key, tensor in before.items()}
    own = thin.Vectors(vectors.rows[:1], vectors.sizes[:1], vectors.finite[:1])
    kind.absorb_(alone, own, torch.tensor([True]))
    assert all(torch.equal(parts[key][:1], alone[key]) for key in parts)


@pytest.mark.parametrize("stack", [1, 2])
@pytest.mark.parametrize(("left", "right"), [(KINDS[0], KINDS[1]), (KINDS[1], KINDS[0])])
def test_both_sides_are_applied_as_matrices_would_be(left, right, stack):
    outputs = fill(left, random_batches(5, 7, 2, stack))
    inputs = fill(right, random_batches(5, 9, 3, stack))
    grad = torch.randn(stack, 7, 9, dtype=torch.float64)
    expected = factor(outputs) @ grad @ factor(inputs)
    torch.testing.assert_close(thin.precondition(outputs, inputs, grad), expected, **CLOSE)


@kinds
def test_without_vectors_the_gradient_comes_out_as_it_went_in(kind):
    parts = kind.init(2, 9, torch.float32, CPU)
    grad = torch.randn(2, 9, 9)
    assert torch.equal(thin.precondition(parts, parts, grad), grad)


def test_vectors_that_are_not_finite_are_zero_and_told():
    vectors = torch.randn(2, 4, 3)
    vectors[1, 2, 0] = float("nan")
    seen = thin.prepare(vectors)
    assert seen.finite.tolist() == [True, False]
    assert seen.rows[1, 0].abs().sum() == 0 and seen.sizes[1, 0] == 0
    torch.testing.assert_close((seen.rows * seen.sizes[..., None])[0], vectors[0].mT)


@pytest.mark.parametrize("power", [0.25, 0.5, 0.75, 1.0])
def test_a_power_of_the_inverse(power):
    """(β(C + βI)⁻¹)^p by the dense eigendecomposition."""
    batches = random_batches(7, 8, 2)
    values, turns = torch.linalg.eigh(inverted(averaged(batches)))
    expected = turns @ torch.diag_embed(values**power) @ turns.mT
    parts = fill(LowRank(8, DECAY, DAMPING, power), batches)
    torch.testing.assert_close(factor(parts), expected, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("power", [0.5, 1.0])
def test_rounded_eigenvectors_make_a_factor_with_the_right_eigenvalues(power):
    """Rows in bfloat16 are orthogonal to three digits only; the factor's eigenvalues aren't off."""
    batches = random_batches(7, 9, 2)
    parts = fill(LowRank(6, DECAY, 1e-3, power), batches, torch.bfloat16)
    assert parts["rows"].dtype == torch.bfloat16
    relative = (parts["sizes"] / parts["trace"][:, None]).double()
    expected = (1e-3 / (1e-3 + relative.square())) ** power
    found = torch.linalg.eigvalsh(factor(parts).double())[:, :6]
    torch.testing.assert_close(found, expected.sort().values, rtol=1e-2, atol=1e-5)
