"""The three update rules against dense float64 oracles."""

from collections import namedtuple

import pytest
import torch

import dense_oracles as oracle
from mkor.factors import dense

Absorbed = namedtuple("Absorbed", ["blended", "reset"])
NEVER = 1e300  # a norm limit that no inverse here reaches


def absorb(rule, inverse, vectors, decay=0.9, limit=NEVER, blend=0.95):
    """One guarded update in place, as a method does it; the change that was made."""
    change = dense.RULES[rule](inverse, dense.prepare(vectors, None), decay, limit, blend)
    usable = torch.ones(len(inverse), dtype=torch.bool)
    change, reset = dense.guard(change, usable, inverse.dtype)
    dense.write_(inverse, change)
    return Absorbed(change.blended, reset)


def start(side, stack=1):
    return dense.identity(stack, side, torch.float64, torch.device("cpu"))


def assert_close(actual, expected, tolerance=1e-12):
    torch.testing.assert_close(
        actual, expected, rtol=0, atol=tolerance * float(expected.abs().max())
    )


@pytest.mark.parametrize("decay", [0.5, 0.9, 0.99])
@pytest.mark.parametrize("r", [1, 2, 5])
def test_exact_is_the_inverse_of_the_moving_average(r, decay):
    side, updates = 8, 60
    inverse, covariance = start(side), torch.eye(side, dtype=torch.float64)
    for _ in range(updates):
        vectors = torch.randn(side, r, dtype=torch.float64)
        change = absorb("exact", inverse, vectors[None], decay)
        covariance = oracle.moving_average(covariance, vectors, decay)
        assert not change.blended.any() and not change.reset.any()
        assert_close(inverse[0], torch.linalg.inv(covariance))


@pytest.mark.parametrize("size", [0.01, 1.0, 30.0])
@pytest.mark.parametrize("r", [1, 2, 5])
def test_exact_with_stabiliser_blends_the_explicit_inverse(r, size):
    side, decay, limit, blend = 6, 0.7, 2.0, 0.6
    inverse, expected = start(side), torch.eye(side, dtype=torch.float64)
    acted = 0
    for _ in range(60):
        vectors = size * torch.randn(side, r, dtype=torch.float64)
        change = absorb("exact", inverse, vectors[None], decay, limit, blend)
        expected, blended = oracle.exact(expected, vectors, decay, limit, blend)
        assert bool(change.blended) is blended
        acted += blended
        assert_close(inverse[0], expected, 1e-11)
    assert acted > 5


def test_stabiliser_acts_in_both_directions():
    limit, blend = 10.0, 0.75
    large, small = 11 * start(3), start(3) / 11
    inside = torch.cat([9 * start(3), start(3) / 9])
    both = torch.cat([large, small])
    assert dense.stabiliser(both.diagonal(dim1=-2, dim2=-1), limit, blend).tolist() == [
        blend,
        blend,
    ]
    assert dense.stabiliser(inside.diagonal(dim1=-2, dim2=-1), limit, blend).tolist() == [1.0, 1.0]
    # Eq. of lines 5-6, followed by an update by a zero vector, which only divides by γ.
    absorb("exact", both, torch.zeros(2, 3, 1, dtype=torch.float64), 0.9, limit, blend)
    for before, after in ((11.0, both[0]), (1 / 11, both[1])):
        expected = (blend * before + 1 - blend) / 0.9 * torch.eye(3, dtype=torch.float64)
        assert_close(after, expected)


def test_exact_with_r_vectors_is_one_moving_average_of_their_outer_products():
    vectors = torch.randn(1, 7, 3, dtype=torch.float64)
    together = start(7)
    absorb("exact", together, vectors, 0.9)
    covariance = 0.9 * torch.eye(7, dtype=torch.float64) + 0.1 * vectors[0] @ vectors[0].T
    assert_close(together[0], torch.linalg.inv(covariance))
    # Three updates in a row forget more: they are another moving average.
    apart = start(7)
    for j in range(3):
        absorb("exact", apart, vectors[..., j : j + 1], 0.9)
    assert float((together - apart).abs().max()) > 0.01


@pytest.mark.parametrize("rule", list(dense.RULES))
def test_the_order_of_the_columns_does_not_matter_unless_printed_so(rule):
    vectors = torch.randn(1, 6, 4, dtype=torch.float64)
    forward, backward = start(6), start(6)
    absorb(rule, forward, vectors)
    absorb(rule, backward, vectors.flip(-1))
    difference = float((forward - backward).abs().max())
    assert difference > 1e-6 if rule == "paper" else difference < 1e-12


