"""The public face: any base, groups, steps, `precondition`, records, torch's hooks."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mkor
from mkor.methods.base import EVENTS
from small_runs import backward, data, mlp, same, sgd, train

BASES = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, foreach=False),
    "sgd-momentum-foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "sgd-fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "sgd-decay": lambda p: torch.optim.SGD(
        p, lr=0.1, weight_decay=0.1, nesterov=True, momentum=0.5
    ),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, foreach=False),
    "adam-foreach": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
    "adam-fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, foreach=False),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True, maximize=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adamw-tensor-lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), foreach=False),
    "lamb": lambda p: mkor.LAMB(p, lr=0.01),
    "lamb-tensor-lr": lambda p: mkor.LAMB(p, lr=torch.tensor(0.01), maximize=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True),
    "rmsprop-foreach": lambda p: torch.optim.RMSprop(p, lr=0.01, foreach=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "adagrad-fused": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
}


@pytest.mark.parametrize("name", BASES)
def test_a_step_preconditions_and_steps_the_base(name):
    # One twin only rewrites its gradients; the base that it does not know then takes the step.
    model, twin, alone = mlp(), mlp(), mlp()
    optimizer = mkor.MKOR(model, BASES[name](model.parameters()), factor_update_steps=3)
    other, base = sgd(twin, lr=0.0, factor_update_steps=3), BASES[name](twin.parameters())
    plain = BASES[name](alone.parameters())
    for batch in data(5):
        train(model, optimizer, [batch])
        backward(twin, batch)
        other.precondition()
        base.step()
        base.zero_grad()
        train(alone, plain, [batch])
    assert same(model, twin)
    assert not same(model, alone)
    assert optimizer.state is optimizer.base.state
    assert [len(optimizer.state[p]) for p in model.parameters()] == [
        len(plain.state[p]) for p in alone.parameters()
    ]


def test_groups_keep_their_own_options():
    model, twin = mlp(), mlp()
    groups = [
        [
            {"params": list(m[0].parameters()), "lr": 0.1, "weight_decay": 0.1},
            {"params": list(m[2].parameters()), "lr": 0.01, "momentum": 0.9},
        ]
        for m in (model, twin)
    ]
    optimizer = mkor.MKOR(model, torch.optim.SGD(groups[0], lr=1.0))
    plain = torch.optim.SGD(groups[1], lr=1.0)
    assert optimizer.param_groups is optimizer.base.param_groups
    assert optimizer.defaults is optimizer.base.defaults
    own = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    assert own == [{k: v for k, v in g.items() if k != "params"} for g in plain.param_groups]
    optimizer.param_groups[0]["lr"] = 0.0
    before = copy.deepcopy(model.state_dict())
    train(model, optimizer, data(2))
    assert torch.equal(model[0].weight, before["0.weight"])
    assert not torch.equal(model[2].weight, before["2.weight"])


def test_param_groups_and_state_stay_the_bases_after_loading():
    model = mlp()
    optimizer = mkor.MKOR(model, torch.optim.Adam(model.parameters()))
    train(model, optimizer, data(2))
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.add_param_group({"params": []})
    assert optimizer.param_groups is optimizer.base.param_groups
    assert optimizer.state is optimizer.base.state
    optimizer.param_groups[0]["lr"] = 0.5
    assert optimizer.base.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("form", ["list", "tensor", "named", "generator"])
def test_add_param_group_preconditions_the_layers_it_covers(form):
    model, twin = mlp(), mlp()
    optimizer = mkor.MKOR(model, torch.optim.SGD(model[0].parameters(), lr=0.1))
    reasons = {info.name: info.reason for info in optimizer.layers()}
    assert reasons == {"0": None, "2": "its weight is not in the base optimizer"}
    train(model, optimizer, data(2))
    kept = torch.equal(model[2].weight, twin[2].weight)
    params = {
        "list": [model[2].weight],
        "tensor": model[2].weight,
        "named": list(model[2].named_parameters()),
        "generator": model[2].parameters(),
    }[form]
    if form == "named":
        optimizer = mkor.MKOR(model, torch.optim.SGD(model[0].named_parameters(), lr=0.1))
        train(model, optimizer, data(2))
    optimizer.add_param_group({"params": params, "lr": 0.05})
    train(model, optimizer, data(1))
    assert kept and not torch.equal(model[2].weight, twin[2].weight)
    assert optimizer.param_groups[1]["lr"] == 0.05
    assert [info.updates for info in optimizer.layers()] == [3, 1]
    assert optimizer.state_dict()["preconditioner"]["parameters"] == [
        ["0.weight", "0.bias"],
        ["2.weight"],
    ]


def test_step_returns_the_closures_loss():
    model, twin = mlp(), mlp()
    optimizer, other = sgd(model), sgd(twin)
    (batch,) = data(1)
    assert optimizer.step() is None
    optimizer.zero_grad()
    loss = optimizer.step(lambda: backward(model, batch))
    assert torch.is_tensor(loss) and loss.item() == F.mse_loss(mlp()(batch[0]), batch[1]).item()
    other.step()
    train(twin, other, [batch])
    assert same(model, twin)


def test_lbfgs_without_a_closure_says_what_torch_says():
    model = mlp()
    optimizer = mkor.MKOR(model, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(TypeError, match="closure"):
        optimizer.step()


def test_precondition_then_step_preconditions_once():
    model, twin = mlp(), mlp()
    optimizer, other = sgd(model, factor_update_steps=1), sgd(twin, factor_update_steps=1)
    for batch in data(3):
        backward(model, batch)
        optimizer.precondition()
        rewritten = [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        for p, grad in zip(model.parameters(), rewritten, strict=True):
            assert torch.equal(p.grad, grad)
        optimizer.zero_grad()
        train(twin, other, [batch])
    assert same(model, twin)
    assert [info.updates for info in optimizer.layers()] == [3, 3]


def test_precondition_leaves_parameters_and_state_alone():
    model = mlp()
    optimizer = mkor.MKOR(model, torch.optim.Adam(model.parameters()))
    backward(model, data(1)[0])
    grads = [p.grad.clone() for p in model.parameters()]
    optimizer.precondition()
    assert same(model, mlp()) and not optimizer.state
    for p, grad in zip(model.parameters(), grads, strict=True):
        assert not torch.equal(p.grad, grad)
    # zero_grad ends it: the next step preconditions anew.
    optimizer.zero_grad()
    train(model, optimizer, data(1))
    assert [info.updates for info in optimizer.layers()] == [2, 2]


def test_precondition_before_a_closure_does_not_count_for_its_gradients():
    model, twin = mlp(), mlp()
    optimizer, other = sgd(model, factor_update_steps=1), sgd(twin, factor_update_steps=1)
    first, second = data(2)
    for m, o in ((model, optimizer), (twin, other)):
        backward(m, first)
        o.precondition()
        o.base.step()
        o.base.zero_grad()
    optimizer.step(lambda: backward(model, second))
    other.zero_grad()
    train(twin, other, [second])
    assert same(model, twin)


def test_layers_and_repr():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 2), nn.Flatten(), nn.LayerNorm(16), nn.Linear(16, 5), nn.Linear(5, 2)
    )
    model[4].requires_grad_(False)
    optimizer = sgd(model, skip=["^3$"])
    for _ in range(2):
        model(torch.randn(2, 3, 3, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    infos = {info.name: info for info in optimizer.layers()}
    assert all(isinstance(info, mkor.LayerInfo) for info in infos.values())
    conv = infos["0"]
    assert (conv.kind, conv.shape, conv.preconditioned) == ("Conv2d", (4, 3, 2, 2), True)
    assert (conv.updates, conv.last_update, conv.reason) == (2, 1, None)
    saved = optimizer.state_dict()["preconditioner"]["layers"]["0"]["state"]
    assert (
        conv.bytes == sum(t.nbytes for t in saved.values()) == 4 * (4**2 + 13**2) + 8 * len(EVENTS)
    )
    assert infos["2"].reason == "no rule for LayerNorm"
    assert infos["3"].reason == "skipped by a skip pattern"
    assert infos["4"].reason == "frozen" and infos["4"].updates == 0
    assert repr(optimizer).splitlines() == [
        "MKOR on SGD: 1 layer preconditioned, 0.8 KiB of factors",
        "  0  Conv2d  4x3x2x2  2 updates",
        "  base optimizer only: 1 x frozen",
        "  base optimizer only: 1 x no rule for LayerNorm",
        "  base optimizer only: 1 x skipped by a skip pattern",
    ]


def test_step_and_state_hooks_of_torch_run():
    model = mlp()
    optimizer = sgd(model)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    optimizer.register_state_dict_pre_hook(lambda _: calls.append("save"))
    optimizer.register_state_dict_post_hook(lambda _, s: {**s, "extra": 1})
    optimizer.register_load_state_dict_pre_hook(
        lambda _, s: {k: v for k, v in s.items() if k != "extra"}
    )
    optimizer.register_load_state_dict_post_hook(lambda _: calls.append("loaded"))
    train(model, optimizer, data(1))
    state = optimizer.state_dict()
    assert state["extra"] == 1
    optimizer.load_state_dict(state)
    assert calls == ["before", "after", "save", "loaded"]


def test_a_skip_pattern_may_name_a_projection_of_attention():
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2)})
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = mkor.MKOR(model, base, skip=["attention.in_proj"])
    assert [i.name for i in optimizer.layers() if i.preconditioned] == ["attention.out_proj"]
