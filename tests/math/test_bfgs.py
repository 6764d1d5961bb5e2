"""BFGS of an inverse, its damping and its limited memory, against textbook formulas in float64."""

import pytest
import torch

from mkor.factors import bfgs, pairs

F64 = torch.float64


def spd(side, stack=1, least=0.3):
    """Random symmetric positive definite matrices, [G, d, d]."""
    root = torch.randn(stack, side, side, dtype=F64)
    return root @ root.mT / side + least * torch.eye(side, dtype=F64)


def column(side, stack=1, size=1.0):
    return size * torch.randn(stack, side, 1, dtype=F64)


def textbook_inverse(inverse, s, y):
    """(I − ρsyᵀ)H(I − ρysᵀ) + ρssᵀ of one matrix."""
    rho = 1 / (s @ y)
    left = torch.eye(len(s), dtype=s.dtype) - rho * torch.outer(s, y)
    return left @ inverse @ left.T + rho * torch.outer(s, s)


def textbook_hessian(hessian, s, y):
    """B − Bs sᵀB/(sᵀBs) + yyᵀ/(sᵀy) of one matrix."""
    image = hessian @ s
    return hessian - torch.outer(image, image) / (s @ image) + torch.outer(y, y) / (s @ y)


def damped_slowly(inverse, s, y, level):
    """Double damping of one pair by Powell's two formulas; the pair and whether it changed."""
    along, curve, changed = float(s @ y), float(y @ inverse @ y), False
    if along < 0.2 * curve:
        theta = 0.8 * curve / (curve - along)
        s, changed = theta * s + (1 - theta) * (inverse @ y), True
    along, square = float(s @ y), float(s @ s)
    if along < level * square:
        theta = (1 - level) * square / (square - along)
        y, changed = theta * y + (1 - theta) * s, True
    return s, y, changed


def damped(inverse, s, y, level):
    s, lengthened = bfgs.damp_by_inverse(s, y, inverse @ y)
    y, raised = bfgs.damp_by_level(s, y, level)
    return s, y, lengthened | raised


def everywhere(stack=1):
    return torch.ones(stack, dtype=torch.bool)


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("side", [1, 2, 7])
def test_an_update_is_the_textbook_formula(side, size):
    inverse, s = spd(side, 3), column(side, 3, size)
    y = spd(side, 3) @ s
    before = inverse.clone()
    used, reset = bfgs.absorb_(inverse, s, y, everywhere(3))
    assert used.all() and not reset.any()
    for g in range(3):
        expected = textbook_inverse(before[g], s[g, :, 0], y[g, :, 0])
        torch.testing.assert_close(inverse[g], expected, rtol=1e-10, atol=1e-10)


def test_it_is_the_inverse_of_the_textbook_update_of_the_hessian():
    inverse = spd(5)
    hessian = torch.linalg.inv(inverse[0])
    for _ in range(20):
        s = column(5)
        y = spd(5) @ s
        bfgs.absorb_(inverse, s, y, everywhere())
        hessian = textbook_hessian(hessian, s[0, :, 0], y[0, :, 0])
        torch.testing.assert_close(inverse[0], torch.linalg.inv(hessian), rtol=1e-7, atol=1e-7)


def test_the_secant_equation_holds():
    inverse = spd(6, 4)
    for _ in range(10):
        s = column(6, 4)
        y = spd(6, 4) @ s
        bfgs.absorb_(inverse, s, y, everywhere(4))
        torch.testing.assert_close(inverse @ y, s, rtol=1e-9, atol=1e-9)


def test_it_stays_symmetric_to_the_last_bit():
    inverse = spd(6).float().contiguous()
    inverse = (inverse + inverse.mT) / 2
    for _ in range(50):
        s = column(6)
        y = spd(6) @ s
        bfgs.absorb_(inverse, s.float(), y.float(), everywhere())
    assert torch.equal(inverse, inverse.mT)


