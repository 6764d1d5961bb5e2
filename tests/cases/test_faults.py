"""What must not break a run, by every method: values that are not finite, zeros, growth."""

import copy

import pytest
import torch
from torch import nn

from cases.helpers import (
    KEEPS_NORM,
    assert_same,
    build,
    evaluates_again,
    every_method,
    every_optimizer,
    factors,
    mlp,
    parameters,
    sgd,
    take_step,
    train,
    updates,
)

NAN = float("nan")


def rows(count, seed=2):
    source = torch.Generator().manual_seed(seed)
    return [torch.randn(6, 4, generator=source) for _ in range(count)]


def spoilt(batch):
    batch = batch.clone()
    batch[1, 1] = NAN
    return batch


def curvature(optimizer):
    """Copies of the factors without counters and flags."""
    return {key: t for key, t in factors(optimizer).items() if t.is_floating_point()}


def counted(optimizer, event):
    return sum(getattr(info, event) for info in optimizer.layers())


def finite(tensors):
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values())


def made_finite(model):
    """A backward pass after which the gradients hold zeros in place of what isn't finite."""

    def backward(loss):
        loss.backward()
        for p in model.parameters():
            p.grad.nan_to_num_(0, 0, 0)

    return backward


@every_optimizer
@pytest.mark.parametrize("bias", [True, False])
def test_a63_a_batch_that_the_user_skips_leaves_no_trace(method, bias):
    torch.manual_seed(1)
    model = mlp(4, 6, 3, bias=bias)
    twin = copy.deepcopy(model)
    optimizer, other = build(method, model), build(method, twin)
    data = rows(6)
    for number, x in enumerate(data):
        if number == 2:
            optimizer.zero_grad()
            model(spoilt(x)).square().mean().backward()
        else:
            train(model, optimizer, [x])
    train(twin, other, data[:2] + data[3:])
    assert_same(parameters(model) | factors(optimizer), parameters(twin) | factors(other))
    assert counted(optimizer, "skipped") == 0


@every_optimizer
@pytest.mark.parametrize("state_dtype", [None, torch.bfloat16])
def test_a63_statistics_that_are_not_finite_are_left_out_and_counted(method, state_dtype):
    """The user makes the gradients finite and takes the step; the factors don't take the batch.

    Without a bias: a bias gradient that was made finite is a statistic like any other.
    """
    torch.manual_seed(1)
    model = mlp(4, 6, 3, bias=False)
    optimizer = build(method, model, state_dtype=state_dtype)
    data = rows(6)
    train(model, optimizer, data[:3])
    before = curvature(optimizer)
    take_step(model, optimizer, lambda: model(spoilt(data[3])).square().mean(), made_finite(model))
    after = curvature(optimizer)
    kept = [key for key in after if "mean_" not in key]
    assert_same({k: after[k] for k in kept}, {k: before[k] for k in kept})
    assert all(info.skipped > 0 for info in optimizer.layers())
    assert "skipped" in repr(optimizer)
    losses = train(model, optimizer, data[4:] * 3)
    assert losses[-1] < losses[0]
    assert finite(parameters(model) | factors(optimizer))


@every_optimizer
def test_a63_reset_starts_what_saw_it_anew(method):
    torch.manual_seed(1)
    model = mlp(4, 6, 3, bias=False)
    optimizer = build(method, model, sgd(model, lr=0.02), on_nonfinite="reset")
    data = rows(5)
    train(model, optimizer, data[:3])
    take_step(model, optimizer, lambda: model(data[3] * NAN).square().mean(), made_finite(model))
    found = curvature(optimizer)
    for info in optimizer.layers():
        shape = optimizer._engine.layers[info.name].view.shape
        start = optimizer._method.init(shape, torch.device("cpu"), torch.float32)
        grad = torch.randn(shape.stack, shape.outputs, shape.inputs)
        own = {k.removeprefix(f"{info.name}."): t for k, t in found.items()}
        state = {key: own[key] for key in start if key in own}
        preconditioned = optimizer._method.at(4).precondition(state, grad)
        expected = optimizer._method.at(4).precondition(start, grad)
        torch.testing.assert_close(preconditioned, expected)
        assert info.resets > 0 and info.skipped > 0
    losses = train(model, optimizer, data[4:] * 4)
    assert losses[-1] < losses[0]


@every_optimizer
@pytest.mark.parametrize("bias", [True, False])
def test_a63_raise_changes_nothing(method, bias):
    torch.manual_seed(1)
    model = mlp(4, 6, 3, bias=bias)
    optimizer = build(method, model, on_nonfinite="raise")
    data = rows(4)
    train(model, optimizer, data[:2])
    before = parameters(model) | factors(optimizer)
    step = optimizer.state_dict()["preconditioner"]["step"]
    with pytest.raises(FloatingPointError, match="layer '0' has a statistic or gradient that is"):
        take_step(model, optimizer, lambda: model(spoilt(data[2])).square().mean())
    assert_same(parameters(model) | factors(optimizer), before)
    assert optimizer.state_dict()["preconditioner"]["step"] == step
    train(model, optimizer, data[3:])
    assert finite(parameters(model) | factors(optimizer))
    assert set(updates(optimizer).values()) == {3}


