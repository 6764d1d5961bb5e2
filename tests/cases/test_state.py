"""Cases on state: checkpoints, devices and dtypes, aliasing, copies, wrappers around wrappers."""

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mkor
from cases.common import (
    RULES,
    STATE_DTYPES,
    VECTORS,
    assert_same,
    batches,
    factors,
    mlp,
    parameters,
    train,
    wrap,
)

SPARSE_UPDATES = {"factor_update_steps": 4, "warmup_steps": 2}


def through_file(state):
    """A state dict as a strict reader gets it back from a file."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def adamw(model, **options):
    base = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
    return mkor.MKOR(model, base, **options)


@pytest.mark.parametrize("vectors", VECTORS)
@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
@pytest.mark.parametrize("rule", RULES)
def test_a72_a_checkpoint_resumes_to_the_last_bit(rule, state_dtype, vectors):
    options = {"rule": rule, "state_dtype": state_dtype, "vectors": vectors, **SPARSE_UPDATES}
    data = batches(10, 6, 5, 3)

    def fresh():
        model = mlp(5, 4, 3)
        optimizer = adamw(model, **options)
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)

    def steps(model, optimizer, scheduler, part):
        for batch in part:
            train(model, optimizer, [batch])
            scheduler.step()

    straight = fresh()
    steps(*straight, data)
    first = fresh()
    steps(*first, data[:5])
    saved = through_file([part.state_dict() for part in first])
    second = fresh()
    for part, state in zip(second, saved, strict=True):
        part.load_state_dict(state)
    steps(*second, data[5:])
    assert_same(straight[0], second[0])
    assert_same(factors(straight[1]), factors(second[1]))
    assert straight[1].layers() == second[1].layers()
    assert second[1].layers()[0].last_update == 8 and second[1].layers()[0].updates == 4
    assert straight[2].get_last_lr() == second[2].get_last_lr() == [0.02 * 0.5**3]


def test_a72_every_part_of_the_state_matters():
    # The same resume without the factors, or without the step counter, ends elsewhere.
    data = batches(10, 6, 5, 3)
    model = mlp(5, 4, 3)
    optimizer = adamw(model, **SPARSE_UPDATES)
    train(model, optimizer, data[:5])
    weights, saved = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, data[5:])

    def resumed(state, **load):
        other = mlp(5, 4, 3)
        other.load_state_dict(weights)
        opt = adamw(other, **SPARSE_UPDATES)
        opt.load_state_dict(state, **load)
        train(other, opt, data[5:])
        return other

    assert_same(resumed(saved), model)
    without_step = copy.deepcopy(saved)
    without_step["preconditioner"]["step"] = 0
    base_only = {key: value for key, value in saved.items() if key != "preconditioner"}
    for other in (resumed(without_step), resumed(base_only, strict=False)):
        assert not torch.equal(other[0].weight, model[0].weight)


def test_a73_loaded_state_follows_its_parameter():
    model = mlp(5, 4, 3)
    optimizer = wrap(model)
    train(model, optimizer, batches(3, 6, 5, 3))
    saved = copy.deepcopy(optimizer.state_dict())
    for layer in saved["preconditioner"]["layers"].values():
        layer["state"] = {
            key: tensor.double() if tensor.is_floating_point() else tensor
            for key, tensor in layer["state"].items()
        }
    other_model = copy.deepcopy(model)
    other = wrap(other_model)
    other.load_state_dict(saved)
    last = batches(5, 6, 5, 3)[4:]
    train(model, optimizer, last)
    train(other_model, other, last)
    assert {t.dtype for t in factors(other).values()} == {torch.float32}
    assert_same(model, other_model)
    assert_same(factors(optimizer), factors(other))


@pytest.mark.gpu
def test_a73_a_checkpoint_loaded_on_the_cpu_moves_to_the_device():
    model = mlp(5, 4, 3).cuda()
    optimizer = wrap(model)
    data = [(x.cuda(), y.cuda()) for x, y in batches(4, 6, 5, 3)]
    train(model, optimizer, data[:3])
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    optimizer.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
    train(model, optimizer, data[3:])
    assert {t.device.type for t in factors(optimizer).values()} == {"cuda"}


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


def test_a76_state_dict_after_validation_and_scheduler():
    model = nn.Sequential(nn.Embedding(7, 4), nn.Dropout(0.5), nn.Linear(4, 3))
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
    tokens = torch.tensor([1, 2, 5])
    model(tokens).sum().backward()
    optimizer.step()
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


def test_a77_loading_copies():
    data = batches(4, 6, 5, 3)
    model = mlp(5, 4, 3)
    optimizer = wrap(model, momentum=0.9)
    train(model, optimizer, data[:2])
    twin = copy.deepcopy(model)
    other = wrap(twin, momentum=0.9)
    state = optimizer.state_dict()
    other.load_state_dict(state)
    kept = copy.deepcopy(other.state_dict())
    train(model, optimizer, data[2:])
    now = other.state_dict()
    for number, entry in kept["state"].items():
        assert_same(entry, now["state"][number])
    for name, layer in kept["preconditioner"]["layers"].items():
        assert_same(layer["state"], now["preconditioner"]["layers"][name]["state"])
        assert not torch.equal(
            layer["state"]["inputs"], state["preconditioner"]["layers"][name]["state"]["inputs"]
        )
    train(twin, other, data[2:])
    assert_same(model, twin)


def clone_by_deepcopy(pair):
    return copy.deepcopy(pair)


def clone_by_pickle(pair):
    return pickle.loads(pickle.dumps(pair))


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("clone", [clone_by_deepcopy, clone_by_pickle])
@pytest.mark.parametrize("rule", RULES)
def test_a78_a_copied_pair_stays_bound(rule, clone, order):
    data = batches(6, 6, 5, 3)
    model = mlp(5, 4, 3)
    optimizer = wrap(model, momentum=0.9, rule=rule)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    train(model, optimizer, data[:3])
    there, other = clone((model, optimizer)[::order])[::order]
    assert other.model is there and other.base is not optimizer.base
    assert [id(p) for p in other.param_groups[0]["params"]] == [id(p) for p in there.parameters()]
    assert [len(m._forward_hooks) for m in there] == [len(m._forward_hooks) for m in model]
    kept, kept_factors = parameters(model), factors(optimizer)
    train(there, other, data[3:])
    assert_same(parameters(model), kept)
    assert_same(factors(optimizer), kept_factors)
    assert other.layers()[0].updates == 6 and optimizer.layers()[0].updates == 3
    train(model, optimizer, data[3:])
    assert_same(model, there)
    assert_same(factors(optimizer), factors(other))


@pytest.mark.parametrize("clone", [clone_by_deepcopy, clone_by_pickle])
def test_a78_a_copy_alone_brings_its_model(clone):
    data = batches(4, 6, 5, 3)
    model = mlp(5, 4, 3)
    optimizer = wrap(model)
    train(model, optimizer, data[:2])
    other = clone(optimizer)
    train(model, optimizer, data[2:])
    train(other.model, other, data[2:])
    assert other.model is not model
    assert_same(model, other.model)
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


def test_a88_a_framework_may_rebuild_the_state_dict():
    data = batches(4, 6, 5, 3)
    model = mlp(5, 4, 3)
    twin = copy.deepcopy(model)
    optimizer, other = adamw(model), adamw(twin)
    train(model, optimizer, data[:2])
    optimizer.load_state_dict(moved(optimizer.state_dict()))
    train(model, optimizer, data[2:])
    train(twin, other, data)
    assert_same(model, twin)


class Lookahead(torch.optim.Optimizer):
    """Slow weights around any optimizer, by its public face alone."""

    def __init__(self, inner, every=2, pull=0.5):
        self.inner, self.every, self.pull, self.count = inner, every, pull, 0
        super().__init__(inner.param_groups, dict(inner.defaults))
        self.slow = [p.detach().clone() for g in self.param_groups for p in g["params"]]

    def step(self, closure=None):
        loss = self.inner.step(closure)
        self.count += 1
        if self.count % self.every == 0:
            with torch.no_grad():
                fast = [p for g in self.inner.param_groups for p in g["params"]]
                for slow, p in zip(self.slow, fast, strict=True):
                    p.copy_(slow.lerp_(p, self.pull))
        return loss


def test_a88_lookahead_around_the_wrapper():
    data = batches(4, 6, 5, 3)
    model, twin = mlp(5, 4, 3), mlp(5, 4, 3)
    outer, other = Lookahead(wrap(model)), wrap(twin)
    slow = parameters(twin)
    for number, (x, y) in enumerate(data):
        F.mse_loss(model(x), y).backward()
        outer.step()
        outer.zero_grad()
        train(twin, other, [(x, y)])
        if number % 2:
            with torch.no_grad():
                for s, p in zip(slow, twin.parameters(), strict=True):
                    p.copy_(s.lerp_(p, 0.5))
    assert_same(model, twin)
    assert_same(factors(outer.inner), factors(other))
