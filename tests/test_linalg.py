"""The shared linear algebra against float64 products written out."""

import pytest
import torch

from mkor import linalg
from mkor.linalg import STRIPE, add_gram_, add_low_rank_, apply_factor, sandwich, slow_half

TOLERANCE = {
    torch.float64: 1e-14,
    torch.float32: 1e-5,
    torch.bfloat16: 3e-2,
    torch.float16: 4e-3,
}
DTYPES = list(TOLERANCE)


def symmetric(stack, side, dtype):
    root = torch.randn(stack, side, side, dtype=torch.float64)
    return (root + root.mT).to(dtype)


def assert_near(actual, expected, dtype):
    """Within the dtype's rounding, relative to the largest entry."""
    tolerance = TOLERANCE[dtype] * float(expected.abs().max())
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("r", [1, 4])
@pytest.mark.parametrize("stack", [1, 3])
def test_apply_factor(stack, r, dtype):
    factor = symmetric(stack, 6, dtype)
    kept = factor.clone()
    vectors = torch.randn(stack, 6, r, dtype=torch.float64 if dtype == torch.float64 else None)
    out = apply_factor(factor, vectors)
    assert out.dtype == vectors.dtype and out.shape == vectors.shape
    assert torch.equal(factor, kept)
    for g in range(stack):
        expected = torch.stack(
            [
                torch.stack([(factor[g, i].double() * v.double()).sum() for i in range(6)])
                for v in vectors[g].T
            ],
            dim=1,
        )
        assert_near(out[g], expected, dtype)


def test_apply_factor_to_zero_vectors():
    out = apply_factor(symmetric(2, 3, torch.float16), torch.zeros(2, 3, 2))
    assert torch.equal(out, torch.zeros(2, 3, 2))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("r", [1, 3])
@pytest.mark.parametrize("stack", [1, 2])
@pytest.mark.parametrize("band", [None, 2])
@pytest.mark.parametrize("scaled", [False, True])
def test_add_low_rank(scaled, band, stack, r, sign, dtype, monkeypatch):
    if band is not None:
        monkeypatch.setattr(linalg, "CACHED", 0)
        monkeypatch.setattr(linalg, "STRIPE", band)
    matrix = symmetric(stack, 5, dtype)
    before = matrix.double().clone()
    columns = torch.randn(stack, 5, r)
    scale = torch.tensor([0.5, 3.0], dtype=dtype)[:stack] if scaled else None
    out = add_low_rank_(matrix, columns, sign, scale)
    if scale is not None:
        before *= scale.double()[:, None, None]
    assert out.data_ptr() == matrix.data_ptr() and out.dtype == dtype
    for g in range(stack):
        expected = before[g].clone()
        for column in columns[g].to(dtype).double().T:
            expected += sign * torch.outer(column, column)
        assert_near(matrix[g], expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sides", ["both", "left", "right"])
def test_sandwich(sides, dtype):
    left = symmetric(2, 3, dtype) if sides != "right" else None
    right = symmetric(2, 5, dtype) if sides != "left" else None
    grad = torch.randn(2, 3, 5, dtype=torch.float64)
    kept = grad.clone()
    out = sandwich(left, grad, right)
    assert torch.equal(grad, kept)
    assert out.dtype == (torch.float32 if dtype == torch.float16 else dtype)
    for g in range(2):
        expected = grad[g]
        if left is not None:
            expected = left[g].double() @ expected
        if right is not None:
            expected = expected @ right[g].double()
        assert_near(out[g], expected, dtype)


def test_sandwich_without_factors_is_the_gradient():
    grad = torch.randn(1, 2, 3)
    assert sandwich(None, grad, None) is grad


@pytest.mark.parametrize("side", [3, STRIPE, 2 * STRIPE, 2 * STRIPE + 3])
def test_add_gram(side):
    rows = torch.randn(2, 5, side)
    fold = torch.full((2, side + 1, side + 2), 7.0)  # what the matrix is a part of stays as it is
    matrix = fold[:, :side, :side]
    before = matrix.copy_(symmetric(2, side, torch.float32)).double().clone()
    add_gram_(matrix, rows)
    for g in range(2):
        expected = before[g]
        for row in rows[g].double():
            expected += torch.outer(row, row)
        assert_near(matrix[g], expected, torch.float32)
    assert bool((fold[:, side:] == 7).all()) and bool((fold[:, :, side:] == 7).all())


def test_slow_half_names_float16_on_the_cpu():
    slow = {dtype for dtype in DTYPES if slow_half(torch.zeros(1, dtype=dtype))}
    assert slow == {torch.float16}
