"""Every method on every kind of layer: it trains, and it keeps what belongs to others."""

import pytest
import torch
from torch import nn

import mkor
from method_cases import CASES
from mkor.capture.parameters import Parameters
from mkor.methods.base import LayerShape, Rows


class Attention(nn.Module):
    """Self attention, its weights left out."""

    def __init__(self, **options):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True, **options)

    def forward(self, rows):
        return self.attention(rows, rows, rows, need_weights=False)[0]


class Cross(nn.Module):
    """Cross attention with sources of other widths."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True, kdim=2, vdim=3)

    def forward(self, rows):
        return self.attention(rows, rows[..., :2], rows[..., :3], need_weights=False)[0]


class Shared(nn.Module):
    """One weight, two layers."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, rows):
        return self.second(self.first(rows).tanh())


def transformers_conv1d():
    layer = pytest.importorskip("transformers.pytorch_utils").Conv1D(3, 4)
    nn.init.normal_(
        layer.weight, std=0.5
    )  # from 0.02, where every step of a bounded KL is too long
    return layer


KINDS = {
    "linear": (lambda: nn.Linear(4, 3), (8, 4)),
    "linear without bias": (lambda: nn.Linear(4, 3, bias=False), (8, 4)),
    "linear on tokens": (lambda: nn.Linear(4, 3), (8, 5, 4)),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, groups=2), (8, 4, 6)),
    "conv2d": (lambda: nn.Conv2d(2, 3, 3, padding=1, bias=False), (8, 2, 4, 4)),
    "depthwise": (lambda: nn.Conv2d(4, 4, 3, groups=4), (8, 4, 5, 5)),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2, stride=2), (8, 2, 4, 4, 4)),
    "transposed1d": (lambda: nn.ConvTranspose1d(4, 6, 3, stride=2, groups=2), (8, 4, 4)),
    "transposed2d": (lambda: nn.ConvTranspose2d(2, 3, 2, bias=False), (8, 2, 3, 3)),
    "transposed3d": (lambda: nn.ConvTranspose3d(2, 3, 2), (8, 2, 2, 2, 2)),
    "attention": (Attention, (8, 5, 4)),
    "attention without bias": (lambda: Attention(bias=False), (8, 5, 4)),
    "cross attention": (Cross, (8, 5, 4)),
    "shared weight": (Shared, (8, 4)),
    "transformers": (transformers_conv1d, (8, 4)),
}


def setting(kind, case, dtype=torch.float32, channels_last=False, **options):
    """A model, its optimizer, and a loss towards what another model of the kind computes."""
    make, shape = KINDS[kind]
    model, goal = make().to(dtype), make().to(dtype)
    inputs = torch.randn(shape, dtype=dtype) + 0.5
    if channels_last:
        model.to(memory_format=torch.channels_last)
        inputs = inputs.contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        for parameter in goal.parameters():
            parameter.mul_(2)
        targets = goal(inputs)
    base = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    cls, own = CASES[case]
    optimizer = cls(model, base, **{**own, **options})
    return model, optimizer, lambda: (model(inputs) - targets).square().mean()


def step(optimizer, loss):
    def closure():
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value

    return optimizer.step(closure).item()


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("kind", list(KINDS))
def test_a_few_steps_lower_the_loss(kind, case):
    _, optimizer, loss = setting(kind, case)
    assert any(layer.preconditioned for layer in optimizer.layers())
    first = step(optimizer, loss)
    for _ in range(11):
        step(optimizer, loss)
    assert loss().item() < 0.95 * first
    for layer in optimizer.layers():
        assert not layer.preconditioned or layer.updates > 0
        assert layer.skipped == 0


LAYOUTS = [(kind, False) for kind in KINDS]
LAYOUTS += [(kind, True) for kind, (_, shape) in KINDS.items() if len(shape) == 4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("kind", "channels_last"), LAYOUTS)
def test_shapes_dtypes_and_strides_are_kept(kind, dtype, channels_last):
    model, optimizer, loss = setting(kind, "mkor", dtype, channels_last)

    def layout():
        return {
            name: (p.dtype, p.shape, p.stride(), p.data_ptr(), p.grad.dtype, p.grad.stride())
            for name, p in model.named_parameters()
        }

    loss().backward()
    before = layout()
    optimizer.step()
    assert layout() == before
    step(optimizer, loss)
    assert layout() == before
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())


@pytest.mark.parametrize("case", list(CASES))
def test_preconditioning_matches_the_method_on_the_captured_state(case):
    """What the optimizer writes is P(∇W) with the norm of ∇W, bias included."""
    options = {"factor_update_steps": 2, "warmup_steps": 0}
    plain = {"rescale": "gradient", "kl_clip": None}
    model, optimizer, loss = setting("linear", case, **options, **plain)
    if optimizer._method.second_pass:
        pytest.skip("rewrites gradients in step(closure) only")
    step(optimizer, loss)  # updates
    optimizer.zero_grad()
    loss().backward()
    grad = torch.cat([model.weight.grad, model.bias.grad[:, None]], dim=1)
    (record,) = optimizer.state_dict()["preconditioner"]["layers"].values()
    optimizer.precondition()  # doesn't update
    expected = optimizer._method.precondition(record["state"], grad[None])[0].float()
    expected *= grad.norm() / expected.norm()
    torch.testing.assert_close(model.weight.grad, expected[:, :-1])
    torch.testing.assert_close(model.bias.grad, expected[:, -1])


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("kind", ["linear", "depthwise", "transposed1d", "attention"])
def test_training_is_deterministic(kind, case):
    weights = []
    for _ in range(2):
        torch.manual_seed(1)
        model, optimizer, loss = setting(kind, case)
        for _ in range(3):
            step(optimizer, loss)
        weights.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *weights))


@pytest.mark.parametrize("case", list(CASES))
def test_reported_bytes_are_the_real_ones(case):
    _, optimizer, loss = setting("attention", case)
    before = {layer.name: layer.bytes for layer in optimizer.layers()}
    step(optimizer, loss)
    stored = optimizer.state_dict()["preconditioner"]["layers"]
    for layer in optimizer.layers():
        if layer.preconditioned:
            tensors = stored[layer.name]["state"].values()
            real = sum(t.numel() * t.element_size() for t in tensors)
            assert layer.bytes == real
            if not isinstance(optimizer._method.wants(LayerShape(1, 4, 5))[0], Rows):
                assert before[layer.name] == real


QUIET = {mkor.HyLo: {"sampling": "kis"}}
"""Options without which a method listens to the gradient's size for other reasons."""


@pytest.mark.parametrize("case", list(CASES))
def test_the_norm_of_the_gradient_is_computed_for_methods_that_weigh_it(case, monkeypatch):
    calls = []
    real = Parameters.norm_share
    monkeypatch.setattr(Parameters, "norm_share", lambda view: calls.append(view) or real(view))
    cls, options = CASES[case]
    model = nn.Linear(4, 3)
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = cls(model, base, **{**options, **QUIET.get(cls, {})})

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(5, 4)).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    weighs = optimizer._method.weighs()
    assert weighs is (cls in (mkor.MKOR, mkor.KBFGS))
    assert bool(calls) is weighs
