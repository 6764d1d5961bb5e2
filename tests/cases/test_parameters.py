"""Parameters that are shared, frozen, unused or computed."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from cases.helpers import (
    KEEPS_NORM,
    LR,
    TwoHeads,
    assert_moment,
    assert_same,
    build,
    every_method,
    factors,
    gradient_moment,
    gradient_sized,
    input_moment,
    mlp,
    observer,
    one_or_three,
    parameters,
    reasons,
    sees_inside_attention,
    sgd,
    sgd_step,
    shown,
    take_step,
    train,
    updates,
)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 4)
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(self.embedding(x).tanh())


@pytest.mark.filterwarnings("ignore:no layer is preconditioned:UserWarning")
@every_method
def test_a09_tied_embedding(method):
    model = Tied()
    optimizer = build(method, model)
    for _ in range(3):
        before = parameters(model)
        x = torch.randint(11, (6, 3))
        grads = take_step(model, optimizer, lambda x=x: model(x).square().mean()).grads
        assert model.head.weight is model.embedding.weight
        # Not preconditioned, and stepped once.
        assert_same(parameters(model), sgd_step(before, grads), 1e-6)
    assert not updates(optimizer)
    assert reasons(optimizer)["head"] == "its weight is shared with Embedding 'embedding'"


@one_or_three
@pytest.mark.parametrize("bias", [True, False])
def test_a09_two_linears_with_one_weight(vectors, bias):
    first, second = nn.Linear(4, 4, bias=bias), nn.Linear(4, 4, bias=bias)
    second.weight = first.weight
    model = nn.Sequential(first, nn.Tanh(), second)
    optimizer = observer(model, vectors)
    assert updates(optimizer) == {"0": 0}

    x = torch.randn(6, 4)
    y0 = first(x)
    hidden = y0.tanh()
    y1 = second(hidden)
    grads = torch.autograd.grad(y1.square().mean(), (y0, y1))
    model(x).square().mean().backward()
    norm = torch.cat([p.grad.flatten() for p in first.parameters()]).norm()
    before = parameters(first)
    optimizer.step()

    def blocks(*calls):
        return [torch.cat(parts) for parts in zip(*(c.chunk(vectors) for c in calls), strict=True)]

    assert updates(optimizer) == {"0": 1}
    assert_moment(shown(optimizer, "0", "inputs"), input_moment(blocks(x, hidden), bias))
    # One bias of two shows one call's gradient only, so both are read off their outputs.
    assert_moment(shown(optimizer, "0", "outputs"), gradient_moment(blocks(*grads), bias=False))
    moved = torch.cat([(p - before[name]).flatten() for name, p in first.named_parameters()])
    torch.testing.assert_close(moved.norm(), LR * norm, rtol=1e-4, atol=0)  # once, not twice


@every_method
@pytest.mark.parametrize("given", ["all", "trainable"])
def test_a26_frozen_layer(method, given):
    model = mlp(4, 8, 2)
    model[0].requires_grad_(False)
    trainable = [p for p in model.parameters() if p.requires_grad or given == "all"]
    optimizer = build(method, model, torch.optim.SGD(trainable, lr=LR))
    before = parameters(model[0])
    train(model, optimizer, [torch.randn(6, 4) for _ in range(3)])
    assert_same(parameters(model[0]), before)
    assert updates(optimizer) == {"2": 3}
    assert not any(key.startswith("0.") for key in factors(optimizer))
    expected = "frozen" if given == "all" else "its weight is not in the base optimizer"
    assert reasons(optimizer) == {"0": expected}


@pytest.mark.filterwarnings("ignore:no layer is preconditioned:UserWarning")
@every_method
def test_a27_frozen_weight_trainable_bias(method):
    model = nn.Linear(4, 3)
    model.weight.requires_grad_(False)
    optimizer = build(method, model)
    for _ in range(2):
        before = parameters(model)
        x = torch.randn(6, 4)
        grads = take_step(model, optimizer, lambda x=x: model(x).square().mean()).grads
        assert grads.keys() == {"bias"}
        assert_same(parameters(model), sgd_step(before, grads), 1e-6)
    assert not factors(optimizer)


@gradient_sized
def test_a27_trainable_weight_frozen_bias(method):
    model = nn.Linear(4, 3)
    model.bias.requires_grad_(False)
    optimizer = build(method, model, **KEEPS_NORM)
    for _ in range(2):
        before = parameters(model)
        x = torch.randn(6, 4) + 2
        taken = take_step(model, optimizer, lambda x=x: model(x).square().mean())
        norm = taken.grads["weight"].norm()
        moved = model.weight.detach() - before["weight"]
        torch.testing.assert_close(moved.norm(), LR * norm, rtol=1e-4, atol=0)
        assert torch.equal(model.bias, before["bias"])
    assert updates(optimizer) == {"Linear": 2}


@one_or_three
def test_a27_statistics_of_a_weight_with_a_frozen_bias(vectors):
    model = nn.Linear(4, 3)
    model.bias.requires_grad_(False)
    optimizer = observer(model, vectors)
    x = torch.randn(6, 4)
    g = (2 * model(x)).detach()  # of the sum of squares
    model(x).square().sum().backward()
    optimizer.step()
    assert_moment(shown(optimizer, "Linear", "outputs"), gradient_moment(g.chunk(vectors), False))
    inputs = shown(optimizer, "Linear", "inputs")[:, :4, :4]
    assert_moment(inputs, input_moment(x.chunk(vectors), bias=False))


@gradient_sized
def test_a27_bias_of_another_optimizer(method):
    """Gradients of parameters that the base doesn't have are not touched."""
    model = nn.Linear(4, 3)
    optimizer = build(method, model, torch.optim.SGD([model.weight], lr=LR), **KEEPS_NORM)
    for _ in range(2):
        x = torch.randn(6, 4)
        grads = take_step(model, optimizer, lambda x=x: model(x).square().mean()).grads
        assert torch.equal(model.bias.grad, grads["bias"])
        assert not torch.equal(model.weight.grad, grads["weight"])
        torch.testing.assert_close(model.weight.grad.norm(), grads["weight"].norm())
        optimizer.zero_grad()
        model.bias.grad = None
    assert updates(optimizer) == {"Linear": 2}