@pytest.mark.parametrize("r", [1, 2, 5])
def test_paper_is_eq_5_and_6_as_printed(r):
    side = 6
    inverse, expected = start(side), torch.eye(side, dtype=torch.float64)
    for _ in range(40):
        vectors = 0.5 * torch.randn(side, r, dtype=torch.float64)
        absorb("paper", inverse, vectors[None], 0.9)
        expected, _ = oracle.paper(expected, vectors, 0.9)
        assert_close(inverse[0], expected)


@pytest.mark.parametrize("r", [1, 3])
def test_paper_with_stabiliser(r):
    side, decay, limit, blend = 5, 0.8, 3.0, 0.6
    inverse, expected = start(side), torch.eye(side, dtype=torch.float64)
    acted = 0
    for _ in range(60):
        vectors = torch.randn(side, r, dtype=torch.float64)
        change = absorb("paper", inverse, vectors[None], decay, limit, blend)
        expected, blended = oracle.paper(expected, vectors, decay, limit, blend)
        assert bool(change.blended) is blended
        acted += blended
        # It amplifies what it sees; so it does with the rounding of what it has seen.
        assert_close(inverse[0], expected, 1e-9)
    assert acted > 5


def test_paper_amplifies_a_repeated_direction_that_exact_damps():
    v = torch.zeros(1, 4, 1, dtype=torch.float64)
    v[0, 0] = 1.0
    printed, right = start(4), start(4)
    for _ in range(20):
        absorb("paper", printed, v)
        absorb("exact", right, v)
    assert float(printed[0, 0, 0]) > 1.2
    assert float(right[0, 0, 0]) <= 1.0
    assert float(printed[0, 1, 1]) == pytest.approx(0.9**20)
    assert float(right[0, 1, 1]) == pytest.approx(0.9**-20)


def test_paper_vanishes_like_the_decay_for_tiny_vectors():
    inverse = start(4)
    v = torch.full((1, 4, 1), 1e-8, dtype=torch.float64)
    for t in range(1, 201):
        absorb("paper", inverse, v)
        assert_close(inverse[0], 0.9**t * torch.eye(4, dtype=torch.float64))


@pytest.mark.parametrize("blend", [0.95, 0.5])
@pytest.mark.parametrize("r", [1, 2, 5])
def test_reference_is_the_released_code(r, blend):
    side = 6
    inverse, expected = start(side), torch.eye(side, dtype=torch.float64)
    for step in range(60):
        vectors = (10.0 ** (step % 3 - 1)) * torch.randn(side, r, dtype=torch.float64)
        absorb("reference", inverse, vectors[None], 0.123, 2.0, blend)
        expected, reset = oracle.reference(expected, vectors, blend)
        assert not reset
        assert_close(inverse[0], expected)
        assert float(torch.linalg.eigvalsh(inverse[0]).max()) <= 1 + 1e-12


def test_reference_is_inert_for_small_vectors_and_forgets_towards_the_identity():
    inverse = start(5)
    for _ in range(50):
        absorb("reference", inverse, 1e-4 * torch.randn(1, 5, 1, dtype=torch.float64))
    assert_close(inverse[0], torch.eye(5, dtype=torch.float64), 1e-5)
    inverse = 0.5 * start(5)
    absorb("reference", inverse, torch.zeros(1, 5, 1, dtype=torch.float64))
    assert_close(inverse[0], 0.525 * torch.eye(5, dtype=torch.float64))


def test_reference_resets_above_its_limit_and_drops_the_statistic():
    inverse = torch.cat([2.5 * start(3), 1.9 * start(3)])
    vectors = torch.ones(2, 3, 1, dtype=torch.float64)
    change = absorb("reference", inverse, vectors, limit=2.0)
    assert change.reset.tolist() == [True, False]
    assert torch.equal(inverse[0], torch.eye(3, dtype=torch.float64))
    expected, _ = oracle.reference(1.9 * torch.eye(3, dtype=torch.float64), vectors[1], 0.95)
    assert_close(inverse[1], expected)


@pytest.mark.parametrize("rule", list(dense.RULES))
@pytest.mark.parametrize("r", [1, 3])
def test_a_stack_is_its_matrices_one_by_one(rule, r):
    stack, side = 4, 5
    size = torch.tensor([0.0, 0.1, 1.0, 20.0], dtype=torch.float64)[:, None, None]
    together = start(side, stack)
    alone = [start(side) for _ in range(stack)]
    for _ in range(30):
        vectors = size * torch.randn(stack, side, r, dtype=torch.float64)
        change = absorb(rule, together, vectors, 0.8, 3.0, 0.7)
        for g in range(stack):
            one = absorb(rule, alone[g], vectors[g : g + 1], 0.8, 3.0, 0.7)
            assert bool(change.blended[g]) == bool(one.blended)
            assert bool(change.reset[g]) == bool(one.reset)
    for g in range(stack):
        assert_close(together[g], alone[g][0], 1e-10)
