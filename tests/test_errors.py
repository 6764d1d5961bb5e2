"""Every error of options and arguments by its text, and that nothing was changed before it."""

import copy
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import prune

import mkor
from mismatches import flat, mlp, sgd


def hooks(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


OPTIONS = {
    "rule": [
        ("exat", "choose from 'exact', 'paper', 'reference'; did you mean 'exact'?"),
        (None, "rule=None is unknown: choose from 'exact', 'paper', 'reference'"),
    ],
    "state_dtype": [
        (torch.int8, "state_dtype=torch.int8 is unknown: choose from None, torch.float32"),
        ("float32", "state_dtype='float32' is unknown"),
    ],
    "wire_dtype": [
        (torch.complex64, "wire_dtype=torch.complex64 is unknown"),
        (torch.int32, "wire_dtype=torch.int32 is unknown: choose from None, torch.float32"),
    ],
    "on_nonfinite": [
        ("skp", "on_nonfinite='skp' is unknown: choose from 'skip', 'reset', 'raise'")
    ],
    "rescale": [
        ("grad", "rescale='grad' is unknown: choose from 'gradient', None, 'rms', 'fan_in'"),
        (False, "rescale=False is unknown"),
    ],
    "factor_decay": [
        (value, f"factor_decay={value!r} is out of range: factor_decay must be between 0 and 1")
        for value in (0, 1, 1.5, -0.1, float("nan"), "0.9", True, None)
    ],
    "damping": [
        (
            value,
            f"damping={value!r} is out of range: damping must be positive and finite, or None",
        )
        for value in (0, -1.0, float("inf"), "0.1", False)
    ],
    "vectors": [
        (value, f"vectors={value!r} is out of range: vectors must be an integer of at least 1")
        for value in (0, 1.0, True, None)
    ],
    "norm_limit": [
        (
            value,
            f"norm_limit={value!r} is out of range: norm_limit must be finite and greater than 1",
        )
        for value in (1, 0.5, float("inf"), "2")
    ],
    "blend": [
        (value, f"blend={value!r} is out of range: blend must be at least 0 and below 1")
        for value in (1, -0.1, float("nan"), None)
    ],
    "max_dim": [
        (value, f"max_dim={value!r} is out of range: max_dim must be an integer of at least 1")
        for value in (0, 2.5, None)
    ],
    "factor_update_steps": [
        (value, f"factor_update_steps={value!r} is out of range: factor_update_steps must be an")
        for value in (0, -1, 2.0, True)
    ],
    "agreement_steps": [
        (value, f"agreement_steps={value!r} is out of range: agreement_steps must be an integer of")
        for value in (0, 1.5, True)
    ],
    "warmup_steps": [
        (value, f"warmup_steps={value!r} is out of range: warmup_steps must be an integer of at")
        for value in (-1, 1.5, None)
    ],
    "skip": [
        ("head", "skip='head' is out of range: skip must be a sequence of regular expressions"),
        (None, "skip=None is out of range: skip must be a sequence of regular expressions"),
        (["a["], "skip='a[' is no regular expression (unterminated character set"),
        ([3], "skip=3 is no regular expression"),
    ],
}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [(name, value, text) for name, rows in OPTIONS.items() for value, text in rows],
)
def test_an_option_out_of_range(name, value, message):
    model = mlp()
    base = sgd(model)
    with pytest.raises(ValueError, match=re.escape(message)):
        mkor.MKOR(model, base, **{name: value})
    assert hooks(model) == 0


@pytest.mark.parametrize("name", ["lr", "decay"])
def test_an_unknown_option(name):
    model = mlp()
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
        mkor.MKOR(model, sgd(model), **{name: 1})


def test_skip_takes_any_collection_but_no_generator():
    model = mlp()
    for skip in (["^0$"], ("^0$",), {"^0$"}):
        with mkor.MKOR(model, sgd(model), skip=skip) as optimizer:
            assert [i.name for i in optimizer.layers() if i.preconditioned] == ["2"]
    with pytest.raises(ValueError, match="skip must be a sequence of regular expressions"):
        mkor.MKOR(model, sgd(model), skip=(pattern for pattern in ["^0$"]))


