"""The formulas of the lemmas, and processes that measure together, against plain references."""

import pytest
import torch

from mkor.factors import dense
from mkor_bench.studies import lemmas
from mkor_bench.studies.processes import in_processes
from toy_study import add_ones

D = 8


def vectors(count, size=1.0):
    generator = torch.Generator().manual_seed(0)
    return [size * torch.randn(D, generator=generator, dtype=torch.float64) for _ in range(count)]


def test_the_printed_rule_is_the_librarys():
    inverse = torch.eye(D, dtype=torch.float64)
    factor = inverse[None].clone()
    for vector in vectors(4, 0.3):
        inverse = lemmas.printed(inverse, vector)
        seen = dense.prepare(vector[None, :, None], None)
        change = dense.paper(factor, seen, lemmas.DECAY, 1e9, 0.95)
        dense.write_(factor, change)
    assert torch.allclose(factor[0], inverse, rtol=1e-12)


def test_the_printed_rule_is_formula_5_entry_by_entry():
    inverse = torch.diag(torch.arange(1.0, D + 1, dtype=torch.float64))
    (v,) = vectors(1)
    g = lemmas.DECAY
    along = sum(v[i] * inverse[i, i] * v[i] for i in range(D))
    found = lemmas.printed(inverse, v)
    for i in range(D):
        for j in range(D):
            low = (1 - g) / (g * g * (1 + g * (1 - g) * along))
            entry = g * inverse[i, j] + low * inverse[i, i] * v[i] * v[j] * inverse[j, j]
            assert float(found[i, j]) == pytest.approx(float(entry))


def test_the_stabiliser_is_that_of_algorithm_1():
    inverse = 3 * torch.eye(2, dtype=torch.float64)
    assert torch.allclose(lemmas.stabilised(inverse), (0.95 * 3 + 0.05) * torch.eye(2).double())
    assert lemmas.stabilised(inverse / 2) is not inverse
    assert torch.equal(lemmas.stabilised(inverse / 2), inverse / 2)


def test_the_bound_is_the_lemmas():
    g = lemmas.DECAY
    expected = (g + 4 * (1 - g) / g**2 * 2.0**3 * D**2) * 1e-3
    assert lemmas.bound(2.0, D, 1e-3) == pytest.approx(expected)


@pytest.mark.parametrize("dtype", lemmas.TYPES.values(), ids=str)
def test_rounding_is_the_error_of_what_was_rounded(dtype):
    found = lemmas.rounding(D, 1.0, dtype, seed=3)
    assert 0 < found["error"] < found["bound"]
    assert lemmas.rounding(D, 1.0, torch.float64, seed=3) == {"error": 0.0, "bound": 0.0}


def test_the_printed_rule_grows_on_large_vectors_and_vanishes_on_small_ones():
    large = lemmas.growth(64, 1.0, False, 0)
    small = lemmas.growth(64, 0.01, False, 0)
    assert large["left"] is not None and large["least"] > -lemmas.ROUNDING
    assert small["left"] is None
    assert small["end"] == pytest.approx(lemmas.DECAY**lemmas.UPDATES, rel=0.1)


def test_processes_see_each_other():
    found = in_processes(add_ones, 2, {})
    assert found == [{"total": 2.0}, {"total": 2.0}]
    assert in_processes(add_ones, 1, {}) == [{"total": 1.0}]
