"""Gradients that are rewritten where they lie: the copy's numbers, in the gradient's memory."""

import pytest
import torch
from torch import nn

import mkor
from mkor.linalg import subtract_product_
from mkor.rescale import RESCALE, rescale_, rescaled

ROWS = {"representation": "lowrank", "statistic": "sketch", "vectors": 4, "rank": 6}
LAYERS = {
    "linear": lambda: nn.Linear(12, 7),
    "linear without bias": lambda: nn.Linear(12, 7, bias=False),
    "convolution": lambda: nn.Conv2d(4, 6, 3, padding=1),
    "groups": lambda: nn.Conv2d(4, 6, 3, groups=2),
    "transposed convolution": lambda: nn.ConvTranspose2d(4, 6, 3),
}


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        return self.mix(x, x, x, need_weights=False)[0]


LAYERS["attention"] = Attention
INPUTS = {"linear": (16, 12), "attention": (4, 5, 8)}


def trained(layer, rescale, copied, monkeypatch, dtype=torch.float64, **options):
    """The gradients of a layer's second step, and where they lie before and after it."""
    torch.manual_seed(0)
    model = LAYERS[layer]().to(dtype)
    shape = INPUTS.get(layer.split(" ")[0], (8, 4, 6, 6))
    base = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = mkor.MKOR(model, base, rescale=rescale, damping=0.003, **{**ROWS, **options})
    if copied:
        monkeypatch.setattr(type(optimizer._engine.method), "correction", lambda *_: None)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(shape, dtype=dtype)).square().sum().backward()
        before = [p.grad.data_ptr() for p in model.parameters()]
        optimizer.step()
    grads = [p.grad.clone() for p in model.parameters()]
    return grads, before, [p.grad.data_ptr() for p in model.parameters()]


@pytest.mark.parametrize("rescale", RESCALE)
@pytest.mark.parametrize("layer", LAYERS)
def test_gradients_in_place_are_those_of_the_copy(layer, rescale, monkeypatch):
    grads, before, after = trained(layer, rescale, False, monkeypatch)
    expected, *_ = trained(layer, rescale, True, monkeypatch)
    assert before == after
    for grad, other in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("option", ["half-precision gradients", "a bound on the step", "dense"])
def test_what_needs_the_copy_gets_it(option, monkeypatch):
    called = []
    monkeypatch.setattr("mkor.rewrite.subtract_product_", lambda *args: called.append(args))
    dtype = torch.bfloat16 if option.startswith("half") else torch.float32
    options = {
        "a bound on the step": {"kl_clip": 0.1},
        "dense": {"representation": "dense", "rank": 40, "wide_sides": None},
    }
    trained("linear", "gradient", False, monkeypatch, dtype, **options.get(option, {}))
    assert not called


class Cast(nn.Linear):
    """A layer whose weight and bias have two dtypes."""

    def forward(self, x):
        return nn.functional.linear(x, self.weight.double(), self.bias.double())


@pytest.mark.parametrize("wide", ["weight", "bias"])
def test_a_weight_and_a_bias_of_two_dtypes_are_copied(wide):
    layer = Cast(12, 7)
    setattr(layer, wide, nn.Parameter(getattr(layer, wide).detach().double()))
    optimizer = mkor.MKOR(layer, torch.optim.SGD(layer.parameters(), lr=0.01), **ROWS)
    for _ in range(2):
        optimizer.zero_grad()
        layer(torch.randn(16, 12).double()).square().sum().backward()
        optimizer.step()
    assert all(torch.isfinite(parameter).all() for parameter in layer.parameters())


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_a_part_without_a_gradient_stays_without(frozen, monkeypatch):
    torch.manual_seed(0)
    found = []
    for copied in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(12, 9), nn.Tanh(), nn.Linear(9, 7)).double()
        base = torch.optim.SGD(model.parameters(), lr=0.01)
        optimizer = mkor.MKOR(model, base, damping=0.003, **ROWS)
        if copied:
            monkeypatch.setattr(type(optimizer._engine.method), "correction", lambda *_: None)
        for step in range(3):
            getattr(model[2], frozen).requires_grad_(step == 0)
            optimizer.zero_grad()
            model(torch.randn(16, 12, dtype=torch.float64)).square().sum().backward()
            optimizer.step()
        assert getattr(model[2], frozen).grad is None
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    for grad, other in zip(*found, strict=True):
        torch.testing.assert_close(grad, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("side", [0, 1])
def test_a_product_that_may_not_be_finite_leaves_the_gradient(bad, side):
    grad, both = torch.randn(3, 5, 4), [torch.randn(3, 5, 2), torch.randn(3, 2, 4)]
    both[side][1, 0, 0] = bad
    expected = grad - both[0] @ both[1]
    expected[1] = grad[1]
    pieces = [grad[..., :3], grad[..., 3:]]
    subtract_product_(pieces, *both)
    torch.testing.assert_close(torch.cat(pieces, dim=-1), expected)


@pytest.mark.parametrize("name", RESCALE)
@pytest.mark.parametrize("size", [0.0, 1e-3, 1e25])
def test_pieces_are_scaled_as_the_whole(name, size):
    update, grad = size * torch.randn(2, 5, 4), torch.randn(2, 5, 4)
    grad = grad if size else torch.zeros_like(grad)
    other = torch.linalg.vector_norm(grad, dim=(-2, -1), keepdim=True)
    expected = update.clone()
    if size < 1e20:  # larger ones have no norm in float32 and stay
        expected = rescaled(update.clone(), grad, RESCALE[name], (5, 4))
    pieces = [update[..., :3], update[..., 3:]]
    rescale_(pieces, RESCALE[name], (5, 4), other)
    if size < 1e20:
        torch.testing.assert_close(torch.cat(pieces, dim=-1), expected)
    else:
        assert torch.isfinite(torch.cat(pieces, dim=-1)).all()