def test_a_pair_that_tells_nothing_new_changes_nothing():
    """Hy = s already: the correction vanishes, also where that is exact."""
    inverse, y = spd(4), column(4)
    before = inverse.clone()
    used, _ = bfgs.absorb_(inverse, inverse @ y, y, everywhere())
    torch.testing.assert_close(inverse, before)
    one = torch.eye(3, dtype=F64)[None].clone()
    used, _ = bfgs.absorb_(one, column(3).fill_(1), column(3).fill_(1), everywhere())
    assert used.all() and torch.equal(one[0], torch.eye(3, dtype=F64))


@pytest.mark.parametrize("level", [0.01, 0.55, 0.9])
def test_double_damping_is_powells_twice(level):
    seen = set()
    for _ in range(200):
        inverse, s, y = spd(4), column(4), column(4)
        new_s, new_y, changed = damped(inverse, s, y, level)
        slow_s, slow_y, slowly = damped_slowly(inverse[0], s[0, :, 0], y[0, :, 0], level)
        torch.testing.assert_close(new_s[0, :, 0], slow_s)
        torch.testing.assert_close(new_y[0, :, 0], slow_y)
        assert bool(changed) is slowly
        seen.add(slowly)
        along, square = bfgs.dot(new_s, new_y), bfgs.dot(new_s, new_s)
        assert float(along) >= level * float(square) * (1 - 1e-9) > 0
    assert seen == {True, False}


def test_damping_leaves_a_good_pair_alone():
    s = column(4)
    _, _, changed = damped(torch.eye(4, dtype=F64)[None], s, s, 0.5)
    assert not changed.any()


def test_damping_of_zeros_is_finite():
    zero, some, inverse = torch.zeros(1, 3, 1, dtype=F64), column(3), spd(3)
    for s, y in ((zero, zero), (some, zero), (zero, some)):
        new_s, new_y, _ = damped(inverse, s, y, 0.5)
        assert torch.isfinite(new_s).all() and torch.isfinite(new_y).all()


@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.bfloat16, torch.float16])
def test_positive_definite_over_long_sequences_of_any_pairs(dtype):
    """Three kinds in a stack: any curvature, negative curvature, sizes that jump."""
    inverse = torch.eye(6, dtype=dtype).repeat(3, 1, 1)
    wide = F64 if dtype == F64 else torch.float32
    resets = torch.zeros(3)
    for step in range(1500):
        s, y = column(6, 3).to(wide), column(6, 3).to(wide)
        y[1] = -2 * s[1] + 0.1 * y[1]
        s[2], y[2] = s[2] * 10.0 ** (step % 9 - 4), y[2] * 10.0 ** (step % 7 - 3)
        s, y = bfgs.in_range(s, y)
        s, y, _ = damped(inverse.to(wide), s, y, 0.55)
        s, y = bfgs.in_range(s, y)
        used, reset = bfgs.absorb_(inverse, s, y, everywhere(3))
        resets += reset
        assert (used | reset).all()
        if step % 50 == 0 and dtype.itemsize > 2:
            assert torch.linalg.eigvalsh(inverse.double()).min() > 0
    assert torch.isfinite(inverse).all() and inverse.diagonal(dim1=-2, dim2=-1).min() > 0
    assert int(resets.sum()) <= (0 if dtype.itemsize > 2 else 3)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.0])
def test_a_pair_that_cannot_be_used_leaves_the_matrix_bit_equal(bad):
    inverse = spd(4, 3)
    before = inverse.clone()
    s = column(4, 3)
    y = spd(4, 3) @ s
    y[1] = bad
    used, reset = bfgs.absorb_(inverse, s, y, torch.tensor([True, True, False]))
    assert used.tolist() == [True, False, False] and not reset.any()
    assert torch.equal(inverse[1:], before[1:])
    assert not torch.equal(inverse[0], before[0])


def test_an_indefinite_matrix_becomes_the_identity():
    inverse = torch.diag_embed(torch.tensor([[1.0, -1.0], [2.0, 1.0]], dtype=F64))
    s = torch.tensor([[[0.0], [1.0]]] * 2, dtype=F64)
    used, reset = bfgs.absorb_(inverse, s, s, everywhere(2))
    assert reset.tolist() == [True, False] and used.tolist() == [False, True]
    assert torch.equal(inverse[0], torch.eye(2, dtype=F64))


