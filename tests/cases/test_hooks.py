"""Hooks come and go with the optimizer, and don't follow copies of the model."""

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from torch import nn

import mkor
from cases.helpers import (
    assert_same,
    build,
    every_method,
    factors,
    gradients,
    parameters,
    sgd_step,
    take_step,
    train,
    updates,
)


def net():
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)


def hooks(model):
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    flags = ("_forward_hooks_with_kwargs", "_forward_hooks_always_called")
    modules = list(model.modules())
    return sum(len(getattr(m, kind)) for m in modules for kind in (*kinds, *flags))


def live_hooks(model):
    found = [hook for m in model.modules() for hook in m._forward_hooks.values()]
    return [hook for hook in found if hook.capture is not None]


def x():
    return torch.randn(3, 5, 8)


@every_method
def test_a22_deleting_the_optimizer_removes_its_hooks(method):
    model = net()
    model.linear1.register_forward_hook(lambda module, args, out: None)
    n0 = hooks(model)
    for _ in range(3):
        optimizer = build(method, model)
        assert hooks(model) > n0
        train(model, optimizer, [x()])
        gone = weakref.ref(optimizer)
        del optimizer
        assert gone() is None  # by its reference count: no cycle holds it
        assert hooks(model) == n0


@every_method
def test_a22_rebinding_does_not_pile_up_hooks(method):
    model = net()
    optimizer = build(method, model)
    once = hooks(model)
    for _ in range(2):
        optimizer = build(method, model)
        assert hooks(model) == once
    train(model, optimizer, [x()])
    assert set(updates(optimizer).values()) == {1}


def test_a22_the_model_goes_with_its_optimizer():
    model = net()
    optimizer = build("exact", model)
    train(model, optimizer, [x()])
    gone = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert gone() is None


@every_method
def test_a22_close(method):
    model = net()
    n0 = hooks(model)
    with build(method, model) as optimizer:
        train(model, optimizer, [x()])
        known = factors(optimizer)
    assert hooks(model) == n0
    optimizer.close()  # twice is fine
    before = parameters(model)
    model(x()).square().mean().backward()
    grads = gradients(model)
    optimizer.step()
    assert_same(parameters(model), sgd_step(before, grads), 1e-6)
    assert_same(factors(optimizer), known)


@every_method
def test_a22_two_optimizers_at_once(method):
    """A second optimizer on the model changes nothing of what the first one sees."""

    def run(second):
        torch.manual_seed(1)
        model = net()
        first = build(method, model)
        other = build(method, model) if second else None
        train(model, first, batches)
        assert other is None or set(updates(other).values()) == {0}
        return parameters(model) | factors(first)

    batches = [x() for _ in range(2)]
    assert_same(run(second=True), run(second=False))


@pytest.mark.parametrize("others", [["kfac-eigen"], ["exact", "kfac-eigen"]])
def test_a22_an_attention_shows_the_last_of_several_optimizers_its_own_operand(others):
    def seen(others):
        torch.manual_seed(1)
        model = net()
        kept = [build(method, model) for method in others]
        last = build("kfac-eigen", model)
        model(batch).square().mean().backward()
        assert len(kept) == len(others)
        return last._engine.collect()["self_attn.out_proj"].inputs

    batch = x()
    torch.testing.assert_close(seen(others), seen([]))


REFUSED = r"built before preconditions self_attn.*close\(\) the first"


@every_method
def test_a22_the_later_of_two_optimizers_is_refused_until_the_first_is_closed(method):
    model = net()
    first, second = build(method, model), build(method, model)
    before = parameters(model)
    with pytest.raises(RuntimeError, match=REFUSED):
        train(model, second, [x()])
    assert_same(parameters(model), before)
    assert set(updates(second).values()) == {0}
    first.close()
    train(model, second, [x()])
    assert set(updates(second).values()) == {1}


def test_a22_a_wrapped_model_or_a_copy_of_the_optimizer_is_no_way_round():
    model = net()
    first = build("exact", model)
    for second in (build("kfac-eigen", nn.Sequential(model)), copy.copy(first)):
        with pytest.raises(
            RuntimeError, match=r"preconditions (0\.)?self_attn.*close\(\) the first"
        ):
            train(model, second, [x()])
    first_again, other = copy.deepcopy((first, model))
    train(other, first_again, [x()])
    assert set(updates(first_again).values()) == {1}
    del second
    train(model, first, [x()])


def test_a22_optimizers_with_parameters_of_their_own_share_a_model():
    """As a generator and a discriminator in one module, or one layer each."""
    model = net()
    halves = [model.linear1, model.linear2]
    optimizers = [mkor.MKOR(model, torch.optim.SGD(half.parameters(), lr=0.1)) for half in halves]
    model(x()).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
    assert [set(updates(optimizer).values()) for optimizer in optimizers] == [{1}, {1}]


def by_pickle(model):
    return pickle.loads(pickle.dumps(model))


def by_save(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@every_method
@pytest.mark.parametrize("duplicate", [by_pickle, by_save, copy.deepcopy])
def test_a24_copies_of_the_model(method, duplicate):
    model = net()
    optimizer = build(method, model)
    train(model, optimizer, [x()])
    other = duplicate(model)
    assert_same(parameters(other), parameters(model))
    assert live_hooks(model)
    assert not live_hooks(other)

    known = factors(optimizer)
    batch = x()
    take_step(
        model, optimizer, lambda: other(batch).square().mean()
    )  # nothing of the copy's pass arrives here
    assert_same(factors(optimizer), known)

    again = build(method, other)
    train(other, again, [x()])
    assert set(updates(again).values()) == {1}


@every_method
def test_a24_a_copy_trains_as_its_original(method):
    model = net()
    optimizer = build(method, model)
    train(model, optimizer, [x()])
    other = by_pickle(model)
    batches = [x() for _ in range(2)]
    results = []
    optimizer.close()
    for trained in (model, other):
        fresh = build(method, trained)
        train(trained, fresh, batches)
        results.append(parameters(trained) | factors(fresh))
        fresh.close()
    assert_same(*results)


def several_devices(model):
    """What DataParallel is on a machine with several devices."""
    parallel = nn.DataParallel(model)
    parallel.device_ids = [0, 1]
    return parallel


def test_a25_data_parallel_is_refused():
    model = nn.Linear(4, 3)
    parallel = several_devices(model)
    with pytest.raises(ValueError, match="DistributedDataParallel"):
        build("exact", parallel)
    with pytest.raises(ValueError, match="DistributedDataParallel"):
        build("exact", nn.Sequential(several_devices(nn.Linear(4, 4)), nn.Linear(4, 3)))


def test_a25_data_parallel_on_one_device_passes_through():
    parallel = nn.DataParallel(nn.Linear(4, 3))
    optimizer = build("exact", parallel)
    train(parallel, optimizer, [torch.randn(5, 4)])
    assert updates(optimizer) == {"Linear": 1}


def test_a25_replicas_made_later_are_refused():
    model = nn.Linear(4, 3)
    optimizer = build("exact", model)
    replica = model._replicate_for_data_parallel()  # as DataParallel does in its forward pass
    replica.weight, replica.bias = model.weight.clone(), model.bias.clone()
    with pytest.raises(RuntimeError, match="DistributedDataParallel"):
        replica(torch.randn(5, 4))
    optimizer.close()
    assert replica(torch.randn(5, 4)).shape == (5, 3)
