"""Momentum in place of the gradient, and updates of unit root mean square."""

import copy
import re

import pytest
import torch
from torch import nn

import mkor
from mkor.rescale import fan_in_rms, rescaled, unit_rms

ROWS = {"representation": "lowrank", "statistic": "sketch", "vectors": 3, "rank": 4}
KINDS = [{}, ROWS]


def model_and_data(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2)).double()
    return model, [torch.randn(6, 5, dtype=torch.float64) for _ in range(6)]


def optimizer_for(model, **options):
    return mkor.MKOR(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)


def backward(model, optimizer, x):
    optimizer.zero_grad()
    model(x).square().mean().backward()


@pytest.mark.parametrize("options", KINDS, ids=["dense", "lowrank"])
def test_momentum_is_nesterovs_in_place_of_the_gradient(options):
    """A twin without it, given βM + (1-β)∇ in its gradients by hand, takes the same steps."""
    decay = 0.8
    model, data = model_and_data()
    twin = copy.deepcopy(model)
    optimizer = optimizer_for(model, momentum=decay, **options)
    other = optimizer_for(twin, **options)
    buffers = [torch.zeros_like(p) for p in twin.parameters()]
    for x in data:
        backward(model, optimizer, x)
        optimizer.step()
        backward(twin, other, x)
        other._engine.update()  # statistics are of the gradients as they are
        other._engine.capture.armed = False
        other._engine.schedule, schedule = NEVER, other._engine.schedule
        for parameter, buffer in zip(twin.parameters(), buffers, strict=True):
            buffer.mul_(decay).add_(parameter.grad, alpha=1 - decay)
            parameter.grad = decay * buffer + (1 - decay) * parameter.grad
        other.step()
        other._engine.schedule = schedule
        other._engine.listen()
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


class Never:
    def due(self, step):
        return False


NEVER = Never()


@pytest.mark.parametrize("rescale", ["rms", "fan_in"])
@pytest.mark.parametrize("options", KINDS, ids=["dense", "lowrank"])
def test_every_update_has_the_size_that_rescale_gives(options, rescale):
    model, data = model_and_data()
    optimizer = optimizer_for(model, rescale=rescale, momentum=0.9, **options)
    for x in data:
        backward(model, optimizer, x)
        optimizer.precondition()
        for layer in (model[0], model[2]):
            whole = torch.cat([layer.weight.grad, layer.bias.grad[:, None]], dim=1)
            size = {"rms": 1, "fan_in": (128 / whole.shape[1]) ** 0.5}[rescale]
            assert whole.square().mean().sqrt().item() == pytest.approx(size, rel=1e-9)
        optimizer.base.step()


@pytest.mark.parametrize("factor", [1e-6, 1e6])
def test_the_size_of_the_loss_changes_nothing(factor):
    ends = []
    for scale in (1.0, factor):
        model, data = model_and_data()
        optimizer = optimizer_for(model, rescale="rms", momentum=0.9, **ROWS)
        for x in data:
            optimizer.zero_grad()
            (scale * model(x).square().mean()).backward()
            optimizer.step()
        ends.append(model[0].weight.detach().clone())
    torch.testing.assert_close(*ends, rtol=1e-8, atol=1e-10)


def test_unit_rms_by_hand():
    update = torch.tensor([[[3.0, 4.0]], [[0.0, 0.0]], [[float("nan"), 1.0]], [[0.0, 0.0]]])
    grad = torch.tensor([[[1.0, 1.0]], [[0.0, 0.0]], [[0.0, 2.0]], [[5.0, 5.0]]])
    expected = torch.tensor([[[0.6, 0.8]], [[0.0, 0.0]], [[0.0, 1.0]], [[0.5**0.5, 0.5**0.5]]]) * (
        2**0.5
    )
    torch.testing.assert_close(rescaled(update, grad, unit_rms, (1, 2)), expected)


def test_fan_in_rms_by_hand():
    update, grad = torch.tensor([[[3.0, 4.0], [0, 0]]]), torch.ones(1, 2, 2)
    expected = torch.tensor([[[0.6, 0.8], [0, 0]]]) * 256**0.5  # a norm of √(128 o)
    torch.testing.assert_close(rescaled(update, grad, fan_in_rms, (2, 2)), expected)


