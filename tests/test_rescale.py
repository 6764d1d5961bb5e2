"""Scaling a preconditioned gradient back."""

import pytest
import torch
from torch import nn

import mkor
from mkor.rescale import RESCALE, keep_size, kl_factor, match_norm, rescaled

BAD = [float("nan"), float("inf"), float("-inf")]


def scaled(update, grad, factor=match_norm):
    return rescaled(update, grad, factor, grad.shape[-2:])


def frobenius(matrix):
    return float((matrix.double() ** 2).sum().sqrt())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1e-12, 1e-3, 1.0, 1e6, 1e12])
def test_match_norm_keeps_the_direction_and_takes_the_norm_of_the_gradient(size, dtype):
    grad = torch.randn(3, 4, 5, dtype=dtype) * torch.tensor([1e-4, 1.0, 1e4])[:, None, None]
    update = size * torch.randn(3, 4, 5, dtype=dtype)
    given, kept = update.clone(), grad.clone()
    out = scaled(update, grad)
    assert out.dtype == dtype and torch.equal(grad, kept)
    for g in range(3):
        assert frobenius(out[g]) == pytest.approx(frobenius(grad[g]), rel=1e-6)
        cosine = (out[g].double() * given[g].double()).sum()
        assert float(cosine) == pytest.approx(frobenius(out[g]) * frobenius(given[g]), rel=1e-6)


def test_match_norm_is_joint_over_weight_and_bias():
    """The bias is a column of the matrix: one ratio serves both."""
    grad, update = torch.randn(1, 3, 5), torch.randn(1, 3, 5)
    given = update.clone()
    out = scaled(update, grad)
    ratio = out / given
    torch.testing.assert_close(ratio, ratio[:, :1, :1].expand_as(ratio))


def test_match_norm_leaves_zero_gradients_zero():
    zero = torch.zeros(2, 3, 4)
    assert torch.equal(scaled(torch.zeros(2, 3, 4), zero), zero)
    assert torch.equal(scaled(torch.randn(2, 3, 4), zero), zero)


@pytest.mark.parametrize("scale", [match_norm, keep_size])
@pytest.mark.parametrize("bad", BAD)
def test_a_broken_update_gives_the_gradient_of_that_matrix(scale, bad):
    grad, update = torch.randn(3, 4, 5), torch.randn(3, 4, 5)
    update[1, 2, 3] = bad
    good = scaled(update[[0, 2]].clone(), grad[[0, 2]], scale)
    out = scaled(update, grad, scale)
    assert torch.equal(out[1], grad[1])
    assert torch.equal(out[[0, 2]], good)


def test_match_norm_gives_the_gradient_where_the_update_vanished():
    grad = torch.randn(1, 4, 5)
    assert torch.equal(scaled(torch.zeros(1, 4, 5), grad), grad)


def test_match_norm_gives_the_gradient_where_the_norm_overflows():
    grad = torch.randn(1, 4, 5)
    assert torch.equal(scaled(torch.full((1, 4, 5), 1e30), grad), grad)


@pytest.mark.parametrize("bad", BAD)
def test_match_norm_does_not_hide_a_gradient_that_is_not_finite(bad):
    """Loss scalers look for it after the fact."""
    grad = torch.randn(1, 4, 5)
    grad[0, 1, 1] = bad
    assert not torch.isfinite(scaled(torch.randn(1, 4, 5), grad)).all()


def test_keep_size_returns_a_sound_update_as_it_is():
    update = torch.randn(2, 3, 4)
    assert torch.equal(scaled(update.clone(), torch.randn(2, 3, 4), keep_size), update)


def test_the_option_names_the_functions():
    assert RESCALE["gradient"] is match_norm
    assert RESCALE[None] is keep_size


def test_kl_factor_bounds_the_sum():
    products = torch.tensor([0.5, 1.5, -0.4])
    assert float(kl_factor(products, 0.1)) == pytest.approx((0.1 / 1.6) ** 0.5)
    assert float(kl_factor(-products, 0.1)) == pytest.approx((0.1 / 1.6) ** 0.5)
    assert float(kl_factor(products, 2.0)) == 1.0


@pytest.mark.parametrize("products", [[0.0, 0.0], [1.0, -1.0], [float("nan"), 1.0]])
def test_kl_factor_is_one_where_the_sum_says_nothing(products):
    assert float(kl_factor(torch.tensor(products), 0.1)) == 1.0


@pytest.mark.parametrize("limit", [1e-3, lambda step: 1e-3])
def test_kl_clip_scales_all_layers_by_one_factor(limit):
    """ν = √(κ/Σ lr²⟨V, ∇⟩) over weights and biases, with each group's learning rate."""

    def updates(kl_clip):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2), nn.LayerNorm(2))
        groups = [
            {"params": model[0].parameters(), "lr": torch.tensor(0.5)},
            {"params": list(model[2].parameters()) + list(model[3].parameters()), "lr": 2.0},
        ]
        optimizer = mkor.Eva(model, torch.optim.SGD(groups, lr=1.0), kl_clip=kl_clip)
        (model(torch.randn(6, 4)) - torch.randn(6, 2)).square().sum().backward()
        before = [p.grad.clone() for p in model.parameters()]
        optimizer.precondition()
        return before, [p.grad.clone() for p in model.parameters()]

    grads, free = updates(None)
    _, clipped = updates(limit)
    rates = [0.5, 0.5, 2.0, 2.0]
    total = sum(
        lr**2 * float((v * g).sum()) for lr, v, g in zip(rates, free[:4], grads[:4], strict=True)
    )
    assert total > 1e-3
    for one, other in zip(clipped[:4], free[:4], strict=True):
        torch.testing.assert_close(one, other * (1e-3 / total) ** 0.5)
    assert all(map(torch.equal, clipped[4:], grads[4:]))  # not preconditioned, not clipped
