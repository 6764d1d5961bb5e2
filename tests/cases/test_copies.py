"""State that leaves an optimizer and comes back, by every method: checkpoints, copies, wrappers."""

import copy
import pickle

import pytest
import torch
from torch import nn

from cases.helpers import (
    assert_same,
    build,
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

SCHEDULE = {"factor_update_steps": 4, "warmup_steps": 2}


def rows(count):
    source = torch.Generator().manual_seed(2)
    return list(torch.randn(count, 6, 4, generator=source))


def fresh(method, **options):
    """A model and its optimizer, on a base with state of its own."""
    torch.manual_seed(1)
    model = mlp(4, 6, 3)
    return model, build(method, model, sgd(model, lr=0.02, momentum=0.9), **options)


def end(model, optimizer):
    return parameters(model) | factors(optimizer)


@every_optimizer
def test_a72_every_part_of_the_state_matters(method):
    """A resume without the factors, or without the count of steps, ends elsewhere."""
    data = rows(9)
    model, optimizer = fresh(method, **SCHEDULE)
    train(model, optimizer, data[:5])
    weights, saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, data[5:])

    def resumed(state, **load):
        other, own = fresh(method, **SCHEDULE)
        other.load_state_dict(weights)
        own.load_state_dict(state, **load)
        train(other, own, data[5:])
        return parameters(other)

    assert_same(resumed(saved), parameters(model))
    without_step = copy.deepcopy(saved)
    without_step["preconditioner"]["step"] = 0
    base_only = {key: value for key, value in saved.items() if key != "preconditioner"}
    for other in (resumed(without_step), resumed(base_only, strict=False)):
        assert not torch.equal(other["0.weight"], model[0].weight)


def assert_plain(value):
    """Nested dicts, lists and tuples of tensors, numbers, strings and None; plain keys."""
    if isinstance(value, dict):
        assert type(value) is dict and all(type(key) in (int, str) for key in value)
        for part in value.values():
            assert_plain(part)
    elif type(value) in (list, tuple):
        for part in value:
            assert_plain(part)
    else:
        assert value is None or type(value) in (torch.Tensor, int, float, str, bool)


