"""Symmetric matrices as half of their numbers."""

import pytest
import torch

from mkor import triangle


@pytest.mark.parametrize("side", range(1, 10))
def test_half_of_the_numbers_tells_the_matrix(side):
    matrix = torch.randn(3, side, side)
    matrix = matrix + matrix.mT
    packed = triangle.pack(matrix)
    assert packed.shape == (3, side * (side + 1) // 2) == (3, triangle.length(side))
    assert torch.equal(triangle.unpack(packed, side), matrix)


@pytest.mark.parametrize("side", [4, 5])
def test_what_is_not_finite_stays_where_it_was(side):
    for i in range(side):
        for j in range(i, side):
            matrix = torch.ones(1, side, side)
            matrix[0, i, j] = matrix[0, j, i] = torch.nan
            back = triangle.unpack(triangle.pack(matrix), side)
            assert torch.equal(back.isnan(), matrix.isnan())
            assert bool((back[~back.isnan()] == 1).all())
