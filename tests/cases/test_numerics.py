"""Cases on numbers that MKOR's rules take by formulas of their own; `test_batches` has the rest."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mkor
from cases.common import (
    RULES,
    STATE_DTYPES,
    VECTORS,
    assert_close,
    assert_finite,
    assert_same,
    batches,
    dense_factor,
    factors,
    mean_vectors,
    mlp,
    parameters,
    train,
    with_ones,
    wrap,
)
from cases.test_batches import LargestOutput
from mkor.methods.base import EVENTS


@pytest.mark.parametrize("vectors", VECTORS)
@pytest.mark.parametrize("rule", RULES)
def test_a51_batch_of_one_and_a_smaller_last_batch(rule, vectors):
    # Every update weighs the same, whatever the size of its batch; rows are averaged within it.
    model = mlp(5, 3, dtype=torch.float64)
    optimizer = wrap(model, rule=rule, vectors=vectors)
    inputs, grads = [], []
    for size in (8, 8, 3, 1):
        x, y = batches(1, size, 5, 3, torch.float64)[0]
        x = x + size
        F.mse_loss(model(x), y).backward()
        inputs.append(mean_vectors(with_ones(x), vectors))
        grads.append(model[0].bias.grad[:, None].clone())
        optimizer.step()
        optimizer.zero_grad()
    found = factors(optimizer)
    for side, sequence in (("inputs", inputs), ("outputs", grads)):
        expected = dense_factor(rule, sequence)
        torch.testing.assert_close(found["0", side][0], expected, rtol=1e-9, atol=1e-11)
    assert_finite(model, optimizer)


@pytest.mark.parametrize("vectors", VECTORS)
@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
@pytest.mark.parametrize("rule", RULES)
def test_a51_every_variant_survives_any_batch_size(rule, vectors, state_dtype):
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2, bias=False))
    optimizer = wrap(model, rule=rule, vectors=vectors, state_dtype=state_dtype)
    for size in (8, 8, 3, 1, 0, 2):
        before = parameters(model)
        model(torch.randn(size, 2, 4, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        moved = any(not torch.equal(a, b) for a, b in zip(before, parameters(model), strict=True))
        assert moved == (size > 0)
        assert_finite(model, optimizer)


def test_a53_a_very_wide_layer_gets_one_factor():
    model = nn.Linear(16, 50_000, bias=False)
    optimizer = wrap(model)
    model(torch.randn(4, 16) + 1).square().mean().backward()
    before, grad = model.weight.detach().clone(), model.weight.grad.clone()
    with LargestOutput() as largest:
        optimizer.step()
    assert largest.numel <= model.weight.numel()
    found = factors(optimizer)
    assert [(side, tuple(t.shape)) for (_, side), t in found.items()] == [("inputs", (1, 16, 16))]
    (info,) = optimizer.layers()
    assert info.preconditioned and info.bytes == 16 * 16 * 4 + 8 * len(EVENTS)
    assert info.reason == "outputs side without factor: wider than max_dim=8192"
    update = grad.double() @ next(iter(found.values()))[0].double()
    update *= grad.double().norm() / update.norm()
    torch.testing.assert_close(
        before.double() - 0.1 * update, model.weight.detach().double(), rtol=0, atol=1e-7
    )


def test_a53_a_layer_wide_on_both_sides_is_left_to_the_base():
    model = mlp(6, 7, 2)
    twin = copy.deepcopy(model)
    optimizer = wrap(model, max_dim=2)
    assert [info.preconditioned for info in optimizer.layers()] == [True, False]
    assert optimizer.layers()[1].reason == "both sides are wider than max_dim=2"
    x = torch.randn(4, 6)
    model(x).square().mean().backward()
    twin(x).square().mean().backward()
    optimizer.precondition()
    assert_same([p.grad for p in model[0].parameters()], [p.grad for p in twin[0].parameters()])
    assert not torch.equal(model[2].weight.grad, twin[2].weight.grad)


@pytest.mark.parametrize("vectors", VECTORS)
def test_a54_channels_last(vectors):
    plain = nn.Sequential(nn.Conv2d(4, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 4, 3))
    last = copy.deepcopy(plain).to(memory_format=torch.channels_last)
    runs = [(plain, wrap(plain, vectors=vectors)), (last, wrap(last, vectors=vectors))]
    for _ in range(3):
        x = torch.randn(3, 4, 6, 6)
        for model, optimizer in runs:
            optimizer.zero_grad()
            model(x).square().mean().backward()
        strides = [p.grad.stride() for p in last.parameters()]
        assert last[0].weight.grad.is_contiguous(memory_format=torch.channels_last)
        for _, optimizer in runs:
            optimizer.step()
        assert [p.grad.stride() for p in last.parameters()] == strides
    assert_close(plain, last, rtol=1e-4, atol=1e-5)
    assert_close(factors(runs[0][1]), factors(runs[1][1]), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rule", RULES)
def test_a56_factors_are_blind_to_the_reduction_of_the_loss(rule, bias):
    data = batches(4, 6, 5, 3, torch.float64)
    runs = []
    for reduction, lr in (("mean", 0.18), ("sum", 0.01)):
        model = mlp(5, 4, 3, bias=bias, dtype=torch.float64)
        optimizer = wrap(model, lr=lr, rule=rule)
        train(model, optimizer, data, lambda x, y, r=reduction: F.mse_loss(x, y, reduction=r))
        runs.append((model, optimizer))
    assert_close(factors(runs[0][1]), factors(runs[1][1]), rtol=1e-9, atol=1e-12)
    assert_close(runs[0][0], runs[1][0], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("damping", [0.1, None])
@pytest.mark.parametrize("vectors", VECTORS)
@pytest.mark.parametrize("rule", RULES)
def test_a56_a_batch_repeated_leaves_the_factors_unchanged(rule, vectors, damping):
    runs = []
    for times in (1, 2):
        model = mlp(5, 4, 3, bias=vectors == 1, dtype=torch.float64)
        optimizer = wrap(model, rule=rule, vectors=vectors, damping=damping)
        data = batches(3, 6, 5, 3, torch.float64)
        train(model, optimizer, [[t.repeat_interleave(times, 0) for t in pair] for pair in data])
        runs.append(factors(optimizer))
    assert_close(*runs, rtol=1e-9, atol=1e-12)
    eye = torch.eye(6 if vectors == 1 else 5, dtype=torch.float64)
    assert not torch.allclose(runs[0]["0", "inputs"][0], eye, atol=1e-3)


def test_a57_masked_tokens_are_rows_with_a_gradient_of_zero():
    # The mean input counts every token that the layer multiplies, the gradient those in the loss.
    x, target = torch.randn(2, 6, 4).double(), torch.randint(0, 3, (2, 6))
    target[:, 3:] = -100
    model = mlp(4, 3, dtype=torch.float64)
    packed = copy.deepcopy(model)
    optimizer, other = wrap(model), wrap(packed)
    F.cross_entropy(model(x).flatten(0, 1), target.flatten()).backward()
    keep = target != -100
    F.cross_entropy(packed(x[keep]), target[keep]).backward()
    optimizer.step()
    other.step()
    found, there = factors(optimizer), factors(other)
    torch.testing.assert_close(found["0", "outputs"], there["0", "outputs"])
    every = dense_factor("exact", [mean_vectors(with_ones(x.flatten(0, 1)), 1)])
    torch.testing.assert_close(found["0", "inputs"][0], every)
    only = dense_factor("exact", [mean_vectors(with_ones(x[keep]), 1)])
    torch.testing.assert_close(there["0", "inputs"][0], only)


@pytest.mark.parametrize("solver", ["eigen", "inverse"])
def test_a68_a_factor_of_rank_one_is_decomposed(solver):
    """One constant row a batch: all but one eigenvalue of either side are zero."""
    model = nn.Linear(512, 8)
    base = torch.optim.SGD(model.parameters(), lr=0.001)
    every = {"factor_update_steps": 1, "inverse_update_steps": 1}
    optimizer = mkor.KFAC(model, base, solver=solver, damping=1.0, **every)
    x, y = torch.ones(1, 512), torch.randn(1, 8)
    losses = train(model, optimizer, [(x, y)] * 12)
    assert losses[-1] < losses[0]
    (info,) = optimizer.layers()
    assert (info.updates, info.skipped, info.rejected) == (12, 0, 0)
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())


def test_a68_a_decomposition_that_does_not_converge_keeps_the_last(monkeypatch):
    model = mlp(4, 6, 2)
    base = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer = mkor.KFAC(model, base, factor_update_steps=1, inverse_update_steps=1)
    data = batches(6, 5, 4, 2)
    train(model, optimizer, data[:2])
    before = optimizer.state_dict()["preconditioner"]["layers"]["0"]["state"]
    vectors, moment = before["inputs_vectors"].clone(), before["inputs"].clone()

    def fail(matrix):
        raise torch.linalg.LinAlgError("did not converge")

    monkeypatch.setattr(torch.linalg, "eigh", fail)
    train(model, optimizer, data[2:])
    after = optimizer.state_dict()["preconditioner"]["layers"]["0"]["state"]
    assert torch.equal(after["inputs_vectors"], vectors)
    assert not torch.equal(after["inputs"], moment)  # the average goes on
    assert {info.rejected for info in optimizer.layers()} == {2 * 4}
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())