@every_optimizer
def test_a76_state_dict_after_validation_and_scheduler(method):
    model = nn.Sequential(nn.Embedding(7, 4), nn.Dropout(0.5), nn.Linear(4, 3))
    optimizer = build(method, model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
    tokens = torch.tensor([1, 2, 5])
    train(model, optimizer, [tokens])
    scheduler.step()
    model.eval()
    with torch.no_grad():
        model(tokens)
    state = optimizer.state_dict()
    assert_plain(state)
    again = pickle.loads(pickle.dumps(state))
    assert state.keys() == again.keys() == {"state", "param_groups", "preconditioner"}
    layers = again["preconditioner"]["layers"]
    assert list(layers) == ["2"] and layers["2"]["updates"] == 1
    assert_same(layers["2"]["state"], state["preconditioner"]["layers"]["2"]["state"])


@every_optimizer
def test_a77_loading_copies(method):
    data = rows(4)
    model, optimizer = fresh(method)
    twin, other = fresh(method)
    train(model, optimizer, data[:2])
    twin.load_state_dict(model.state_dict())
    other.load_state_dict(optimizer.state_dict())
    kept, before = copy.deepcopy(other.state_dict()), factors(optimizer)
    train(model, optimizer, data[2:])
    now = other.state_dict()
    for number, entry in kept["state"].items():
        assert_same(entry, now["state"][number])
    for name, layer in kept["preconditioner"]["layers"].items():
        assert_same(layer["state"], now["preconditioner"]["layers"][name]["state"])
    assert any(not torch.equal(t, before[key]) for key, t in factors(optimizer).items())
    train(twin, other, data[2:])
    assert_same(end(twin, other), end(model, optimizer))


def by_pickle(pair):
    return pickle.loads(pickle.dumps(pair))


@every_optimizer
@pytest.mark.parametrize("order", [1, -1], ids=["model-first", "optimizer-first"])
@pytest.mark.parametrize("clone", [copy.deepcopy, by_pickle])
def test_a78_a_copied_pair_stays_bound(method, clone, order):
    data = rows(5)
    model, optimizer = fresh(method)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    train(model, optimizer, data[:3])
    there, other = clone((model, optimizer)[::order])[::order]
    assert other.model is there and other.base is not optimizer.base
    own = {id(p) for group in other.param_groups for p in group["params"]}
    assert own == {id(p) for p in there.parameters()}
    assert [len(m._forward_hooks) for m in there] == [len(m._forward_hooks) for m in model]
    kept = end(model, optimizer)
    train(there, other, data[3:])
    assert_same(end(model, optimizer), kept)
    assert set(updates(other).values()) == {5} and set(updates(optimizer).values()) == {3}
    train(model, optimizer, data[3:])
    assert_same(end(there, other), end(model, optimizer))


@every_optimizer
@pytest.mark.parametrize("clone", [copy.deepcopy, by_pickle])
def test_a78_a_copy_alone_brings_its_model(method, clone):
    data = rows(4)
    model, optimizer = fresh(method)
    train(model, optimizer, data[:2])
    other = clone(optimizer)
    assert other.model is not model
    for trained, own in ((model, optimizer), (other.model, other)):
        train(trained, own, data[2:])
    assert_same(end(other.model, other), end(model, optimizer))
    optimizer.close()
    closed = clone(optimizer)
    assert all(not m._forward_hooks for m in closed.model.modules())
    assert "closed" in repr(closed)


def moved(value):
    """Rebuild a nested state as frameworks do when they move one to a device."""
    if isinstance(value, dict):
        return type(value)({key: moved(part) for key, part in value.items()})
    if isinstance(value, (list, tuple)):
        return type(value)(moved(part) for part in value)
    return value.to("cpu", copy=True) if isinstance(value, torch.Tensor) else value


@every_optimizer
def test_a88_a_framework_may_rebuild_the_state_dict(method):
    data = rows(4)
    model, optimizer = fresh(method)
    twin, other = fresh(method)
    train(model, optimizer, data[:2])
    optimizer.load_state_dict(moved(optimizer.state_dict()))
    train(model, optimizer, data[2:])
    train(twin, other, data)
    assert_same(end(model, optimizer), end(twin, other))


class Lookahead(torch.optim.Optimizer):
    """Slow weights around any optimizer, by its public face alone."""

    def __init__(self, inner, every=2, pull=0.5):
        self.inner, self.every, self.pull, self.count = inner, every, pull, 0
        super().__init__(inner.param_groups, dict(inner.defaults))
        self.slow = [p.detach().clone() for p in self.fast]

    @property
    def fast(self):
        return [p for group in self.inner.param_groups for p in group["params"]]

    def step(self, closure=None):
        loss = self.inner.step(closure)
        self.count += 1
        if self.count % self.every == 0:
            with torch.no_grad():
                for slow, p in zip(self.slow, self.fast, strict=True):
                    p.copy_(slow.lerp_(p, self.pull))
        return loss


@every_method
def test_a88_lookahead_around_the_wrapper(method):
    data = rows(4)
    model, inner = fresh(method)
    twin, other = fresh(method)
    outer, slow = Lookahead(inner), [p.detach().clone() for p in twin.parameters()]
    for number, x in enumerate(data):

        def closure(x=x):
            outer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        outer.step(closure)
        take_step(twin, other, lambda x=x: twin(x).square().mean())
        if number % 2:
            with torch.no_grad():
                for s, p in zip(slow, twin.parameters(), strict=True):
                    p.copy_(s.lerp_(p, 0.5))
    assert_same(end(model, inner), end(twin, other))