@every_method
@pytest.mark.parametrize("start_frozen", [True, False])
def test_a28_freezing_during_training(method, start_frozen):
    model = mlp(4, 8, 2)
    base = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    frozen = [True, True, False, False] if start_frozen else [False] * 2 + [True] * 2 + [False] * 2
    if start_frozen:
        model[0].requires_grad_(False)
    optimizer = build(method, model, base)
    for now in frozen:
        model[0].requires_grad_(not now)
        before, known = parameters(model[0]), factors(optimizer)
        train(model, optimizer, [torch.randn(6, 4)])
        after = parameters(model[0])
        own = {key: value for key, value in factors(optimizer).items() if key.startswith("0.")}
        if now:
            assert_same(after, before)
            assert own.keys() <= known.keys()
            assert all(torch.equal(value, known[key]) for key, value in own.items())
        else:
            assert not any(torch.equal(after[key], before[key]) for key in after)
            assert any(not torch.equal(own[key], known.get(key, own[key] + 1)) for key in own)
        optimizer.zero_grad()
    assert updates(optimizer) == {"0": frozen.count(False), "2": len(frozen)}


def of(layer, values):
    return {key: value for key, value in values.items() if key.startswith(f"{layer}.")}


@every_method
def test_a29_heads_in_turn(method):
    model = TwoHeads()
    optimizer = build(method, model, sgd(model, momentum=0.9, weight_decay=0.1))
    for number in range(4):
        used, unused = ("a", "b") if number % 2 == 0 else ("b", "a")
        before, known = parameters(model), factors(optimizer)
        model(torch.randn(6, 4), head=unused)  # run, but not part of the loss
        train(model, optimizer, [torch.randn(6, 4)], head=used)
        assert_same(of(unused, parameters(model)), of(unused, before))
        assert not torch.equal(getattr(model, used).weight, before[f"{used}.weight"])
        kept = of(unused, factors(optimizer))
        assert kept.keys() == of(unused, known).keys()
        assert all(torch.equal(kept[key], known[key]) for key in kept)
    assert updates(optimizer) == {"trunk": 4, "a": 2, "b": 2}


@gradient_sized
@pytest.mark.parametrize("set_to_none", [True, False])
def test_a32_unused_layer(method, set_to_none):
    """Without a gradient it stays; with a zero one it does what the base alone does with it."""
    model = TwoHeads()
    options = {"lr": 0.01, "weight_decay": 0.1}
    base = torch.optim.AdamW(model.parameters(), **options)
    optimizer = build(method, model, base)
    train(model, optimizer, [torch.randn(6, 4)], head="b")
    optimizer.zero_grad(set_to_none)
    alone = copy.deepcopy(model.b)
    twin = torch.optim.AdamW(alone.parameters(), **options)
    for own, there in zip(alone.parameters(), model.b.parameters(), strict=True):
        twin.state[own] = copy.deepcopy(base.state[there])
        own.grad = None if set_to_none else torch.zeros_like(own)
    start = parameters(model.b)
    for _ in range(5):
        x = torch.randn(6, 4)
        take_step(
            *(model, optimizer, lambda x=x: model(x, "a").square().mean()), set_to_none=set_to_none
        )
        twin.step()
    assert_same(parameters(model.b), parameters(alone))
    assert torch.equal(model.b.weight, start["weight"]) == set_to_none


COMPUTED = {
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(4, 4)),
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(4, 4, bias=False)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(4, 4)),
    "prune": lambda: prune.l1_unstructured(nn.Linear(4, 4), "weight", 0.5),
}


@every_method
@pytest.mark.parametrize("kind", COMPUTED)
def test_a38_computed_weight(method, kind):
    model = nn.Sequential(COMPUTED[kind](), nn.Tanh(), nn.Linear(4, 2))
    optimizer = build(method, model)
    for _ in range(2):
        before = parameters(model[0])
        x = torch.randn(6, 4)
        taken = take_step(model, optimizer, lambda x=x: model(x).square().mean())
        grads = taken.within("0")
        assert grads
        assert_same(parameters(model[0]), sgd_step(before, grads), 1e-6)
    assert updates(optimizer) == {"2": 2}
    assert reasons(optimizer)["0"] == "its weight is computed, not a parameter"


@every_method
@pytest.mark.parametrize("part", ["in_proj_weight", "out_proj"])
def test_a38_computed_weight_in_attention(method, part):
    model = nn.MultiheadAttention(4, 2)
    if part == "out_proj":
        parametrizations.spectral_norm(model.out_proj)
    else:
        prune.l1_unstructured(model, part, 0.5)
    if part == "out_proj" and not sees_inside_attention(method):
        with pytest.warns(
            UserWarning, match=r"in_proj: its output gradient is inside the attention"
        ):
            build(method, model)
        return
    optimizer = build(method, model)
    x = torch.randn(5, 3, 4)
    take_step(model, optimizer, lambda: model(x, x, x)[0].square().mean())
    left = {"in_proj_weight": ".in_proj", "out_proj": ".out_proj"}
    kept = {".in_proj", ".out_proj"} - {left[part]}
    assert {name.removeprefix("MultiheadAttention") for name in updates(optimizer)} == kept
    assert "its weight is computed, not a parameter" in reasons(optimizer).values()
