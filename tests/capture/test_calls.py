"""Which calls count, what observing leaves alone, and how calls and blocks add up."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import layer_oracles as oracle
from layer_oracles import Observed, backward

CLOSE = {"rtol": 1e-10, "atol": 1e-12}
LAYERS = {
    "linear": (lambda bias: nn.Linear(3, 4, bias=bias), (5, 3)),
    "conv": (lambda bias: nn.Conv2d(2, 4, 3, padding=1, groups=2, bias=bias), (5, 2, 4, 4)),
    "transposed": (lambda bias: nn.ConvTranspose1d(2, 4, 3, stride=2, bias=bias), (5, 2, 4)),
}
KINDS = list(LAYERS)


def layer(kind, bias=False):
    make, shape = LAYERS[kind]
    return make(bias).double(), shape


def batch(shape, samples=5):
    return torch.randn(samples, *shape[1:], dtype=torch.float64)


def explicit(kind, module, inputs, grads):
    """Per-sample rows [G, n, i] and gradients [G, n, o], summed over positions."""
    if kind == "linear":
        rows, outs = oracle.linear_rows(inputs, grads)
        return rows.sum(dim=2), outs.sum(dim=2)
    rows_of = oracle.conv_rows if kind == "conv" else oracle.transposed_rows
    rows, outs = rows_of(module, inputs, grads)
    return rows.mean(dim=2), outs.sum(dim=2)


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_several_calls_add_up_block_by_block(kind, blocks):
    module, shape = layer(kind)
    observed = Observed(module, blocks)
    inputs, grads = 0, 0
    counts = torch.zeros(blocks, dtype=torch.float64)
    calls = []
    for samples in (5, 2):  # of unequal size
        rows = batch(shape, samples)
        calls.append((rows, module(rows)))
    for rows, output in calls:
        a, g = explicit(kind, module, rows, backward(output))
        first = -(-len(rows) // blocks)
        parts = [slice(0, first), slice(first, None)][:blocks]
        inputs = inputs + torch.stack([a[:, part].sum(dim=1) for part in parts], dim=1)
        grads = grads + torch.stack([g[:, part].sum(dim=1) for part in parts], dim=1)
        counts += torch.tensor([len(rows[part]) for part in parts])
    seen = observed.seen()
    assert torch.equal(seen.rows, counts)
    torch.testing.assert_close(seen.inputs, inputs, **CLOSE)
    torch.testing.assert_close(seen.grads, grads, **CLOSE)


@pytest.mark.parametrize("kind", KINDS)
def test_calls_that_are_not_back_propagated_leave_nothing(kind):
    module, shape = layer(kind)
    observed = Observed(module)
    used = batch(shape)
    output = module(used)
    module(batch(shape))  # discarded
    with torch.no_grad():
        module(batch(shape))
    asked = batch(shape).requires_grad_()
    torch.autograd.grad(module(asked).sum(), asked)  # gradients of the input only
    assert observed.seen() is None
    rows, outs = explicit(kind, module, used, backward(output))
    seen = observed.seen()
    torch.testing.assert_close(seen.inputs[:, 0], rows.sum(dim=1), **CLOSE)
    torch.testing.assert_close(seen.grads[:, 0], outs.sum(dim=1), **CLOSE)
    assert int(seen.rows[0]) == 5


def test_nothing_is_seen_unless_armed():
    module, shape = layer("linear", bias=True)
    observed = Observed(module)
    observed.capture.armed = False
    backward(module(batch(shape)))
    assert observed.seen() is None


def test_clear_and_remove_forget_everything():
    module, shape = layer("linear")
    observed = Observed(module)
    backward(module(batch(shape)))
    observed.capture.clear()
    assert observed.seen() is None
    observed.capture.remove()
    backward(module(batch(shape)))
    assert observed.seen() is None
    assert not module._forward_hooks and not module._forward_pre_hooks


def test_clear_keeps_calls_that_wait_for_their_backward():
    module, shape = layer("linear")
    observed = Observed(module)
    backward(module(batch(shape)))
    rows = batch(shape)
    waiting = module(rows)
    observed.capture.clear()
    module.zero_grad()
    grads = backward(waiting)
    seen = observed.seen()
    torch.testing.assert_close(seen.inputs[0, 0], rows.sum(dim=0), **CLOSE)
    torch.testing.assert_close(seen.grads[0, 0], grads.sum(dim=0), **CLOSE)


IN_PLACE = {
    "relu": F.relu_,
    "add": lambda x: x.add_(1.0),
    "scale": lambda x: x.mul_(x.detach() + 3.0),
    "slice": lambda x: x[:2].mul_(2.0).sum() + x.sum(),
}


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("edit", list(IN_PLACE))
@pytest.mark.parametrize("kind", KINDS)
def test_the_output_may_be_edited_in_place(kind, edit, blocks):
    """Against the same computation without capture, whose output gradient is kept."""
    module, shape = layer(kind)
    rows = batch(shape)
    output = module(rows)
    output.retain_grad()
    plain = IN_PLACE[edit](output * 1.0)
    plain.square().sum().backward()
    expected, kept = output.grad, module.weight.grad.clone()
    module.zero_grad()

    observed = Observed(module, blocks)
    watched = IN_PLACE[edit](module(rows))
    assert torch.equal(watched, plain)
    watched.square().sum().backward()
    torch.testing.assert_close(module.weight.grad, kept, **CLOSE)
    _, outs = explicit(kind, module, rows, expected)
    seen = observed.seen()
    torch.testing.assert_close(seen.grads.sum(dim=1), outs.sum(dim=1), **CLOSE)


@pytest.mark.parametrize("blocks", [1, 2, 7])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_observing_changes_neither_values_nor_layout(kind, dtype, bias, blocks):
    module, shape = layer(kind, bias)
    module.to(dtype)
    rows = batch(shape).to(dtype)
    if len(shape) == 4:
        rows = rows.to(memory_format=torch.channels_last)
    plain = module(rows)
    observed = Observed(module, blocks)
    watched = module(rows)
    assert torch.equal(watched, plain)
    assert watched.dtype == plain.dtype and watched.shape == plain.shape
    assert watched.stride() == plain.stride()
    watched.float().square().sum().backward()
    seen = observed.seen()
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert seen.inputs.dtype == seen.grads.dtype == seen.rows.dtype == wide
    assert seen.inputs.shape[1] == blocks


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_batch_is_no_rows(kind):
    module, shape = layer(kind)
    observed = Observed(module, 2)
    module(batch(shape, 0)).sum().backward()
    seen = observed.seen()
    assert seen is None or (float(seen.rows.sum()) == 0 and not seen.inputs.isnan().any())


class Rectified(nn.Linear):
    """A linear layer whose backward needs its output."""

    def forward(self, x):
        return torch.relu(super().forward(x))


def rectify(module, args, output):
    return torch.relu(output)


@pytest.mark.parametrize("kind", ["subclass", "hook"])
def test_an_output_that_its_own_backward_needs_is_not_touched(kind):
    module = Rectified(3, 4) if kind == "subclass" else nn.Linear(3, 4)
    if kind == "hook":
        module.register_forward_hook(rectify)
    observed = Observed(module)
    rows = torch.randn(6, 3)
    output = module(rows)
    weights = torch.randn(6, 4)
    (output * weights).sum().backward()
    live = (output > 0) * weights
    torch.testing.assert_close(module.bias.grad, live.sum(dim=0))
    torch.testing.assert_close(observed.seen().inputs[0, 0, :3], rows.sum(dim=0))
