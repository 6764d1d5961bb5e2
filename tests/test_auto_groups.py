"""Which groups `mkor.auto` makes, what may be frozen, added and edited."""

import copy

import pytest
import torch
from torch import nn

import mkor
from auto_model import groups_by_name, small, take_steps


def test_tied_and_frozen_weights():
    model = small()
    model.tied = nn.Linear(8, 9, bias=False)
    model.tied.weight = model.embedding.weight
    model.hidden.weight.requires_grad_(False)
    found = groups_by_name(model, mkor.auto(model))
    assert found["embedding.weight"] == "adamw"
    assert found["hidden.weight"] == "direct"  # it may be unfrozen
    assert found["hidden.bias"] == "adamw"


def test_a_layer_that_is_unfrozen_trains():
    model = small()
    model.hidden.requires_grad_(False)
    optimizer = mkor.auto(model, lr=0.01, weight_decay=0.0)
    before = [p.detach().clone() for p in model.hidden.parameters()]
    take_steps(model, optimizer, 2)
    assert all(map(torch.equal, before, model.hidden.parameters()))
    assert "frozen" in {info.reason for info in optimizer.layers() if info.name == "hidden"}
    model.hidden.requires_grad_(True)
    take_steps(model, optimizer, 1)
    moved = model.hidden.weight - before[0]
    assert moved.square().mean().sqrt().item() == pytest.approx(0.01, rel=1e-3)
    assert not torch.equal(before[1], model.hidden.bias)


def test_a_layer_that_is_frozen_stands_still_on_gradients_of_zero():
    model = small()
    optimizer = mkor.auto(model, lr=0.01)
    take_steps(model, optimizer, 2)
    model.hidden.weight.requires_grad_(False)
    optimizer.zero_grad(set_to_none=False)
    before = model.hidden.weight.clone()
    optimizer.step()
    assert torch.equal(before, model.hidden.weight)


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_half_of_an_input_projection_is_adamws(frozen, separate):
    attention = nn.MultiheadAttention(8, 2, kdim=4 if separate else None)
    part = {"weight": "k_proj_weight" if separate else "in_proj_weight", "bias": "in_proj_bias"}
    attention.get_parameter(part[frozen]).requires_grad_(False)
    found = groups_by_name(attention, mkor.auto(attention))
    assert found["in_proj_bias"] == found[part["weight"]] == "adamw"
    assert found["out_proj.weight"] == "direct"


def test_an_input_projection_is_not_divided():
    attention = nn.MultiheadAttention(8, 2, kdim=4)
    found = groups_by_name(attention, mkor.auto(attention, adamw=["q_proj"]))
    assert {n for n, update in found.items() if update == "direct"} == {"out_proj.weight"}


def test_a_weight_may_not_be_frozen_beside_its_bias_in_an_input_projection():
    model = small()
    optimizer = mkor.auto(model)
    take_steps(model, optimizer, 1)
    model.attention.in_proj_weight.requires_grad_(False)
    before = model.attention.in_proj_bias.detach().clone()
    with pytest.raises(RuntimeError, match=r"'attention\.in_proj' is frozen while its bias trains"):
        take_steps(model, optimizer, 1)
    assert torch.equal(before, model.attention.in_proj_bias)
    model.attention.in_proj_bias.requires_grad_(False)
    model.zero_grad()
    take_steps(model, optimizer, 1)
    assert torch.equal(before, model.attention.in_proj_bias)


def test_rates_and_decay_of_the_groups():
    model = small()
    optimizer = mkor.auto(model, lr=0.01, weight_decay=0.2)
    rows = [(g["update"], g["lr"], g["weight_decay"]) for g in optimizer.param_groups]
    assert rows == [("direct", 0.01, 0.2), ("adamw", 0.04, 0.2), ("adamw", 0.04, 0.0)]
    assert all(p.dim() <= 1 for p in optimizer.param_groups[2]["params"])
    other = mkor.auto(small(), lr=0.01, adamw_lr=0.5)
    assert [group["lr"] for group in other.param_groups] == [0.01, 0.5, 0.5]


def test_a_group_that_is_added_is_adamws_unless_told():
    model = small()
    optimizer = mkor.auto(model)
    model.extra = nn.Linear(3, 3)
    optimizer.add_param_group({"params": [model.extra.weight], "update": "direct", "lr": 0.1})
    optimizer.add_param_group({"params": [model.extra.bias]})
    found = groups_by_name(model, optimizer)
    assert (found["extra.weight"], found["extra.bias"]) == ("direct", "adamw")
    assert "extra" in {info.name for info in optimizer.layers() if info.preconditioned}
    with pytest.raises(ValueError, match="update='adam' is unknown"):
        optimizer.add_param_group({"params": [], "update": "adam"})


@pytest.mark.parametrize("copied", [False, True])
def test_a_group_that_is_added_has_the_learning_rate_of_its_kind(copied):
    model = small()
    optimizer = mkor.auto(model, lr=0.01, adamw_lr=0.03)
    if copied:
        model, optimizer = copy.deepcopy((model, optimizer))
        optimizer.load_state_dict(optimizer.state_dict())
    model.extra = nn.Linear(3, 3)
    optimizer.add_param_group({"params": [model.extra.weight], "update": "direct"})
    optimizer.add_param_group({"params": [model.extra.bias]})
    assert [group["lr"] for group in optimizer.param_groups[-2:]] == [0.01, 0.03]


@pytest.mark.parametrize("form", [list, iter, lambda params: next(iter(params))])
def test_a_direct_group_holds_what_can_be_updated(form):
    model = small()
    optimizer = mkor.auto(model)
    model.other = nn.LayerNorm(3)
    before = copy.deepcopy(optimizer.state_dict()["param_groups"])
    with pytest.raises(ValueError, match=r"'other\.weight' is not the weight.*leave it to AdamW"):
        optimizer.add_param_group({"params": form(model.other.parameters()), "update": "direct"})
    assert optimizer.state_dict()["param_groups"] == before
    model.extra = nn.Linear(3, 3)
    optimizer.add_param_group({"params": form(model.extra.parameters()), "update": "direct"})
    assert len(optimizer.param_groups) == 4


@pytest.mark.parametrize("group", [0, 1])
def test_the_update_of_a_group_is_not_edited(group):
    model = small()
    optimizer = mkor.auto(model)
    take_steps(model, optimizer, 1)
    kind = optimizer.param_groups[group]["update"]
    other = {"direct": "adamw", "adamw": "direct"}[kind]
    before = copy.deepcopy(model.state_dict())
    optimizer.param_groups[group]["update"] = other
    message = f"update of group {group} was changed from '{kind}' to '{other}'.*set it back"
    with pytest.raises(RuntimeError, match=message):
        take_steps(model, optimizer, 1)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    optimizer.param_groups[group]["update"] = kind
    take_steps(model, optimizer, 1)
