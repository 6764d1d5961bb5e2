"""Schedulers, closures and losses of every kind around a step, by every method."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler

from cases.helpers import (
    METHODS,
    assert_same,
    build,
    evaluates_again,
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

SCHEDULERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 2]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, total_iters=2),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, total_iters=3),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.5),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 5),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=6),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=2), lr_scheduler.ExponentialLR(o, 0.5)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, total_iters=2), lr_scheduler.ExponentialLR(o, 0.5)]
    ),
}

LINE_SEARCHES = [m for m in METHODS if not m.startswith(("kbfgs", "momentum"))]
"""Methods that take LBFGS as a base; K-BFGS refuses it below, and momentum in `test_momentum`."""


def rows(count):
    source = torch.Generator().manual_seed(2)
    return list(torch.randn(count, 6, 4, generator=source))


def squares(model, x):
    return lambda: model(x).square().mean()


def rates(model, optimizer, scheduler):
    """Learning rates and momenta over three steps."""
    seen = []
    for x in rows(3):
        train(model, optimizer, [x])
        plateau = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
        scheduler.step(1.0) if plateau else scheduler.step()
        seen += [(group["lr"], group.get("momentum")) for group in optimizer.param_groups]
    return seen


@every_method
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a79_every_scheduler_drives_every_method(method, name):
    """As it drives the base alone, without a warning."""
    model, alone = mlp(4, 3), mlp(4, 3)
    base = sgd(alone, lr=0.02, momentum=0.9)
    expected = rates(alone, base, SCHEDULERS[name](base))
    optimizer = build(method, model, sgd(model, lr=0.02, momentum=0.9))
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert rates(model, optimizer, SCHEDULERS[name](optimizer)) == expected
    assert len(set(expected)) > 1


@pytest.mark.parametrize("name", [name for name in SCHEDULERS if name != "CyclicLR"])
def test_a79_every_scheduler_drives_auto(name):
    """Both of its rates; CyclicLR sets one for all groups, and a momentum that AdamW has not."""
    model = mlp(4, 3)
    optimizer = build("auto", model, lr=0.01)
    seen = rates(model, optimizer, SCHEDULERS[name](optimizer))
    assert len(set(seen)) > 2
    if name != "OneCycleLR":  # sets a largest rate for all groups
        assert all(
            b[0] == pytest.approx(4 * a[0]) for a, b in zip(seen[::2], seen[1::2], strict=True)
        )


@every_method
@pytest.mark.parametrize("on", ["before", "base"])
def test_a81_a_scheduler_of_the_base_works_without_a_warning(method, on):
    def run(on):
        torch.manual_seed(1)
        model = mlp(4, 6, 3)
        base = sgd(model, lr=0.02, momentum=0.9)
        scheduler = lr_scheduler.StepLR(base, 2) if on == "before" else None
        optimizer = build(method, model, base)
        scheduler = scheduler or lr_scheduler.StepLR(base if on == "base" else optimizer, 2)
        seen = rates(model, optimizer, scheduler)
        return seen, parameters(model) | factors(optimizer)

    (seen, state), (expected, there) = run(on), run("wrapper")
    assert seen == expected and len(set(seen)) == 2
    assert_same(state, there)


@every_optimizer
def test_a82_a_closure_is_run_with_gradients_and_preconditioned_once(method):
    torch.manual_seed(1)
    model = mlp(4, 6, 3)
    optimizer = build(method, model)
    torch.manual_seed(1)
    twin = mlp(4, 6, 3)
    other = build(method, twin)
    for x in rows(3):
        calls, losses = [], []

        def closure(x=x, calls=calls, losses=losses):
            calls.append(torch.is_grad_enabled())
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            losses.append(loss)
            return loss

        with torch.no_grad():
            returned = optimizer.step(closure)
        assert returned is losses[0]
        assert calls == ([True, True] if evaluates_again(optimizer) else [True])
        assert returned.item() == take_step(twin, other, squares(twin, x)).loss
    assert_same(parameters(model) | factors(optimizer), parameters(twin) | factors(other))
    assert set(updates(optimizer).values()) == {3}


@pytest.mark.parametrize("method", ["kbfgs", "kbfgs-memory"])
def test_a82_a_method_with_two_passes_asks_for_a_closure(method):
    model = mlp(4, 6, 3)
    optimizer = build(method, model)
    before = parameters(model)
    squares(model, rows(1)[0])().backward()
    for call in (optimizer.step, optimizer.precondition):
        with pytest.raises(TypeError, match=r"call step\(closure\)"):
            call()
    assert_same(parameters(model), before)
    assert set(updates(optimizer).values()) == {0}


@pytest.mark.parametrize("method", ["kbfgs", "kbfgs-memory"])
def test_a82_lbfgs_is_refused_by_a_method_with_two_passes(method):
    model = mlp(4, 3)
    with pytest.raises((TypeError, ValueError), match="LBFGS"):
        build(method, model, torch.optim.LBFGS(model.parameters()))


def direction(layer):
    """The gradient of a linear layer as one matrix [1, o, i + 1] of length 1."""
    grad = torch.cat([layer.weight.grad, layer.bias.grad[:, None]], dim=1)
    return (grad / grad.norm())[None]


@pytest.mark.parametrize("method", LINE_SEARCHES)
def test_a82_lbfgs_sees_preconditioned_gradients_in_each_evaluation(method):
    """By the factors of the first one; whether its search descends along them is its own matter."""
    torch.manual_seed(1)
    model = nn.Linear(4, 3).double()
    optimizer = build(method, model, torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=6))
    x = rows(1)[0].double()
    raw, seen, states = [], [], []

    def closure():
        if raw:
            seen.append(direction(model))
            state = optimizer.state_dict()["preconditioner"]["layers"]["Linear"]["state"]
            states.append({key: tensor.clone() for key, tensor in state.items()})
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        raw.append(direction(model))
        return loss

    first = optimizer.step(closure)
    assert first.item() > 0 and len(seen) > 3
    for before, after, state in zip(raw, seen, states, strict=False):
        assert_same(state, states[0])
        expected = optimizer._method.at(0).precondition(state, before)
        torch.testing.assert_close(after, expected / expected.norm())
        assert not torch.allclose(after, before, rtol=1e-3)
    assert updates(optimizer) == {"Linear": 1}
    assert optimizer.state_dict()["preconditioner"]["step"] == 1


@every_optimizer
def test_a91_heads_with_different_batch_meaning(method):
    """A mean over tokens and a sum over samples: finite, and both fall together."""
    torch.manual_seed(1)
    model = nn.ModuleDict({"trunk": mlp(5, 4, 4), "token": mlp(4, 3), "cls": mlp(4, 2)})
    rate = {"kfac": 0.01, "eva": 0.01, "kbfg": 0.03}  # whose steps are longer than a gradient
    optimizer = build(method, model, sgd(model, lr=rate.get(method[:4], 0.1)))
    tokens, labels = torch.randint(0, 3, (6, 7)), torch.randint(0, 2, (6,))
    x = F.one_hot(tokens + labels[:, None], 5).float()

    def loss():
        hidden = model["trunk"](x)
        token = F.cross_entropy(model["token"](hidden).flatten(0, 1), tokens.flatten())
        cls = F.cross_entropy(model["cls"](hidden.mean(dim=1)), labels, reduction="sum")
        return token + cls

    losses = [take_step(model, optimizer, loss).loss for _ in range(20)]
    everything = parameters(model) | factors(optimizer)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in everything.values())
    assert set(updates(optimizer).values()) <= {20, 13, 12, 11}
    # Eq. 5/6 as printed amplify what they should damp.
    assert method == "paper" or losses[-1] < 0.9 * losses[0]
