"""MKOR's rules under what must not break a run; `test_faults` has what every method owes."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cases.common import (
    RULES,
    STATE_DTYPES,
    VECTORS,
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


def clear_by_optimizer(model, optimizer):
    optimizer.zero_grad()


def clear_to_zeros(model, optimizer):
    optimizer.zero_grad(set_to_none=False)


def clear_by_model(model, optimizer):
    model.zero_grad()


def clear_by_hand(model, optimizer):
    for p in model.parameters():
        p.grad = None


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "clear", [clear_by_optimizer, clear_to_zeros, clear_by_model, clear_by_hand]
)
def test_a63_nan_batch_that_the_user_skips(clear, bias, bad):
    data = batches(6, 4, 5, 3)
    model = mlp(5, 4, 3, bias=bias)
    twin = copy.deepcopy(model)
    optimizer, other = wrap(model), wrap(twin)
    data[2][0][1, 1] = bad
    for number, (x, y) in enumerate(data):
        F.mse_loss(model(x), y).backward()
        if number != 2:
            optimizer.step()
        clear(model, optimizer)
    train(twin, other, data[:2] + data[3:])
    assert_same(factors(optimizer), factors(other))
    assert_same(model, twin)
    assert counters(optimizer)["skipped"] == 0


@pytest.mark.parametrize("vectors", VECTORS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("clear", [clear_by_optimizer, clear_to_zeros, clear_by_model])
def test_a63_a_finite_batch_that_is_skipped_leaves_no_statistic(clear, rule, vectors):
    data = batches(4, 6, 5, 3)
    model = mlp(5, 4, 3, bias=False)
    twin = copy.deepcopy(model)
    options = {"rule": rule, "vectors": vectors}
    optimizer, other = wrap(model, **options), wrap(twin, **options)
    for number, (x, y) in enumerate(data):
        F.mse_loss(model(x), y).backward()
        if number != 1:
            optimizer.step()
        clear(model, optimizer)
    train(twin, other, data[:1] + data[2:])
    assert_same(factors(optimizer), factors(other))


@pytest.mark.parametrize("vectors", VECTORS)
@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
@pytest.mark.parametrize("rule", RULES)
def test_a63_nan_statistics_are_left_out(rule, state_dtype, vectors):
    # precondition() sees the bad batch; the user's own optimizer then skips its step.
    data = batches(6, 4, 5, 3)
    data[2][0][1, 1] = float("nan")
    model = mlp(5, 4, 3)
    twin = copy.deepcopy(model)
    options = {"rule": rule, "state_dtype": state_dtype, "vectors": vectors}
    optimizer, other = wrap(model, **options), wrap(twin, **options)
    for number, (x, y) in enumerate(data):
        F.mse_loss(model(x), y).backward()
        optimizer.precondition()
        if number != 2:
            optimizer.base.step()
        optimizer.zero_grad()
    train(twin, other, data[:2] + data[3:])
    assert_same(factors(optimizer), factors(other))
    assert_same(model, twin)
    assert_finite(model, optimizer)
    assert counters(optimizer)["skipped"] == 4


@pytest.mark.parametrize(("vectors", "damping"), [(1, None), (3, 0.1)])
@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
@pytest.mark.parametrize("rule", RULES)
def test_a66_a_persistent_mean_does_not_blow_up(rule, state_dtype, vectors, damping):
    model = mlp(8, 4, bias=False)
    options = {"rule": rule, "vectors": vectors, "state_dtype": state_dtype, "damping": damping}
    optimizer = wrap(model, lr=0.01, **options)
    x, y = torch.ones(6, 8), torch.ones(6, 4)
    first = F.mse_loss(model(x), y).item()
    for _ in range(100):
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_finite(model, optimizer)
    assert F.mse_loss(model(x), y).item() < 0.2 * first
    seen = counters(optimizer)
    assert seen["skipped"] == 0
    assert (seen["blends"] + seen["resets"] > 0) == (rule != "reference")


@pytest.mark.parametrize(("vectors", "damping"), [(1, None), (3, 0.1)])
@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
@pytest.mark.parametrize("rule", ["exact", "reference"])
def test_a66_factors_stay_bounded(rule, state_dtype, vectors, damping):
    # An update of "exact" grows J by 1/γ, so a blend that keeps less than γ of it holds it.
    options = {"rule": rule, "vectors": vectors, "state_dtype": state_dtype, "damping": damping}
    model = mlp(8, 4, bias=False)
    optimizer = wrap(model, lr=0.01, blend=0.8, **options)
    limit = {"exact": 1.01 * 100 / 0.9, "reference": 1.01}[rule]
    x, y = torch.ones(6, 8), torch.ones(6, 4)
    for _ in range(100):
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        layer = optimizer.state_dict()["preconditioner"]["layers"]["0"]
        assert all(layer["state"][side].abs().max() <= limit for side in ("inputs", "outputs"))
    assert (counters(optimizer)["blends"] > 0) == (rule == "exact")


def test_a66_without_the_stabiliser_the_guard_resets():
    model = mlp(8, 4, bias=False)
    optimizer = wrap(model, lr=0.01, factor_decay=0.5, norm_limit=1e37)
    x, y = torch.ones(6, 8), torch.ones(6, 4)
    for _ in range(150):
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_finite(model, optimizer)
    seen = counters(optimizer)
    assert seen["resets"] > 0 and seen["blends"] == 0
    assert f"{optimizer.layers()[0].resets} resets" in repr(optimizer)


@pytest.mark.parametrize("vectors", VECTORS)
@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
@pytest.mark.parametrize("rule", RULES)
def test_a69_the_norm_of_the_update_is_the_clipped_one(rule, state_dtype, vectors):
    model = mlp(5, 4, 3)
    optimizer = wrap(model, lr=1.0, rule=rule, state_dtype=state_dtype, vectors=vectors)
    train(model, optimizer, batches(2, 4, 5, 3))
    before = parameters(model)
    x, y = batches(1, 4, 5, 3)[0]
    F.mse_loss(model(x), y).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    clipped = [p.grad.clone() for p in model.parameters()]
    optimizer.step()
    update = [a.double() - b.double() for a, b in zip(before, parameters(model), strict=True)]
    norm = torch.stack([u.norm() for u in update]).norm().item()
    assert norm == pytest.approx(1e-3, rel=2e-3)
    # After the step `.grad` holds the preconditioned gradient.
    for p, u, grad in zip(model.parameters(), update, clipped, strict=True):
        torch.testing.assert_close(p.grad.double(), u, rtol=0, atol=1e-7)
        assert not torch.allclose(p.grad, grad, rtol=1e-3, atol=0)
