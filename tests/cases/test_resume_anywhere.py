"""Checkpoints at any moment, on other devices and in other dtypes (A72, A73), by every method."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from cases.helpers import (
    assert_same,
    build,
    every_method,
    factors,
    mlp,
    parameters,
    take_step,
    train,
    updates,
)

CUTS = (5, 2, 3)


def through_file(state, **load):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True, **load)


def net():
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv1d(3, 4, 2, bias=False), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3), nn.Tanh(),
        nn.Linear(3, 2, bias=False),
    )  # fmt: skip


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)


SCHEDULE = {"factor_update_steps": 2, "warmup_steps": 1}


def fresh(method):
    model = net()
    optimizer = build(method, model, adamw(model), **SCHEDULE)
    return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def saved(parts):
    """A checkpoint with the gradients, as a file gives it back."""
    grads = {n: p.grad for n, p in parts[0].named_parameters() if p.grad is not None}
    return through_file([*(part.state_dict() for part in parts), grads])


def resumed(method, state):
    parts = fresh(method)
    for part, own in zip(parts, state, strict=False):
        part.load_state_dict(own)
    for name, p in parts[0].named_parameters():
        p.grad = state[-1].get(name)
    return parts


def end(parts):
    return parameters(parts[0]) | factors(parts[1])


@every_method
def test_a72_resuming_between_micro_batches_is_exact(method):
    """A checkpoint after every micro-batch of steps that update and of one that does not."""
    if method.startswith("kbfgs"):
        pytest.skip("takes a whole step by its closure")
    x = torch.randn(4, 10, 3, 5)

    def micro_batches():
        return [(batch, part) for batch in x for part in batch.split(CUTS)]

    def go(parts, work, every=False):
        states = []
        model, optimizer, scheduler = parts
        for number, part in work:
            (model(part).square().mean() * len(part) / 10).backward()
            if number % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
            if every:
                states.append(saved(parts))
        return states

    work = list(enumerate(part for _, part in micro_batches()))
    straight = fresh(method)
    states = go(straight, work, every=True)
    for number, state in enumerate(states):
        pending = state[1]["preconditioner"]["pending"]
        due = number // 3 in (0, 2)
        assert bool(pending) == (due and number % 3 != 2)
        parts = resumed(method, state)
        go(parts, work[number + 1 :])
        assert_same(end(parts), end(straight))
        assert parts[1].layers() == straight[1].layers()


@every_method
def test_a72_resuming_at_any_step_is_exact(method):
    x = torch.randn(6, 8, 3, 5)

    def go(parts, batches, every=False):
        states = []
        for batch in batches:
            train(parts[0], parts[1], [batch])
            parts[2].step()
            if every:
                parts[1].zero_grad()
                states.append(saved(parts))
        return states

    straight = fresh(method)
    states = go(straight, x, every=True)
    for number, state in enumerate(states):
        parts = resumed(method, state)
        go(parts, x[number + 1 :])
        assert_same(end(parts), end(straight))
        assert parts[1].layers() == straight[1].layers()
        assert parts[2].get_last_lr() == straight[2].get_last_lr()


@every_method
@pytest.mark.parametrize("clone", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_a78_a_pair_that_is_copied_between_micro_batches_goes_on(method, clone):
    """Copies of parameters have no gradients; those put back find their statistics."""
    if method.startswith("kbfgs"):
        pytest.skip("takes a whole step by its closure")
    x = torch.randn(10, 3, 5)
    pair = fresh(method)[:2]
    pair[0](x[:5]).square().mean().backward()
    there = clone(pair)
    for own, other in zip(pair[0].parameters(), there[0].parameters(), strict=True):
        other.grad = own.grad.clone()
    for model, optimizer in (pair, there):
        model(x[5:]).square().mean().backward()
        optimizer.step()
    assert_same(end(there), end(pair))
    alone = fresh(method)[:2]
    alone[0](x[5:]).square().mean().backward()
    alone[1].step()
    assert not torch.equal(factors(alone[1])["3.inputs"], factors(pair[1])["3.inputs"])


@pytest.mark.parametrize("method", ["exact", "kfac-eigen", "sngd"])
def test_a72_statistics_are_dropped_where_the_gradients_are_not_put_back(method):
    model, optimizer, _ = parts = fresh(method)
    model(torch.randn(5, 3, 5)).square().mean().backward()
    state = saved(parts)
    other, twin = resumed(method, state), resumed(method, state)
    for p in other[0].parameters():
        p.grad = None
    for pair in (other, twin):
        if pair is twin:  # as if there had been no such micro-batch
            pair[1].zero_grad()
        torch.manual_seed(5)
        train(pair[0], pair[1], [torch.randn(6, 3, 5)])
    assert_same(end(other), end(twin))
    assert updates(optimizer) == dict.fromkeys(updates(optimizer), 0)


@every_method
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a73_half_parameters_do_not_round_the_factors(method, dtype):
    """Saved beside float32 parameters, loaded beside half ones: base state is cast, factors not."""
    model = mlp(4, 8, 2)
    optimizer = build(method, model, adamw(model))
    train(model, optimizer, [torch.randn(6, 4) for _ in range(3)])
    there = copy.deepcopy(model).to(dtype)
    other = build(method, there, adamw(there))
    other.load_state_dict(through_file(optimizer.state_dict()))
    assert_same(factors(other), factors(optimizer))
    assert {t.dtype for s in other.state.values() for t in s.values() if t.dim()} == {dtype}
    x = torch.randn(6, 4, dtype=dtype)
    take_step(there, other, lambda: there(x).square().mean())
    floats = {t.dtype for t in factors(other).values() if t.is_floating_point()}
    assert floats == {torch.float32}


@pytest.mark.parametrize("method", ["exact", "lowrank-sketch", "kfac-eigen", "eva", "kbfgs"])
def test_a73_half_factors_load_into_wider_ones_without_a_change(method):
    model = mlp(4, 8, 2)
    optimizer = build(method, model, state_dtype=torch.bfloat16)
    train(model, optimizer, [torch.randn(6, 4) for _ in range(3)])
    other = build(method, copy.deepcopy(model), state_dtype=torch.float32)
    other.load_state_dict(through_file(optimizer.state_dict()))
    assert_same(
        {key: t.double() for key, t in factors(other).items()},
        {key: t.double() for key, t in factors(optimizer).items()},
    )


@every_method
def test_a73_a_checkpoint_without_values_is_refused(method):
    model = mlp(4, 8, 2)
    optimizer = build(method, model)
    train(model, optimizer, [torch.randn(6, 4) for _ in range(2)])
    empty = through_file(optimizer.state_dict(), map_location="meta")
    before = factors(optimizer)
    for strict in (True, False):
        with pytest.raises(ValueError, match=r"layer '0' .* 'meta' and have no values.*map_loc"):
            optimizer.load_state_dict(empty, strict=strict)
    assert_same(factors(optimizer), before)


@pytest.mark.parametrize("method", ["exact", "kfac-inverse", "hylo-kid", "eva"])
def test_a34_statistics_of_a_layer_that_changed_are_left_out(method):
    model, wide = mlp(4, 8, 2), mlp(4, 8, 3)
    optimizer, other = build(method, model), build(method, wide)
    model(torch.randn(6, 4)).square().mean().backward()
    state = through_file(optimizer.state_dict())
    assert set(state["preconditioner"]["pending"]) == {"0", "2"}
    other.load_state_dict(state, strict=False)
    assert "2" not in other.state_dict()["preconditioner"]["pending"]
    train(wide, other, [torch.randn(6, 4)])
    assert updates(other) == {"0": 1, "2": 1}
