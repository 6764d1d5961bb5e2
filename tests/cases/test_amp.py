"""Cases on mixed precision: low-precision parameters, autocast, gradient scaling."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cases.common import (
    RULES,
    STATE_DTYPES,
    VECTORS,
    assert_close,
    assert_finite,
    assert_same,
    batches,
    counters,
    factors,
    mlp,
    parameters,
    train,
    wrap,
)
from cases.helpers import build, evaluates_again, every_method, sgd, take_step


def convnet():
    torch.manual_seed(1)
    head = nn.Linear(3 * 4, 3, bias=False)
    return nn.Sequential(nn.Conv2d(1, 3, 2), nn.Tanh(), nn.Flatten(), head)


@pytest.mark.parametrize("vectors", VECTORS)
@pytest.mark.parametrize("state_dtype", [*STATE_DTYPES, torch.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rule", RULES)
def test_a58_low_precision_parameters(rule, dtype, state_dtype, vectors):
    model = mlp(5, 8, 3, dtype=dtype)
    optimizer = wrap(model, lr=0.2, rule=rule, state_dtype=state_dtype, vectors=vectors)
    losses = train(model, optimizer, batches(1, 8, 5, 3, dtype) * 20)
    assert losses[-1] < 0.9 * losses[0]
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert {t.dtype for t in factors(optimizer).values()} == {state_dtype or torch.float32}
    assert_finite(model, optimizer)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a58_factors_of_low_precision_parameters_are_those_of_float32(dtype):
    low = mlp(5, 8, 3, dtype=dtype)
    full = copy.deepcopy(low).float()
    runs = [(low, wrap(low, lr=0.0)), (full, wrap(full, lr=0.0))]
    data = batches(3, 8, 5, 3, dtype)
    train(*runs[0], data)
    train(*runs[1], [(x.float(), y.float()) for x, y in data])
    assert_close(factors(runs[0][1]), factors(runs[1][1]), rtol=0.05, atol=0.05)


def autocast_step(model, optimizer, x, y, inside):
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.mse_loss(model(x), y)
        if inside:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    if not inside:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("vectors", VECTORS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rule", RULES)
def test_a59_autocast(rule, bias, vectors):
    data = batches(4, 8, 5, 3)
    runs = []
    for mode in ("outside", "inside", "none"):
        model = mlp(5, 8, 3, bias=bias)
        optimizer = wrap(model, rule=rule, vectors=vectors)
        for x, y in data:
            if mode == "none":
                train(model, optimizer, [(x, y)])
            else:
                autocast_step(model, optimizer, x, y, mode == "inside")
        assert {t.dtype for t in factors(optimizer).values()} == {torch.float32}
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        runs.append((model, optimizer))
    assert_same(runs[0][0], runs[1][0])
    assert_same(factors(runs[0][1]), factors(runs[1][1]))
    assert_close(runs[0][0], runs[2][0], rtol=0.05, atol=0.02)
    start = mlp(5, 8, 3, bias=bias)
    assert (runs[0][0][0].weight - start[0].weight).abs().max() > 0.02


def test_a59_autocast_over_convolution_and_attention():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv1d(3, 4, 2)
            self.mix = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x):
            h = self.conv(x).mT
            return self.mix(h, h, h)[0]

    model = Net()
    optimizer = wrap(model)
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.randn(2, 3, 5) + 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert {i.name: i.updates for i in optimizer.layers()} == {
        "conv": 3,
        "mix.in_proj": 3,
        "mix.out_proj": 3,
    }
    assert_finite(model, optimizer)


def scaled_step(model, optimizer, scaler, loss):
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


@pytest.mark.parametrize("vectors", VECTORS)
@pytest.mark.parametrize("rule", RULES)
def test_a60_loss_scale_does_not_reach_the_factors(rule, vectors):
    # The scale doubles in every second step; the layer without a bias sums its own gradient.
    runs = []
    for scaled in (True, False):
        model = convnet()
        optimizer = wrap(model, rule=rule, vectors=vectors)
        scaler = torch.amp.GradScaler("cpu", 2.0**16, growth_interval=2, enabled=scaled)
        torch.manual_seed(3)
        for _ in range(6):
            x, y = torch.randn(6, 1, 3, 3) + 0.5, torch.randn(6, 3)
            scaled_step(model, optimizer, scaler, F.mse_loss(model(x), y))
        assert scaler.get_scale() == (2.0**19 if scaled else 1)
        runs.append((model, optimizer))
    assert_close(runs[0][0], runs[1][0], rtol=1e-3, atol=1e-5)
    assert_close(factors(runs[0][1]), factors(runs[1][1]), rtol=1e-3, atol=1e-4)


@every_method
@pytest.mark.parametrize("unscale", [True, False])
def test_a60_loss_scale_does_not_reach_any_method(method, unscale):
    """With absolute damping too, and with clipping between unscaling and the step."""
    if method.startswith("kbfgs"):
        refuses_a_loss_scaler(method)
        return
    runs = []
    for scaled in (True, False):
        model = convnet()
        optimizer = build(method, model, sgd(model, lr=0.02))
        scaler = torch.amp.GradScaler("cpu", 2.0**16, growth_interval=2, enabled=scaled)
        torch.manual_seed(3)
        for _ in range(6):
            x, y = torch.randn(6, 1, 3, 3) + 0.5, torch.randn(6, 3)
            scaler.scale(F.mse_loss(model(x), y)).backward()
            if unscale:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        runs.append(parameters(model))
    for one, other in zip(*runs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def refuses_a_loss_scaler(method):
    """A scaler passes no closure on, and says so itself where it is given one."""
    model = convnet()
    optimizer = build(method, model)
    scaler = torch.amp.GradScaler("cpu", 2.0**16)
    start = parameters(model)
    scaler.scale(model(torch.randn(6, 1, 3, 3)).square().mean()).backward()
    with pytest.raises(TypeError, match=r"call step\(closure\).*GradScaler.*bfloat16"):
        scaler.step(optimizer)
    assert_same(parameters(model), start)
    assert evaluates_again(optimizer)


def test_a60_raw_vectors_without_a_bias_are_unscaled():
    runs = []
    for scaled in (True, False):
        model = mlp(3, 4, 2, bias=False)
        optimizer = wrap(model, damping=None)
        scaler = torch.amp.GradScaler("cpu", 2.0**16, enabled=scaled)
        for x, y in batches(4, 6, 3, 2):
            scaled_step(model, optimizer, scaler, F.mse_loss(model(x), y))
        runs.append(factors(optimizer))
    assert_close(*runs, rtol=1e-4)


@every_method
def test_a59_autocast_of_every_method(method):
    model = convnet()
    optimizer = build(method, model, sgd(model, lr=0.02))
    for _ in range(4):
        x = torch.randn(6, 1, 3, 3) + 0.5
        with torch.autocast("cpu", torch.bfloat16):
            take_step(model, optimizer, lambda x=x: model(x).square().mean())
    assert {i.updates for i in optimizer.layers() if i.preconditioned} == {4}
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())


@every_method
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a58_parameters_of_other_dtypes_in_every_method(method, dtype):
    model = convnet().to(dtype)
    optimizer = build(method, model, sgd(model, lr=0.02))
    x = torch.randn(6, 1, 3, 3, dtype=dtype) + 0.5
    losses = train_on(model, optimizer, x)
    assert losses[-1] < losses[0]
    assert {p.dtype for p in model.parameters()} == {dtype}


def train_on(model, optimizer, x, steps=8):
    return [
        take_step(model, optimizer, lambda: model(x).square().mean()).loss for _ in range(steps)
    ]


@pytest.mark.parametrize("vectors", VECTORS)
@pytest.mark.parametrize("rule", RULES)
def test_a60_raw_statistics_of_layers_with_a_bias_are_unscaled(rule, vectors):
    runs = []
    for scaled in (True, False):
        model = mlp(5, 4, 3)
        optimizer = wrap(model, rule=rule, vectors=vectors, damping=None)
        scaler = torch.amp.GradScaler("cpu", 2.0**16, enabled=scaled)
        for x, y in batches(4, 6, 5, 3):
            scaled_step(model, optimizer, scaler, F.mse_loss(model(x), y))
        runs.append(factors(optimizer))
    assert_close(*runs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bias", [True, False])
def test_a60_a_step_skipped_for_overflow_leaves_no_trace(bias):
    data = batches(5, 6, 5, 3)
    model = mlp(5, 4, 3, bias=bias)
    twin = copy.deepcopy(model)
    optimizer, other = wrap(model, momentum=0.9), wrap(twin, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", 2.0**16)
    for number, (x, y) in enumerate(data):
        before, index = parameters(model), optimizer.state_dict()["preconditioner"]["step"]
        loss = F.mse_loss(model(x), y)
        if number == 2:
            loss = loss * float("inf")
        scaled_step(model, optimizer, scaler, loss)
        if number == 2:
            assert_same(parameters(model), before)
            assert optimizer.state_dict()["preconditioner"]["step"] == index
    assert scaler.get_scale() == 2.0**15
    train(twin, other, data[:2] + data[3:])
    assert_close(model, twin)
    assert_close(factors(optimizer), factors(other))
    assert counters(optimizer)["skipped"] == 0


def test_a60_unscale_and_clip_before_the_step():
    data = batches(4, 6, 5, 3)
    model = mlp(5, 4, 3)
    twin = copy.deepcopy(model)
    optimizer, other = wrap(model), wrap(twin)
    scaler = torch.amp.GradScaler("cpu", 2.0**12)
    for x, y in data:
        scaler.scale(F.mse_loss(model(x), y)).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        F.mse_loss(twin(x), y).backward()
        expected = nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
        torch.testing.assert_close(norm, expected)
        other.step()
        other.zero_grad()
    assert_close(model, twin)


def idle_optimizer_run(make):
    """Two optimizers under one scaler, the second without gradients: what happens, and weights."""
    model = nn.ModuleDict({"used": mlp(4, 3), "idle": mlp(3, 2)})
    optimizers = [make(model["used"]), make(model["idle"])]
    scaler = torch.amp.GradScaler("cpu", 2.0**10)
    outcomes = []
    for _ in range(2):
        scaler.scale(model["used"](torch.ones(2, 4)).square().mean()).backward()
        for optimizer in optimizers:
            try:
                outcomes.append(scaler.step(optimizer))
            except AssertionError as error:
                outcomes.append(str(error))
        scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad()
    return outcomes, parameters(model)


@every_method
def test_a62_an_idle_optimizer_behaves_as_a_plain_one(method):
    if method.startswith("kbfgs"):
        refuses_a_loss_scaler(method)
        return

    def plain(model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    start = parameters(nn.ModuleDict({"used": mlp(4, 3), "idle": mlp(3, 2)}))
    expected, _ = idle_optimizer_run(plain)
    outcomes, weights = idle_optimizer_run(lambda model: build(method, model, plain(model)))
    assert outcomes == expected and "No inf checks" in expected[1]
    assert_same(weights[2:], start[2:])
    assert not torch.equal(weights[0], start[0])


def test_a62_some_gradients_absent():
    model = mlp(4, 3, 2)
    optimizer = wrap(model)
    scaler = torch.amp.GradScaler("cpu", 2.0**10)
    before = parameters(model)
    scaled_step(model, optimizer, scaler, model[0](torch.ones(2, 4)).square().mean())
    after = parameters(model)
    assert_same(after[2:], before[2:])
    assert not torch.equal(after[0], before[0])