def test_a_pair_with_hardly_any_curvature_tells_nothing():
    s = torch.tensor([[[1.0], [0.0]]] * 3, dtype=F64)
    y = torch.tensor([[[1.0], [0.0]], [[1e-5], [1.0]], [[float("nan")], [0.0]]], dtype=F64)
    behind = torch.tensor([1.0, 1.0, 1.0], dtype=F64)
    assert bfgs.tells(s, y, behind).tolist() == [True, False, False]
    assert bfgs.tells(s, y, 1e-2 * behind).tolist() == [True, True, False]


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_columns_in_range(scale):
    s, y = (scale * torch.randn(2, 4, 1) for _ in range(2))
    new = bfgs.in_range(s, y)
    largest = torch.cat(new, dim=-1).abs().amax(dim=(-2, -1))
    torch.testing.assert_close(largest, torch.ones(2))
    torch.testing.assert_close(new[0] / new[1], s / y)


# --- limited memory ------------------------------------------------------------------------------


def both(steps, side, places, stack=2, dtype=F64):
    """A dense inverse and a memory that took the same damped pairs."""
    dense = torch.eye(side, dtype=F64).repeat(stack, 1, 1)
    memory = torch.zeros(2, stack, places, side, dtype=dtype)
    used = torch.zeros(stack, dtype=torch.int64)
    for _ in range(steps):
        s, y = column(side, stack), column(side, stack)
        s, y, _ = damped(dense, s, y, 0.3)
        # The matrices of a stack need not take the same pairs.
        use = torch.rand(stack) < 0.7
        bfgs.absorb_(dense, s, y, use)
        took, _ = pairs.absorb_(memory[0], memory[1], s.to(dtype), y.to(dtype), use)
        assert torch.equal(took, use)
        used += took
    return dense, memory, used


@pytest.mark.parametrize("steps", [0, 1, 5, 12])
def test_a_memory_that_dropped_nothing_equals_the_matrix(steps):
    dense, memory, used = both(steps, 6, 12)
    filled = (memory[0].abs().sum(dim=-1) > 0).sum(dim=-1)
    assert filled.tolist() == used.tolist()
    columns = torch.randn(2, 6, 4, dtype=F64)
    torch.testing.assert_close(
        pairs.product(*memory, columns), dense @ columns, rtol=1e-8, atol=1e-8
    )


def test_a_full_memory_drops_the_oldest_pair():
    memory = torch.zeros(2, 1, 3, 5, dtype=F64)
    taken = []
    for _ in range(5):
        s = column(5)
        y = spd(5) @ s
        pairs.absorb_(*memory, s, y, everywhere())
        taken.append((s[0, :, 0], y[0, :, 0]))
    expected = torch.eye(5, dtype=F64)
    for s, y in taken[-3:]:
        expected = textbook_inverse(expected, s, y)
    product = pairs.product(*memory, torch.eye(5, dtype=F64)[None])
    torch.testing.assert_close(product[0], expected)


def test_a_memory_stays_positive_definite_in_float32():
    memory = torch.zeros(2, 1, 20, 6)
    for _ in range(300):
        s, y = column(6).float(), column(6).float()
        s, _ = bfgs.damp_by_inverse(s, y, pairs.product(*memory, y))
        y, _ = bfgs.damp_by_level(s, y, 0.55)
        pairs.absorb_(*memory, *bfgs.in_range(s, y), everywhere())
    dense = pairs.product(*memory.double(), torch.eye(6, dtype=F64)[None])[0]
    assert float(torch.linalg.eigvalsh((dense + dense.T) / 2).min()) > 0
    single = pairs.product(*memory, torch.eye(6)[None])[0].double()
    torch.testing.assert_close(single, dense, rtol=0, atol=1e-3 * float(dense.abs().max()))


def test_a_pair_that_cannot_be_used_leaves_the_memory_alone():
    memory = torch.randn(2, 3, 2, 4, dtype=F64)
    memory[1] = memory[0]
    before = memory.clone()
    s = column(4, 3)
    y = s.clone()
    y[0] = -s[0]
    y[1] = float("nan")
    used, reset = pairs.absorb_(*memory, s, y, torch.tensor([True, True, False]))
    assert not used.any() and not reset.any()
    assert torch.equal(memory, before)
