"""`mkor.auto`: which parameter gets which update, and what an optimizer owes."""

import copy
import io
import pickle
import re

import pytest
import torch
from torch import nn

import mkor
from auto_model import batch, groups_by_name, small, take_steps
from mkor.baselines.split import SplitAdamW

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


@pytest.mark.parametrize("rescale", ["fan_in", "rms"])
def test_the_size_of_a_step_of_a_matrix(rescale):
    model = small()
    optimizer = mkor.auto(model, lr=0.01, weight_decay=0.1, rescale=rescale)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    take_steps(model, optimizer, 1)
    for name in MATRICES - {"attention.in_proj_bias", "attention.in_proj_weight"}:
        moved = dict(model.named_parameters())[name] - (1 - 0.01 * 0.1) * before[name]
        inputs = moved[0].numel()
        size = {"rms": 0.01, "fan_in": 0.01 * (128 / inputs) ** 0.5}[rescale]
        assert moved.square().mean().sqrt().item() == pytest.approx(size, rel=1e-3)


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


def test_a_closed_optimizer_refuses_to_step():
    model = small()
    with mkor.auto(model) as optimizer:
        take_steps(model, optimizer, 1)
    with pytest.raises(RuntimeError, match=r"closed.*build a new one with mkor.auto"):
        optimizer.step()


BAD = [
    (
        {"rescale": "gradient"},
        ValueError,
        "rescale='gradient' is unknown: choose from 'rms', 'fan_in'",
    ),
    ({"lr": -1.0}, ValueError, "lr=-1.0 is out of range: lr must be finite and at least 0"),
    ({"lr": "fast"}, ValueError, "lr='fast' is out of range"),
    ({"lr": None}, ValueError, "lr=None is out of range"),
    ({"lr": float("inf")}, ValueError, "lr=inf is out of range"),
    ({"lr": torch.tensor([0.1, 0.2])}, ValueError, "lr=tensor([0.1000, 0.2000]) is out of range"),
    ({"adamw_lr": "fast"}, ValueError, "adamw_lr='fast' is out of range"),
    ({"adamw": "head"}, ValueError, "adamw='head' is out of range: adamw must be a sequence"),
    ({"adamw": ["("]}, ValueError, "adamw='(' is no regular expression"),
    ({"momentum": 1.0}, ValueError, "momentum=1.0 is out of range"),
    ({"adamw_lr": torch.tensor(-1.0)}, ValueError, "adamw_lr=tensor(-1.) is out of range"),
    ({"betas": (2.0, 0.9)}, ValueError, "betas=(2.0, 0.9) is out of range: betas must be two"),
    ({"betas": 0.9}, ValueError, "betas=0.9 is out of range"),
    ({"betas": (0.9,)}, ValueError, "betas=(0.9,) is out of range"),
    ({"betas": ("a", "b")}, ValueError, "betas=('a', 'b') is out of range"),
    ({"eps": "small"}, ValueError, "eps='small' is out of range: eps must be finite"),
    ({"weight_decay": None}, ValueError, "weight_decay=None is out of range: weight_decay must"),
]


@pytest.mark.parametrize(("options", "error", "text"), BAD, ids=[row[2][:25] for row in BAD])
def test_bad_options(options, error, text):
    with pytest.raises(error, match=re.escape(text)):
        mkor.auto(small(), **options)


def test_rates_may_be_tensors():
    # Powers of two: in float32 others are rounded, which may draw other signs for a sketch.
    rates = {"lr": torch.tensor(2.0**-7), "adamw_lr": torch.tensor([2.0**-5])}
    models = small(), small()
    both = mkor.auto(models[0], **rates), mkor.auto(models[1], lr=2.0**-7, adamw_lr=2.0**-5)
    first, second = (take_steps(m, o, 4) for m, o in zip(models, both, strict=True))
    assert first == pytest.approx(second, rel=1e-5)


def test_reasons_are_the_true_ones():
    model = small()
    model.tied = nn.Linear(8, 9, bias=False)
    model.tied.weight = model.embedding.weight
    model.turned = nn.Linear(2, 2, dtype=torch.complex64)
    optimizer = mkor.auto(model, adamw=["head"])
    reasons = {info.name: info.reason for info in optimizer.layers()}
    assert reasons["tied"] == "its weight is shared with Embedding 'embedding'"
    assert reasons["turned"] == "its weight is torch.complex64"
    assert reasons["head"] == "chosen for AdamW"


def test_a_pattern_that_matches_nothing():
    with pytest.warns(UserWarning, match="^pattern 'heads' matches no module name"):
        mkor.auto(small(), adamw=["heads"])


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors:UserWarning")
@pytest.mark.parametrize("shape", [(0, 3), (3, 0)])
def test_an_empty_layer_is_left_out(shape):
    model = small()
    model.empty = nn.Linear(*shape)
    optimizer = mkor.auto(model)
    assert "its weight is empty" in {i.reason for i in optimizer.layers() if i.name == "empty"}
    take_steps(model, optimizer, 2)


def test_bad_models():
    with pytest.raises(
        ValueError, match=r"parameter '1\.weight' is not initialised yet: run a forw"
    ):
        mkor.auto(nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3)))
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


def test_a_compiled_step_trains_what_adamw_trains_as_well():
    ends = []
    for compiled in (False, True):
        model = small()
        optimizer = mkor.auto(model, lr=2.0**-7)
        step = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
        for seed in range(4):
            optimizer.zero_grad()
            model(batch(seed)).square().mean().backward()
            step()
        ends.append([parameter.detach().clone() for parameter in model.parameters()])
        assert len(optimizer.state) == len(mkor_states(optimizer))
    for found, expected in zip(*ends, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def mkor_states(optimizer):
    """The parameters that AdamW keeps averages of."""
    groups = [g["params"] for g in optimizer.param_groups if g["update"] == "adamw"]
    return [parameter for group in groups for parameter in group]