@every_method
@pytest.mark.parametrize("options", [{}, KEEPS_NORM], ids=["own", "norm"])
def test_a64_a_zero_gradient_gives_a_zero_update(method, options):
    torch.manual_seed(1)
    model = mlp(4, 6, 3)
    optimizer = build(method, model, **options)
    before = parameters(model)
    for x in rows(3):
        taken = take_step(model, optimizer, lambda x=x: model(x).square().mean() * 0)
        assert not any(grad.any() for grad in taken.grads.values())
        assert not any(p.grad.any() for p in model.parameters())
    assert_same(parameters(model), before)
    losses = train(model, optimizer, rows(1) * 4)
    assert losses[-1] < losses[0]
    assert finite(parameters(model) | factors(optimizer))


@every_optimizer
def test_a64_zero_gradients_in_auto_and_elsewhere_leave_numbers(method):
    """Here between steps that are not zero, so that averages and momenta are there."""
    torch.manual_seed(1)
    model = mlp(4, 6, 3)
    optimizer = build(method, model)
    for number, x in enumerate(rows(8)):
        take_step(model, optimizer, lambda x=x, n=number: model(x).square().mean() * (n % 2))
        assert finite(parameters(model) | factors(optimizer))
    assert counted(optimizer, "skipped") == 0


@every_optimizer
def test_a64_a_dead_layer_stays_and_the_rest_trains(method):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    nn.init.constant_(model[0].bias, -100)
    # Of mkor.auto, weights decay whether they have a gradient or not.
    optimizer = build(method, model, **({"weight_decay": 0.0} if method == "auto" else {}))
    before = parameters(model)
    losses = [
        take_step(model, optimizer, lambda x=x: (model(x) - 1).square().mean()).loss
        for x in rows(10)
    ]
    after = parameters(model)
    for name in ("0.weight", "0.bias", "2.weight"):
        assert torch.equal(after[name], before[name])
    assert losses[-1] < losses[0]
    assert finite(after | factors(optimizer))


@every_optimizer
def test_a64_a_last_layer_of_zeros_learns(method):
    torch.manual_seed(1)
    model = mlp(4, 5, 3)
    nn.init.zeros_(model[2].weight)
    nn.init.zeros_(model[2].bias)
    optimizer = build(method, model, **({"weight_decay": 0.0} if method == "auto" else {}))
    before = parameters(model)
    (x,) = rows(1)
    target = x[:, :3].tanh() + 0.5

    def loss():
        return (model(x) - target).square().mean()

    losses = [take_step(model, optimizer, loss).loss]
    after = parameters(model)
    assert torch.equal(after["0.weight"], before["0.weight"])
    assert after["2.weight"].any() and after["2.bias"].any()
    losses += [take_step(model, optimizer, loss).loss for _ in range(12)]
    assert losses[-1] < losses[0]
    assert not torch.equal(model[0].weight, before["0.weight"])
    assert finite(parameters(model) | factors(optimizer))


@every_optimizer
@pytest.mark.parametrize("state_dtype", [None, torch.bfloat16])
def test_a66_a_persistent_mean_does_not_blow_up(method, state_dtype):
    """Constant inputs: one direction in every update, and none in all others."""
    torch.manual_seed(1)
    model = nn.Linear(8, 4, bias=False)
    # λ is small beside the curvature that is left near a loss of zero: steps get long there.
    damping = {"damping": 0.1} if method.startswith(("kfac", "kbfgs", "eva")) else {}
    base = sgd(model, lr=0.01)
    optimizer = build(
        *(method, model, base), factor_update_steps=1, state_dtype=state_dtype, **damping
    )
    x, y = torch.ones(6, 8), torch.ones(6, 4)

    def loss():
        return (model(x) - y).square().mean()

    losses = [take_step(model, optimizer, loss).loss for _ in range(100)]
    assert losses[-1] < 0.5 * losses[0]
    assert finite(parameters(model) | factors(optimizer))
    assert counted(optimizer, "skipped") == 0
    largest = max(float(t.abs().max()) for t in curvature(optimizer).values() if t.numel())
    assert largest < 1e4


@every_method
def test_a_batch_a_million_times_as_large_is_got_over(method):
    """Its inputs reach the factors, its gradients are clipped; ordinary batches train on."""
    torch.manual_seed(1)
    model = mlp(4, 8, 3)
    rates = {"kfac": 0.003, "kbfg": 0.01, "eva": 0.01}  # whose steps are longer than a gradient
    base = sgd(model, lr=rates.get(method[:4], 0.1))
    optimizer = build(method, model, base, factor_update_steps=1)
    goal = torch.randn(4, 3) / 2
    unseen = torch.randn(100, 4)

    def loss_of(x, weight=1.0):
        return (model(x) - (x @ goal).tanh()).square().mean() * weight

    def clipped(loss):
        loss.backward()
        if not evaluates_again(optimizer):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    data = rows(70)
    for x in data[:10]:
        take_step(model, optimizer, lambda x=x: loss_of(x), clipped)
    # K-BFGS compares two passes, which clipping would falsify: a loss of zero there.
    weight = 0.0 if evaluates_again(optimizer) else 1.0
    take_step(model, optimizer, lambda: loss_of(1e6 * data[10], weight), clipped)
    with torch.no_grad():
        before = loss_of(unseen).item()
    for x in data[11:]:
        take_step(model, optimizer, lambda x=x: loss_of(x), clipped)
    with torch.no_grad():
        assert loss_of(unseen).item() < 0.8 * before
    assert finite(parameters(model) | factors(optimizer))
    bounds = method.startswith(("kfac", "kbfgs"))
    assert (counted(optimizer, "bounded") > 0) == bounds
