"""`mkor.auto`: which parameter gets which update, and what an optimizer owes."""

import copy
import io
import pickle
import re

import pytest
import torch
from torch import nn

import mkor
from mkor.baselines.split import SplitAdamW


class Small(nn.Module):
    """An embedding, a convolution, a norm, an attention and two linear layers."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(9, 8)
        self.convolution = nn.Conv1d(8, 8, 3, padding=1, bias=False)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.hidden = nn.Linear(8, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, tokens):
        x = self.convolution(self.embedding(tokens).mT).mT
        x = self.norm(x + self.attention(x, x, x, need_weights=False)[0])
        return self.head(self.hidden(x).tanh())


def batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(9, (4, 5), generator=generator)


def small(seed=0):
    torch.manual_seed(seed)
    return Small()


def take_steps(model, optimizer, count, first=0):
    losses = []
    for seed in range(first, first + count):
        optimizer.zero_grad()
        loss = model(batch(seed)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def groups_by_name(model, optimizer):
    names = {id(p): name for name, p in model.named_parameters()}
    return {
        names[id(p)]: group["update"] for group in optimizer.param_groups for p in group["params"]
    }


MATRICES = {
    "convolution.weight",
    "attention.in_proj_weight",
    "attention.in_proj_bias",  # through which the projection's output gradient is seen
    "attention.out_proj.weight",
    "hidden.weight",
    "head.weight",
}


def test_matrices_are_mkors_and_the_rest_is_adamws():
    model = small()
    found = groups_by_name(model, mkor.auto(model))
    assert found.keys() == dict(model.named_parameters()).keys()
    assert {name for name, update in found.items() if update == "direct"} == MATRICES


def test_patterns_leave_layers_to_adamw():
    model = small()
    optimizer = mkor.auto(model, adamw=["^head$", "attention"])
    found = groups_by_name(model, optimizer)
    assert {n for n, u in found.items() if u == "direct"} == {"convolution.weight", "hidden.weight"}
    reasons = {info.name: info.reason for info in optimizer.layers()}
    assert reasons["head"] == "chosen for AdamW"
    assert reasons["embedding"] == "no rule for Embedding"


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


def test_a_step_of_a_matrix_has_the_size_of_the_learning_rate():
    model = small()
    optimizer = mkor.auto(model, lr=0.01, weight_decay=0.1)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    take_steps(model, optimizer, 1)
    for name in MATRICES - {"attention.in_proj_bias", "attention.in_proj_weight"}:
        moved = dict(model.named_parameters())[name] - (1 - 0.01 * 0.1) * before[name]
        assert moved.square().mean().sqrt().item() == pytest.approx(0.01, rel=1e-3)


@pytest.mark.filterwarnings("ignore:no layer is preconditioned:UserWarning")
def test_the_rest_steps_as_adamw_does():
    model = small()
    twin = copy.deepcopy(model)
    optimizer = mkor.auto(model, lr=0.01, adamw=[""])
    groups = [
        [p for p in twin.parameters() if p.dim() > 1],
        [p for p in twin.parameters() if p.dim() <= 1],
    ]
    other = torch.optim.AdamW(
        [
            {"params": groups[0], "weight_decay": 0.01},
            {"params": groups[1], "weight_decay": 0.0},
        ],
        lr=0.04,
        betas=(0.9, 0.95),
    )
    take_steps(model, optimizer, 5)
    take_steps(twin, other, 5)
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_it_trains():
    model = small()
    losses = take_steps(model, mkor.auto(model, lr=0.01), 30)
    assert losses[-1] < 0.2 * losses[0]


def test_a_closure_is_evaluated_once_and_its_loss_returned():
    model = small()
    optimizer = mkor.auto(model)
    calls = []

    def closure():
        calls.append(1)
        optimizer.zero_grad()
        loss = model(batch()).square().mean()
        loss.backward()
        return loss

    expected = model(batch()).square().mean()
    torch.testing.assert_close(optimizer.step(closure), expected)
    assert len(calls) == 1


def test_a_scheduler_scales_both_rates():
    model = small()
    optimizer = mkor.auto(model, lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    take_steps(model, optimizer, 1)
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.005, 0.02, 0.02]


def test_resuming_is_exact():
    model = small()
    optimizer = mkor.auto(model, lr=0.01)
    take_steps(model, optimizer, 4)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other_model = small(seed=5)
    other = mkor.auto(other_model, lr=0.5)
    other_model.load_state_dict(saved["model"])
    other.load_state_dict(saved["optimizer"])
    assert take_steps(model, optimizer, 4, 4) == take_steps(other_model, other, 4, 4)


@pytest.mark.parametrize("copy_of", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_a_copy_goes_on_the_same(copy_of):
    model = small()
    optimizer = mkor.auto(model, lr=0.01)
    take_steps(model, optimizer, 3)
    twin, other = copy_of((model, optimizer))
    assert take_steps(twin, other, 3, 3) == take_steps(model, optimizer, 3, 3)


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


def test_a_closed_optimizer_refuses_to_step():
    model = small()
    with mkor.auto(model) as optimizer:
        take_steps(model, optimizer, 1)
    with pytest.raises(RuntimeError, match=r"closed.*build a new one with mkor.auto"):
        optimizer.step()


BAD = [
    ({"lr": -1.0}, ValueError, "Invalid learning rate: -1.0"),
    ({"adamw_lr": "fast"}, ValueError, "adamw_lr='fast' is out of range"),
    ({"adamw": "head"}, ValueError, "adamw='head' is out of range: adamw must be a sequence"),
    ({"adamw": ["("]}, ValueError, "adamw='(' is no regular expression"),
    ({"momentum": 1.0}, ValueError, "momentum=1.0 is out of range"),
    ({"betas": (2.0, 0.9)}, ValueError, "Invalid beta parameter"),
]


@pytest.mark.parametrize(("options", "error", "text"), BAD, ids=[row[2][:25] for row in BAD])
def test_bad_options(options, error, text):
    with pytest.raises(error, match=re.escape(text)):
        mkor.auto(small(), **options)


def test_bad_models():
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got list"):
        mkor.auto([])
    frozen = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter of the model has requires_grad=True"):
        mkor.auto(frozen)
    with pytest.warns(UserWarning, match="no layer is preconditioned"):
        mkor.auto(nn.Embedding(3, 2))


def test_direct_groups_step_along_the_gradient():
    weight = nn.Parameter(torch.tensor([[1.0, 2.0]]))
    optimizer = SplitAdamW([{"params": [weight], "update": "direct"}], lr=0.1, weight_decay=0.5)
    weight.grad = torch.tensor([[10.0, -10.0]])
    optimizer.step()
    torch.testing.assert_close(weight.data, torch.tensor([[0.95 - 1.0, 1.9 + 1.0]]))
    optimizer.param_groups[0]["update"] = "adam"
    with pytest.raises(ValueError, match="update='adam' is unknown"):
        optimizer.step()
