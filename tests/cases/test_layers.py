"""Inputs of any rank, attention, layers without bias, and modules without a rule."""

import pytest
import torch
from torch import nn

from cases.helpers import (
    KEEPS_NORM,
    assert_moment,
    assert_same,
    build,
    every_method,
    factors,
    gradient_moment,
    gradient_sized,
    input_moment,
    observer,
    one_or_three,
    parameters,
    reasons,
    sgd_step,
    shown,
    take_step,
    train,
    updates,
)


@one_or_three
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(3, 5, 4), (3, 2, 5, 4)])
def test_a46_sequence_input(shape, bias, vectors):
    def run(x):
        torch.manual_seed(1)
        layer = nn.Linear(4, 3, bias=bias)
        optimizer = observer(layer, vectors)
        layer(x).square().mean().backward()
        optimizer.step()
        return parameters(layer) | factors(optimizer), shown(optimizer, "Linear", "inputs")

    x = torch.randn(shape)
    rows = x.flatten(0, -2)
    (state, moment), (flat, _) = run(x), run(rows)
    assert_same(state, flat, 1e-6)
    assert_moment(moment, input_moment(rows.chunk(vectors), bias))


@one_or_three
@pytest.mark.parametrize("keys", [2, 5, 7])
def test_a46_attention(keys, vectors):
    """Queries and keys of different lengths each keep their own mean."""
    layer = nn.MultiheadAttention(4, 2, batch_first=True)
    optimizer = observer(layer, vectors)
    query, memory = torch.randn(3, 5, 4), torch.randn(3, keys, 4)
    layer(query, memory, memory)[0].square().mean().backward()
    optimizer.step()
    inputs = shown(optimizer, "MultiheadAttention.in_proj", "inputs")
    for seen, source in zip(inputs, (query, memory, memory), strict=True):
        rows = source.flatten(0, 1).chunk(vectors)
        assert_moment(seen[None], input_moment(rows, bias=True))


@one_or_three
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_a46_attention_output(batch_first, bias, vectors):
    layer = nn.MultiheadAttention(4, 2, bias=bias, batch_first=batch_first)
    x = torch.randn(3, 5, 4) if batch_first else torch.randn(3, 4, 4)
    weight = layer.out_proj.weight.detach().clone()
    with torch.no_grad():  # what the output projection sees, through a projection that is one
        layer.out_proj.weight.copy_(torch.eye(4))
        rows = layer(x, x, x)[0]
        layer.out_proj.weight.copy_(weight)
    optimizer = observer(layer, vectors)
    y = layer(x, x, x)[0]
    g = (2 * y).detach()
    y.square().sum().backward()
    optimizer.step()
    name = "MultiheadAttention.out_proj"
    blocks = [block.flatten(0, 1) for block in rows.chunk(vectors)]
    assert_moment(shown(optimizer, name, "inputs"), input_moment(blocks, bias))
    grads = [block.flatten(0, 1) for block in g.chunk(vectors)]
    assert_moment(shown(optimizer, name, "outputs"), gradient_moment(grads, bias))


@one_or_three
@pytest.mark.parametrize("bias", [True, False])
def test_a47_one_dimensional_input(bias, vectors):
    layer = nn.Linear(4, 3, bias=bias)
    optimizer = observer(layer, vectors)
    x = torch.randn(4)
    layer(x).sum().backward()
    optimizer.step()
    assert_moment(shown(optimizer, "Linear", "inputs"), input_moment([x[None]], bias))
    ones = torch.ones(1, 3)
    assert_moment(shown(optimizer, "Linear", "outputs"), gradient_moment([ones], bias))


@gradient_sized
@pytest.mark.parametrize("biases", [(False, False), (True, False), (False, True)])
def test_a48_layers_without_bias(method, biases):
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, bias=biases[0]),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(16, 2, bias=biases[1]),
    )
    optimizer = build(method, model)
    losses = train(model, optimizer, [torch.randn(6, 3, 4, 4)] * 3)
    assert losses[2] < losses[0]
    assert updates(optimizer) == {"0": 3, "3": 3}
    shapes = {name: value.shape[-1] for name, value in factors(optimizer).items() if value.dim()}
    if "0.inputs" in shapes:  # the bias is one more column
        assert shapes["0.inputs"] == 27 + biases[0]
        assert shapes["3.inputs"] == 16 + biases[1]


@gradient_sized
def test_a48_bias_that_is_no_column(method):
    layer = nn.ConvTranspose2d(3, 4, 2)
    optimizer = build(method, layer, **KEEPS_NORM)
    for _ in range(2):
        before = parameters(layer)
        x = torch.randn(6, 3, 4, 4)
        taken = take_step(layer, optimizer, lambda x=x: layer(x).square().mean())
        expected = sgd_step(before, taken.grads)
        torch.testing.assert_close(layer.bias.detach(), expected["bias"])
        moved = (layer.weight.detach() - before["weight"]).norm()
        torch.testing.assert_close(moved, (expected["weight"] - before["weight"]).norm())
        assert not torch.allclose(layer.weight, expected["weight"])


class Mixed(nn.Module):
    """Layers with a rule, without one, and a bare parameter."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self.first = nn.Linear(4, 6)
        self.batch = nn.BatchNorm1d(6)
        self.layer = nn.LayerNorm(6)
        self.pair = nn.Bilinear(6, 6, 5)
        self.slope = nn.PReLU()
        self.last = nn.Linear(5, 2)

    def forward(self, x):
        h = self.layer(self.batch(self.first(self.embedding(x) * self.scale)))
        return self.last(self.slope(self.pair(h, h.tanh())))


@every_method
def test_a49_unsupported_modules(method):
    torch.manual_seed(1)
    model = Mixed()
    optimizer = build(method, model)
    x = torch.randint(11, (8,))
    losses = []
    for _ in range(4):
        before = parameters(model)
        taken = take_step(model, optimizer, lambda: model(x).square().mean())
        expected = sgd_step(before, taken.grads)
        losses.append(taken.loss)
        after = parameters(model)
        others = {name for name in after if name.split(".")[0] not in ("first", "last")}
        for name in others:
            torch.testing.assert_close(after[name], expected[name], rtol=1e-6, atol=1e-7)
        assert not torch.allclose(after["first.weight"], expected["first.weight"])
    assert losses[-1] < losses[0]
    assert updates(optimizer) == {"first": 4, "last": 4}
    without_rule = {
        "(model)": "Mixed",
        "embedding": "Embedding",
        "batch": "BatchNorm1d",
        "layer": "LayerNorm",
        "pair": "Bilinear",
        "slope": "PReLU",
    }
    expected = {name: f"no rule for {kind}" for name, kind in without_rule.items()}
    assert reasons(optimizer) == expected
    assert "no rule for Bilinear" in repr(optimizer)
