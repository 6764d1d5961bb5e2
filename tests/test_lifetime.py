"""Closing, lifetimes and copies of an optimizer and its model."""

import copy
import gc
import pickle
import weakref

import pytest
import torch

import mkor
from small_runs import backward, data, mlp, same, sgd, train

BASES = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
}


def hooks(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_close_leaves_the_base_alone():
    model, twin = mlp(), mlp()
    none = hooks(model)
    optimizer, plain = sgd(model), torch.optim.SGD(twin.parameters(), lr=0.1)
    assert hooks(model) == none + 2
    optimizer.close()
    optimizer.close()
    assert hooks(model) == none == 0
    assert "closed" in repr(optimizer).splitlines()[0]
    train(model, optimizer, data(3))
    train(twin, plain, data(3))
    assert same(model, twin)
    optimizer.add_param_group({"params": []})
    assert hooks(model) == 0


def test_close_keeps_the_factors_for_a_checkpoint():
    model, twin = mlp(), mlp()
    optimizer, other = sgd(model), sgd(twin)
    train(model, optimizer, data(2))
    optimizer.close()
    twin.load_state_dict(model.state_dict())
    other.load_state_dict(optimizer.state_dict())
    assert [info.updates for info in other.layers()] == [2, 2]


def test_a_block_closes_the_optimizer():
    model = mlp()
    with pytest.raises(KeyError), sgd(model) as optimizer:
        assert isinstance(optimizer, mkor.MKOR) and hooks(model) == 2
        train(model, optimizer, data(1))
        raise KeyError
    assert hooks(model) == 0


def test_no_hook_keeps_the_optimizer_alive():
    model = mlp()
    optimizer = sgd(model)
    backward(model, data(1)[0])
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    assert hooks(model) == 0
    kept = [sgd(model) for _ in range(3)]
    assert hooks(model) == 6
    del kept[1:]
    gc.collect()
    assert hooks(model) == 2


def test_the_optimizer_keeps_the_model_no_longer_than_itself():
    model = mlp()
    optimizer = sgd(model)
    train(model, optimizer, data(2))
    gone = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
@pytest.mark.parametrize("name", BASES)
def test_a_copied_pair_trains_on_as_the_original(clone, name):
    model = mlp()
    optimizer = mkor.MKOR(model, BASES[name](model.parameters()), factor_update_steps=2)
    train(model, optimizer, data(3))
    there, other = clone((model, optimizer))
    train(there, other, data(3))
    assert not same(model, there)
    train(model, optimizer, data(3))
    assert same(model, there)
    assert [i.updates for i in other.layers()] == [i.updates for i in optimizer.layers()] == [6, 6]
