"""Training loops of MKOR's rules by their formulas; `test_loops` has what every method owes."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch.optim import lr_scheduler

import mkor
from cases.common import (
    RULES,
    assert_close,
    assert_same,
    batches,
    factors,
    mlp,
    train,
    wrap,
)


@pytest.mark.parametrize("cuts", [(4, 4, 4), (5, 3, 4), (1, 11)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("damping", [0.1, None])
@pytest.mark.parametrize("rule", RULES)
def test_a70_accumulated_micro_batches_are_one_batch(rule, damping, bias, cuts):
    model = mlp(5, 4, 3, bias=bias, dtype=torch.float64)
    twin = copy.deepcopy(model)
    optimizer = wrap(model, rule=rule, damping=damping)
    other = wrap(twin, rule=rule, damping=damping)
    for x, y in batches(3, 12, 5, 3, torch.float64):
        for part, target in zip(x.split(cuts), y.split(cuts), strict=True):
            (F.mse_loss(model(part), target) * len(part) / 12).backward()
        optimizer.step()
        optimizer.zero_grad()
        train(twin, other, [(x, y)])
    assert_close(model, twin, rtol=1e-9, atol=1e-12)
    assert_close(factors(optimizer), factors(other), rtol=1e-8, atol=1e-11)
    assert [info.updates for info in optimizer.layers()] == [3, 3]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rule", RULES)
def test_a70_with_three_vectors_block_j_joins_the_parts_j(rule, bias):
    model = mlp(5, 4, 3, bias=bias, dtype=torch.float64)
    twin = copy.deepcopy(model)
    optimizer, other = wrap(model, rule=rule, vectors=3), wrap(twin, rule=rule, vectors=3)
    x, y = batches(1, 12, 5, 3, torch.float64)[0]
    for part, target in zip(x.split(6), y.split(6), strict=True):
        (F.mse_loss(model(part), target) / 2).backward()
    optimizer.step()
    order = torch.tensor([0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11])
    train(twin, other, [(x[order], y[order])])
    assert_close(model, twin, rtol=1e-9, atol=1e-12)
    assert_close(factors(optimizer), factors(other), rtol=1e-9, atol=1e-12)


def test_a81_a_base_that_needs_a_closure_is_known_under_a_scheduler():
    model = mlp(5, 3)
    base = torch.optim.LBFGS(model.parameters(), lr=0.5)
    scheduler = lr_scheduler.StepLR(base, 1)
    optimizer = mkor.MKOR(model, base)
    x, y = batches(1, 6, 5, 3)[0]

    def closure():
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    first = optimizer.step(closure)
    scheduler.step()
    assert F.mse_loss(model(x), y) < first
    assert optimizer.layers()[0].updates == 1


@pytest.mark.parametrize("clearing", ["optimizer", "model"])
def test_a82_lbfgs_sees_preconditioned_gradients_in_each_evaluation(clearing):
    x, y = batches(1, 12, 5, 3, torch.float64)[0]
    model, twin = mlp(5, 4, 3, dtype=torch.float64), mlp(5, 4, 3, dtype=torch.float64)
    start = F.mse_loss(model(x), y).item()
    settings = {"lr": 0.1, "max_iter": 20, "max_eval": 20}
    optimizer = mkor.MKOR(model, torch.optim.LBFGS(model.parameters(), **settings))
    plain = torch.optim.LBFGS(twin.parameters(), **settings)
    evaluations = []

    def closure():
        (optimizer if clearing == "optimizer" else model).zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        evaluations.append(loss.item())
        return loss

    loss = optimizer.step(closure)
    assert loss.item() == evaluations[0] == start and len(evaluations) > 5
    assert [info.updates for info in optimizer.layers()] == [1, 1]
    assert optimizer.state_dict()["preconditioner"]["step"] == 1
    found = factors(optimizer)

    def by_hand():
        plain.zero_grad()
        loss = F.mse_loss(twin(x), y)
        loss.backward()
        for name, layer in (("0", twin[0]), ("2", twin[2])):
            grad = torch.cat([layer.weight.grad, layer.bias.grad[:, None]], dim=1)
            update = found[name, "outputs"][0] @ grad @ found[name, "inputs"][0]
            update *= grad.norm() / update.norm()
            layer.weight.grad.copy_(update[:, :-1])
            layer.bias.grad.copy_(update[:, -1])
        return loss

    plain.step(by_hand)
    assert_close(model, twin, rtol=1e-7, atol=1e-9)
    optimizer.step(closure)
    assert [info.updates for info in optimizer.layers()] == [2, 2]
    assert F.mse_loss(model(x), y).item() < start


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("rule", RULES)
def test_a83_the_generator_step_leaves_no_trace_in_the_discriminator(rule, frozen):
    def run(generator_passes):
        torch.manual_seed(1)
        G, D = mlp(2, 4, 3), mlp(3, 4, 1, bias=False)
        generator, critic = wrap(G, rule=rule), wrap(D, rule=rule)
        for _ in range(4):
            noise, real = torch.randn(6, 2), torch.randn(6, 3) + 1
            critic.zero_grad()
            with torch.no_grad():
                fake = G(noise)
            (D(fake).mean() - D(real).mean()).backward()
            critic.step()
            if generator_passes:
                D.requires_grad_(not frozen)
                generator.zero_grad()
                (-D(G(noise)).mean()).backward()
                # The generator itself stays, so that the discriminator's data do not change.
                generator.precondition()
                D.requires_grad_(True)
        return D, factors(critic), generator

    D, seen, generator = run(generator_passes=True)
    expected, there, _ = run(generator_passes=False)
    assert_same(D, expected)
    assert_same(seen, there)
    assert [info.updates for info in generator.layers()] == [4, 4]


def test_a90_a_compiled_step_settles():
    torch._dynamo.reset()
    data = batches(10, 6, 5, 3)
    model, twin = mlp(5, 4, 3), mlp(5, 4, 3)
    optimizer, other = wrap(model, momentum=0.9), wrap(twin, momentum=0.9)
    schedules = [lr_scheduler.ExponentialLR(o, 0.9) for o in (optimizer, other)]
    step = torch.compile(optimizer.step, backend="eager")
    compiled = []
    for x, y in data:
        F.mse_loss(model(x), y).backward()
        step()
        optimizer.zero_grad()
        train(twin, other, [(x, y)])
        for schedule in schedules:
            schedule.step()
        compiled.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert compiled[-1] - compiled[2] <= 2
    assert_close(model, twin)
    assert_close(factors(optimizer), factors(other))
    torch._dynamo.reset()