def test_a_skip_pattern_that_matches_nothing():
    model = mlp()
    with pytest.warns(UserWarning, match=re.escape("pattern 'hed' matches no module name")):
        mkor.MKOR(model, sgd(model), skip=["hed"])


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ([1], "model must be a torch.nn.Module, got list"),
        (None, "model must be a torch.nn.Module, got NoneType"),
    ],
)
def test_a_model_of_another_type(model, message):
    with pytest.raises(TypeError, match=message):
        mkor.MKOR(model, sgd(mlp()))


@pytest.mark.parametrize(
    ("base", "message"),
    [
        (
            torch.optim.AdamW,
            "base must be an optimizer, got the class AdamW; build it first: "
            "AdamW(model.parameters(), lr=...)",
        ),
        ([0.1], "base must be a torch.optim.Optimizer, got list"),
        (nn.Linear, "base must be a torch.optim.Optimizer, got type"),
    ],
)
def test_a_base_of_another_type(base, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        mkor.MKOR(mlp(), base)


def test_a_data_parallel_model():
    model = nn.DataParallel(mlp())
    model.device_ids = [0, 1]
    with pytest.raises(ValueError, match=r"DataParallel over several.*DistributedDataParallel"):
        mkor.MKOR(model, sgd(model))
    assert hooks(model) == 0


@pytest.mark.parametrize(
    ("wrapper", "message"),
    [
        ("FullyShardedDataParallel", r"module '0' is a FullyShardedDataParallel \(FSDP1\).*FSDP2"),
        ("DeepSpeedEngine", "the model is a DeepSpeedEngine.*use torch.distributed.fsdp.fully_sh"),
    ],
)
def test_a_model_whose_parameters_are_flat(wrapper, message):
    """Cases A86 and A87: these packages need not be here, so a class of the name stands in."""
    kind = type(wrapper, (nn.Sequential,), {})
    model = nn.Sequential(kind(*mlp()))
    with pytest.raises(ValueError, match=message):
        mkor.MKOR(model, sgd(model))
    assert hooks(model) == 0


def test_a_parameter_on_a_mesh_of_one_worker():
    from torch.distributed.tensor import DTensor, init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = mlp()
        mesh = init_device_mesh("cpu", (1,))
        model[0].weight = nn.Parameter(DTensor.from_local(model[0].weight.detach(), mesh))
        optimizer = mkor.MKOR(model, sgd(model))
        assert all(info.preconditioned for info in optimizer.layers())
    finally:
        dist.destroy_process_group()


def test_a_parameter_of_zero():
    """Case A87: ZeRO marks the parameters that it partitions."""
    model = mlp()
    model[0].weight.ds_id = 0
    with pytest.raises(ValueError, match=r"parameter '0\.weight' is partitioned by DeepSpeed"):
        mkor.MKOR(model, sgd(model))


def test_a_model_without_parameters():
    with pytest.raises(ValueError, match="model has no parameters, so there is nothing to optimi"):
        mkor.MKOR(nn.ReLU(), sgd(mlp()))


def test_a_base_of_another_model():
    model = mlp()
    message = "none of the base optimizer's 4 parameters belong to the model; build the base from"
    with pytest.raises(ValueError, match=message):
        mkor.MKOR(model, sgd(mlp()))
    assert hooks(model) == 0


def test_a_base_with_parameters_of_others():
    model, other = mlp(), nn.Linear(7, 2)
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    base.add_param_group({"params": other.parameters()})
    before = copy.deepcopy(base.state_dict())
    message = re.escape(
        "the base optimizer has 2 parameters that are not the model's, the first in group 1 with "
        "shape (2, 7); pass a module that holds all of them"
    )
    with pytest.raises(ValueError, match=message):
        mkor.MKOR(model, base)
    assert hooks(model) == 0 and base.state_dict() == before
    assert "step" not in vars(base)


@pytest.mark.parametrize("foreign", ["all", "some", "named", "set", "twice", "empty dict", "list"])
def test_a_group_that_does_not_fit(foreign):
    model, other = mlp(), nn.Linear(7, 2)
    optimizer = mkor.MKOR(model, torch.optim.SGD(model[0].parameters(), lr=0.1))
    before = copy.deepcopy(optimizer.state_dict())
    records = optimizer.layers()
    group, error, message = {
        "all": (
            {"params": other.parameters()},
            ValueError,
            "2 of the group's 2 parameters are not",
        ),
        "some": (
            {"params": [model[2].weight, other.weight]},
            ValueError,
            r"1 of the group's 2 parameters are not the model's, the first with shape \(2, 7\)",
        ),
        "named": (
            {"params": list(other.named_parameters())},
            ValueError,
            "make their module a part",
        ),
        "set": ({"params": set(model[2].parameters())}, TypeError, "ordered collection"),
        "twice": ({"params": [model[0].weight]}, ValueError, "more than one parameter group"),
        "empty dict": ({}, KeyError, "params"),
        "list": ([model[2].weight], TypeError, "param_group must be a dict with .*, got list"),
    }[foreign]
    with pytest.raises(error, match=message):
        optimizer.add_param_group(group)
    assert flat(optimizer.state_dict()) == flat(before)
    assert optimizer.layers() == records and hooks(model) == 1


def pruned(layer):
    prune.l1_unstructured(layer, "weight", amount=0.5)


def parametrised(layer):
    nn.utils.parametrizations.weight_norm(layer)


@pytest.mark.parametrize("change", [pruned, parametrised])
def test_a_weight_that_is_no_parameter_any_more(change):
    model = mlp()
    optimizer = mkor.MKOR(model, sgd(model))
    change(model[0])
    with pytest.raises(RuntimeError, match="the weight of layer '0' is no parameter any more: it"):
        model(torch.randn(6, 5))
    optimizer.close()
    again = mkor.MKOR(model, sgd(model))
    model(torch.randn(6, 5)).square().mean().backward()
    again.step()
    reasons = {info.name: info.reason for info in again.layers()}
    assert reasons["0"] == "its weight is computed, not a parameter"


def test_a_base_that_preconditions_already():
    model = mlp()
    with pytest.raises(ValueError, match="base is MKOR, which preconditions already; pass the opt"):
        mkor.MKOR(model, mkor.MKOR(model, sgd(model)))


def test_a_base_that_needs_a_closure():
    model = mlp()
    optimizer = mkor.MKOR(model, torch.optim.LBFGS(model.parameters()))
    model(torch.randn(6, 5)).square().mean().backward()
    before = [p.grad.clone() for p in model.parameters()]
    with pytest.raises(TypeError, match=r"LBFGS evaluates the model itself: call step\(closure\)"):
        optimizer.step()
    assert all(map(torch.equal, before, (p.grad for p in model.parameters())))
    assert all(info.updates == 0 for info in optimizer.layers())


@pytest.mark.parametrize("base", [torch.optim.SGD, torch.optim.LBFGS])
def test_a_loss_in_place_of_a_closure(base):
    model = mlp()
    optimizer = mkor.MKOR(model, base(model.parameters(), lr=0.1))
    loss = model(torch.randn(6, 5)).square().mean()
    loss.backward()
    before = flat(copy.deepcopy(optimizer.state_dict()))
    with pytest.raises(TypeError, match="closure must be a function that computes the loss, got T"):
        optimizer.step(loss)
    assert flat(optimizer.state_dict()) == before


def test_a_model_without_a_layer_to_precondition():
    model = nn.Sequential(nn.Embedding(5, 4), nn.LayerNorm(4))
    told = "no layer is preconditioned.*0: no rule for Embedding; 1: no rule for LayerNorm"
    with pytest.warns(UserWarning, match=told):
        mkor.MKOR(model, sgd(model))


@pytest.mark.parametrize("cls", [mkor.MKOR, mkor.KFAC, mkor.KBFGS, mkor.SNGD, mkor.HyLo])
@pytest.mark.parametrize("part", [0, 1.5, True, "half"])
def test_a_fraction_of_workers_is_above_zero_and_at_most_one(cls, part):
    model = nn.Linear(2, 2)
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"grad_worker_fraction=.* must be above 0 and at most 1"):
        cls(model, base, grad_worker_fraction=part)
