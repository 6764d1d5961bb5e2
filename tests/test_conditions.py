"""A second evaluation of a batch differs from the first in the weights alone."""

import pytest
import torch
from torch import nn

import mkor
from mkor.conditions import Replay, exact


def noisy_net():
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2), nn.Tanh()
    )


def test_a_replay_repeats_random_numbers_and_leaves_no_trace():
    model = noisy_net()
    replay = Replay(model)
    rows = torch.randn(6, 4)
    replay = Replay(model)
    first = model(rows)
    state = torch.get_rng_state()
    buffers = [b.clone() for b in model.buffers()]
    with replay.again():
        second = model(rows)
    assert torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(map(torch.equal, model.buffers(), buffers))
    assert not torch.equal(model(rows), first)  # other random numbers


def test_a_replay_restores_after_an_error():
    model = noisy_net()
    replay = Replay(model)
    before, buffers = torch.get_rng_state(), [b.clone() for b in model.buffers()]
    with pytest.raises(ZeroDivisionError), replay.again():
        model(torch.randn(6, 4))
        raise ZeroDivisionError
    assert torch.equal(torch.get_rng_state(), before)
    assert all(map(torch.equal, model.buffers(), buffers))


def test_exact_switches_autocast_and_gradients_off():
    with torch.autocast("cpu", torch.bfloat16), exact([torch.ones(1)]):
        assert not torch.is_autocast_enabled("cpu") and not torch.is_grad_enabled()
    assert torch.is_grad_enabled()


def kbfgs(model, **options):
    base = torch.optim.SGD(model.parameters(), lr=0.05)
    return mkor.KBFGS(model, base, **{"factor_update_steps": 2, "warmup_steps": 0, **options})


def closure_of(model, optimizer, rows, calls):
    def closure():
        optimizer.zero_grad()
        out = model(rows)
        loss = out.square().mean()
        loss.backward()
        calls.append(out.detach())
        return loss

    return closure


def test_a_second_pass_follows_steps_that_update_and_sees_the_same_dropout():
    model = noisy_net()
    optimizer = kbfgs(model)
    for step in range(4):
        rows, calls = torch.randn(6, 4), []
        weights = [p.detach().clone() for p in model.parameters()]
        loss = optimizer.step(closure_of(model, optimizer, rows, calls))
        assert len(calls) == (2 if step % 2 == 0 else 1)
        assert loss.item() == pytest.approx(calls[0].square().mean().item())
        assert not any(map(torch.equal, weights, model.parameters()))
        dropped = [call == 0 for call in calls]
        assert all(torch.equal(dropped[0], other) for other in dropped)
    tracked = [b for name, b in model.named_buffers() if "num_batches" in name]
    assert [int(b) for b in tracked] == [4]  # not six
    assert {layer.updates for layer in optimizer.layers() if layer.preconditioned} == {2}


def test_a_second_pass_needs_a_closure():
    model = noisy_net()
    optimizer = kbfgs(model)
    model(torch.randn(6, 4)).sum().backward()
    weights = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(TypeError, match=r"KBFGS evaluates the model itself: call step\(closure\)"):
        optimizer.step()
    with pytest.raises(TypeError, match=r"again after the base's step(.|\n)*call step\(closure\)"):
        optimizer.precondition()
    assert all(map(torch.equal, weights, model.parameters()))


def test_a_base_that_evaluates_by_itself_is_refused():
    model = noisy_net()
    base = torch.optim.LBFGS(model.parameters())
    with pytest.raises(ValueError, match="base is LBFGS, which evaluates the model itself"):
        mkor.KBFGS(model, base)


def test_after_close_one_evaluation_is_enough():
    model, calls = noisy_net(), []
    optimizer = kbfgs(model)
    optimizer.close()
    optimizer.step(closure_of(model, optimizer, torch.randn(6, 4), calls))
    assert len(calls) == 1


def test_after_the_second_pass_gradients_are_those_that_were_stepped_on():
    model = noisy_net()
    optimizer = kbfgs(model)
    weights = [p.detach().clone() for p in model.parameters()]
    optimizer.step(closure_of(model, optimizer, torch.randn(6, 4), []))
    (group,) = optimizer.param_groups
    for before, parameter in zip(weights, model.parameters(), strict=True):
        torch.testing.assert_close(parameter.detach(), before - group["lr"] * parameter.grad)


def test_gradients_may_be_cleared_after_the_step_in_place_of_in_the_closure():
    def run(in_closure):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
        optimizer = kbfgs(model)
        for _ in range(3):
            rows = torch.randn(6, 4)

            def closure(rows=rows):
                if in_closure:
                    optimizer.zero_grad()
                loss = model(rows).square().mean()
                loss.backward()
                return loss

            optimizer.step(closure)
            if not in_closure:
                optimizer.zero_grad()
        return optimizer.state_dict()["preconditioner"]["layers"]["0"]["state"]

    for one, other in zip(run(True).values(), run(False).values(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("bias", [True, False])
def test_a_pair_is_the_difference_between_two_evaluations_of_the_batch(bias):
    model = nn.Linear(4, 3, bias=bias).double()
    optimizer = kbfgs(model)
    rows, calls = torch.randn(6, 4, dtype=torch.float64), []
    optimizer.step(closure_of(model, optimizer, rows, calls))
    (record,) = optimizer.state_dict()["preconditioner"]["layers"].values()
    outputs = calls[1] - calls[0]
    s, y = outputs.mean(dim=0), 2 * outputs.sum(dim=0) / outputs.numel()  # of the mean square
    torch.testing.assert_close(record["state"]["s"][0], 0.1 * s)
    torch.testing.assert_close(record["state"]["y"][0], 0.1 * y)
