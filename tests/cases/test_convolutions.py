"""Convolutions of all kinds: their statistics against ones made by autograd or by hand."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cases.helpers import (
    assert_moment,
    assert_same,
    build,
    every_method,
    factors,
    gradient_moment,
    gradients,
    input_moment,
    observer,
    one_or_three,
    parameters,
    shown,
    train,
    updates,
)

CONVOLUTIONS = {
    "a40-groups": (nn.Conv2d, (4, 6, 3), {"groups": 2}),
    "a40-depthwise": (nn.Conv2d, (4, 8, 3), {"groups": 4}),
    "a40-groups-1d": (nn.Conv1d, (4, 6, 3), {"groups": 2, "padding": 1}),
    "a41-all": (nn.Conv2d, (3, 4, 3), {"stride": 2, "padding": 1, "dilation": 2}),
    "a41-uneven": (
        nn.Conv2d,
        (3, 4, (2, 3)),
        {"stride": (1, 3), "padding": (2, 0), "dilation": (3, 1)},
    ),
    "a42-even": (nn.Conv2d, (3, 4, 2), {"padding": "same"}),
    "a42-dilated": (nn.Conv2d, (3, 4, (3, 5)), {"padding": "same", "dilation": (2, 3)}),
    "a42-valid": (nn.Conv2d, (3, 4, 2), {"padding": "valid"}),
    "a44-circular": (nn.Conv2d, (3, 4, 3), {"padding": 1, "padding_mode": "circular"}),
    "a44-reflect": (nn.Conv2d, (3, 4, 3), {"padding": (1, 2), "padding_mode": "reflect"}),
    "a44-replicate": (nn.Conv1d, (3, 4, 4), {"padding": "same", "padding_mode": "replicate"}),
    "a45-1d": (nn.Conv1d, (3, 5, 3), {"stride": 2}),
    "a45-3d": (nn.Conv3d, (2, 4, (1, 2, 3)), {"padding": 1}),
}

TRANSPOSED = {
    "a45-2d": (nn.ConvTranspose2d, (3, 5, 2), {}),
    "a45-2d-all": (
        nn.ConvTranspose2d,
        (4, 6, (3, 2)),
        {"stride": (2, 3), "padding": (1, 0), "output_padding": (1, 2), "dilation": 2, "groups": 2},
    ),
    "a45-1d": (nn.ConvTranspose1d, (3, 5, 3), {"stride": 2, "padding": 2}),
    "a45-1d-dilated": (
        nn.ConvTranspose1d,
        (3, 5, 3),
        {"dilation": 2, "padding": 1, "output_padding": 1},
    ),
    "a45-3d": (nn.ConvTranspose3d, (2, 4, 2), {"stride": 2}),
}


def image(layer, samples):
    dims = len(layer.kernel_size)
    return torch.randn(samples, layer.in_channels, *(9, 8, 5)[:dims])


def mean_patch(layer, x):
    """Mean over samples and positions of the patches that each group sees, [G, i].

    Of the sum of all outputs, the gradient of a kernel is the sum of its patches.
    """
    y = layer(x)
    (total,) = torch.autograd.grad(y.sum(), layer.weight)  # [C_out, C/G, *K]
    positions = y.shape[0] * y[0, 0].numel()
    return total.reshape(layer.groups, -1, total[0].numel())[:, 0] / positions


@one_or_three
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_a40_a41_a42_a44_a45_convolution(kind, bias, vectors):
    cls, sizes, options = CONVOLUTIONS[kind]
    layer = cls(*sizes, bias=bias, **options)
    optimizer = observer(layer, vectors)
    x = image(layer, samples=6)
    g = (2 * layer(x)).flatten(2).sum(dim=-1).detach()  # of the sum of squares, [n, C_out]
    patches = [mean_patch(layer, block) for block in x.chunk(vectors)]  # [G, i]
    optimizer.zero_grad()
    layer(x).square().sum().backward()
    norm = torch.cat([p.grad.flatten() for p in layer.parameters()]).norm()
    optimizer.step()

    name, per_group = cls.__name__, g.shape[1] // layer.groups
    inputs, outputs = shown(optimizer, name, "inputs"), shown(optimizer, name, "outputs")
    assert inputs.shape[0] == outputs.shape[0] == layer.groups
    for group in range(layer.groups):
        rows = [patch[group, None] for patch in patches]
        assert_moment(inputs[group, None], input_moment(rows, bias))
        own = g[:, group * per_group : (group + 1) * per_group]
        assert_moment(outputs[group, None], gradient_moment(own.chunk(vectors), bias))
    after = torch.cat([p.grad.flatten() for p in layer.parameters()]).norm()
    torch.testing.assert_close(after, norm, rtol=1e-4, atol=0)


def test_a41_mean_patch_by_unfold():
    layer = nn.Conv2d(3, 4, 3, stride=2, padding=1, dilation=2, bias=False)
    optimizer = observer(layer)
    x = image(layer, samples=6)
    layer(x).sum().backward()
    optimizer.step()
    unfolded = F.unfold(x, 3, stride=2, padding=1, dilation=2)  # [n, C·K, positions]
    rows = unfolded.mT.flatten(0, 1)
    assert_moment(shown(optimizer, "Conv2d", "inputs"), input_moment([rows], bias=False))


@one_or_three
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", TRANSPOSED)
def test_a45_transposed_convolution(kind, bias, vectors):
    cls, sizes, options = TRANSPOSED[kind]
    layer = cls(*sizes, bias=bias, **options)
    optimizer = observer(layer, vectors)
    x = image(layer, samples=6)
    y = layer(x).detach()
    groups, outputs = layer.groups, layer.weight[0].numel()
    grads = []  # per sample, the sum of the output's patches: a kernel's gradient for ones
    for sample in y:
        made = layer(torch.ones_like(x[:1]))
        (total,) = torch.autograd.grad(made, layer.weight, 2 * sample[None])
        grads.append(total.reshape(groups, -1, outputs)[:, 0])
    g = torch.stack(grads, dim=1)  # [G, n, o]
    optimizer.zero_grad()
    layer(x).square().sum().backward()
    before = gradients(layer)
    optimizer.step()
    means = x.flatten(2).mean(dim=-1).reshape(6, groups, -1)
    name = cls.__name__
    for group in range(groups):
        inputs = shown(optimizer, name, "inputs")[group, None]
        assert_moment(inputs, input_moment(means[:, group].chunk(vectors), bias=False))
        seen = shown(optimizer, name, "outputs")[group, None]
        assert_moment(seen, gradient_moment(g[group].chunk(vectors), bias=False))
    if bias:
        assert torch.equal(layer.bias.grad, before["bias"])
    torch.testing.assert_close(layer.weight.grad.norm(), before["weight"].norm())


@every_method
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
@pytest.mark.parametrize(
    "kind", ["a40-depthwise", "a41-all", "a42-even", "a45-1d", "a45-3d", "transposed"]
)
def test_a40_a41_a42_a45_convolutions_train(method, kind):
    cls, sizes, options = {**CONVOLUTIONS, "transposed": TRANSPOSED["a45-2d-all"]}[kind]
    layer = cls(*sizes, **options)
    optimizer = build(method, layer)
    losses = train(layer, optimizer, [image(layer, samples=6)] * 3)
    assert losses[1] < losses[0] and losses[2] < losses[0]
    assert updates(optimizer) == {cls.__name__: 3}


@one_or_three
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", ["Conv1d", "Conv2d", "ConvTranspose1d", "ConvTranspose2d"])
def test_a47_convolution_of_one_sample(kind, bias, vectors):
    """An input without a batch dimension is a batch of one."""

    def run(batch):
        torch.manual_seed(1)
        layer = getattr(nn, kind)(3, 4, 3, bias=bias)
        optimizer = observer(layer, vectors)
        y = layer(x[None] if batch else x)
        assert y.dim() == x.dim() + batch
        y.square().sum().backward()
        optimizer.step()
        return parameters(layer) | factors(optimizer)

    x = torch.randn(3, 8) if "1d" in kind else torch.randn(3, 8, 7)
    assert_same(run(batch=False), run(batch=True), 1e-5)