@pytest.mark.parametrize("rescale", [unit_rms, fan_in_rms])
@pytest.mark.parametrize("block", [(slice(2), slice(4)), (slice(6), slice(1, 3))])
def test_the_size_of_a_block_is_that_of_the_whole(rescale, block):
    whole = torch.randn(1, 6, 4)
    sizes = tuple(torch.linalg.vector_norm(whole).view(1, 1, 1) for _ in range(2))
    part = whole[0][block][None]
    found = rescaled(part.clone(), part, rescale, (6, 4), sizes)
    torch.testing.assert_close(
        found, rescaled(whole.clone(), whole, rescale, (6, 4))[0][block][None]
    )


def test_a_layer_that_was_not_seen_still_moves_by_its_momentum():
    class Direct(nn.Module):
        def __init__(self):
            super().__init__()
            self.seen, self.unseen = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            return self.seen(self.unseen.forward(x))

    model = Direct()
    optimizer = optimizer_for(model, rescale="rms", momentum=0.9)
    with pytest.warns(UserWarning, match="no statistics arrived for unseen"):
        backward(model, optimizer, torch.randn(4, 3))
        optimizer.precondition()
    whole = torch.cat([model.unseen.weight.grad, model.unseen.bias.grad[:, None]], dim=1)
    assert whole.square().mean().sqrt().item() == pytest.approx(1, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resuming_is_exact(dtype):
    def run(saved_at=None):
        torch.manual_seed(1)
        model = nn.Linear(4, 3).to(dtype)
        optimizer = optimizer_for(model, rescale="rms", momentum=0.9, **ROWS)
        data = [torch.randn(5, 4, dtype=dtype) for _ in range(8)]
        for step, x in enumerate(data):
            if step == saved_at:
                states = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
                model = nn.Linear(4, 3).to(dtype)
                optimizer = optimizer_for(model, rescale="rms", momentum=0.9, **ROWS)
                model.load_state_dict(states[0])
                optimizer.load_state_dict(states[1])
            backward(model, optimizer, x)
            optimizer.step()
        return model.weight

    assert torch.equal(run(), run(saved_at=5))


@pytest.mark.parametrize(
    ("there", "here", "text"),
    [
        ({"momentum": 0.9}, {}, "it has a momentum, this has momentum=None"),
        ({}, {"momentum": 0.9}, "it lacks the momentum"),
    ],
)
def test_a_checkpoint_with_and_without_momentum_is_refused(there, here, text):
    model, data = model_and_data()
    optimizer = optimizer_for(model, **there)
    backward(model, optimizer, data[0])
    optimizer.step()
    saved = optimizer.state_dict()
    optimizer.close()
    other = optimizer_for(model, **here)
    with pytest.raises(ValueError, match=text):
        other.load_state_dict(saved)
    other.load_state_dict(saved, strict=False)
    backward(model, other, data[1])
    other.step()


def test_a_skipped_parameter_keeps_its_momentum():
    model, data = model_and_data()
    optimizer = optimizer_for(model, momentum=0.9)
    backward(model, optimizer, data[0])
    optimizer.step()
    kept = {n: t.clone() for n, t in optimizer._engine.records["0"].momentum.items()}
    optimizer.zero_grad()
    optimizer.step()
    for name, tensor in optimizer._engine.records["0"].momentum.items():
        assert torch.equal(tensor, kept[name])


BAD = [
    ({"momentum": 1.0}, "momentum=1.0 is out of range: momentum must be at least 0 and below 1"),
    ({"momentum": -0.1}, "momentum=-0.1 is out of range"),
    ({"momentum": 0.9, "hybrid": mkor.HybridSwitch()}, "hybrid hands over to a base that would"),
    ({**ROWS, "power": 0.0}, "power=0.0 is out of range: power must be above 0 and at most 1"),
    ({**ROWS, "power": 1.5}, "power=1.5 is out of range"),
    ({"power": 0.5}, "power=0.5 has no effect with representation='dense'"),
]


@pytest.mark.parametrize(("options", "text"), BAD, ids=[text[:30] for _, text in BAD])
def test_bad_options(options, text):
    model, _ = model_and_data()
    with pytest.raises(ValueError, match=re.escape(text)):
        optimizer_for(model, **options)


def test_a_base_that_evaluates_several_times_a_step_is_refused():
    model, _ = model_and_data()
    with pytest.raises(ValueError, match="each of which momentum would take for a step"):
        mkor.MKOR(model, torch.optim.LBFGS(model.parameters()), momentum=0.9)
