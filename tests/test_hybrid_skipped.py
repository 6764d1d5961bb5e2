"""A step that a loss scaler skips leaves the hybrid switch as if it had not been."""

import copy

import pytest
import torch

import mkor
from small_runs import data, same
from test_hybrid import build

STEPS, MICRO = 9, 2
WINDOW = {"window": 5, "patience": 1, "back": 0.1}
METHODS = pytest.mark.parametrize("method", ["mkor", "hylo"])


def accumulate(pair, scaler, number, show=True):
    """The backward passes of a step, in micro-batches; returns their losses."""
    model, optimizer = pair
    losses = []
    for rows, goals in data(STEPS * MICRO)[number * MICRO : (number + 1) * MICRO]:
        loss = (model(rows) - goals).square().mean()
        scaler.scale(loss).backward()
        losses.append(loss.detach())
        if show:
            optimizer.observe_loss(losses[-1])
    return losses


def overflow(model):
    model[0].weight.grad[0, 0] = torch.inf


def step(pair, scaler, skip):
    if skip:
        overflow(pair[0])
    before = scaler.get_scale()
    scaler.step(pair[1])
    scaler.update()
    assert (scaler.get_scale() < before) == skip


def cleared_behind(pair, scaler, number, skip):
    accumulate(pair, scaler, number)
    step(pair, scaler, skip)
    pair[1].zero_grad()


def cleared_before(pair, scaler, number, skip):
    pair[1].zero_grad(set_to_none=number % 2 == 0)
    accumulate(pair, scaler, number)
    step(pair, scaler, skip)


def shown_behind(pair, scaler, number, skip):
    losses = accumulate(pair, scaler, number, show=False)
    step(pair, scaler, skip)
    for loss in losses:
        pair[1].observe_loss(loss)
    pair[1].zero_grad()


ORDERS = pytest.mark.parametrize("order", [cleared_behind, cleared_before, shown_behind])


def run(method, order, numbers, skipped=()):
    """A run over these batches; its switch at the end, once the gradients are cleared."""
    pair = build(method, **WINDOW)
    scaler = torch.amp.GradScaler("cpu", 2.0**10)
    for number in numbers:
        order(pair, scaler, number, number in skipped)
    pair[1].zero_grad()
    return *pair, pair[1]._handover.state_dict()


@METHODS
@ORDERS
@pytest.mark.parametrize("skipped", [(0, 1), (4,), (2, 6), (8,)])
def test_the_window_is_that_of_a_run_without_the_batch(method, order, skipped):
    taken = [number for number in range(STEPS) if number not in skipped]
    model, optimizer, hybrid = run(method, order, range(STEPS), skipped)
    twin, other, expected = run(method, order, taken)
    assert hybrid == expected
    assert hybrid["course"]["loss"] is not None and hybrid["meter"]["calls"] > 0
    assert optimizer.layers() == other.layers()
    assert same(model, twin)


def test_a_loss_shown_before_its_gradients_are_cleared_counts():
    """Forward pass, loss, `zero_grad`, backward pass: as in a run that clears elsewhere."""
    pair, other = build(**WINDOW), build(**WINDOW)
    for number, (rows, goals) in enumerate(data(6)):
        for (model, optimizer), early in ((pair, True), (other, False)):
            loss = (model(rows) - goals).square().mean()
            if early and number:  # at first there was no step
                optimizer.observe_loss(loss)
                optimizer.zero_grad()
            else:
                optimizer.zero_grad()
                optimizer.observe_loss(loss)
            loss.backward()
            optimizer.step()
    assert pair[1]._handover.state_dict() == other[1]._handover.state_dict()
    assert pair[1]._handover.course.loss is not None


@pytest.mark.parametrize("skip", [True, False])
def test_a_checkpoint_holds_losses_that_wait_for_their_step(skip, tmp_path):
    straight = build(**WINDOW)
    scaler = torch.amp.GradScaler("cpu", 2.0**10)
    for number in range(2):
        cleared_before(straight, scaler, number, False)
    straight[1].zero_grad()
    accumulate(straight, scaler, 2)
    torch.save(straight[1].state_dict(), tmp_path / "saved")
    resumed = build(**WINDOW)
    resumed[1].load_state_dict(torch.load(tmp_path / "saved", weights_only=True))
    copied = copy.deepcopy(straight)
    for own in (resumed, copied):
        assert own[1]._handover.state_dict() == straight[1]._handover.state_dict()
        assert own[1]._handover.shown.calls == MICRO
    resumed[0].load_state_dict(straight[0].state_dict())
    for own, there in zip(resumed[0].parameters(), straight[0].parameters(), strict=True):
        own.grad = there.grad.clone()
    for own in (straight, resumed, copied):
        if skip:
            own[1].zero_grad()
        else:
            own[1].step()
        hybrid = own[1]._handover.state_dict()
        assert hybrid["meter"]["calls"] == MICRO * (2 if skip else 3)
        assert hybrid == straight[1]._handover.state_dict()


@pytest.mark.parametrize("shown", [True, False])
def test_a_closures_loss_counts_once_though_the_closure_clears_again(shown):
    """LBFGS evaluates it several times a step; each clears the gradients, and may show the loss."""
    model, _ = build()
    base = torch.optim.LBFGS(model.parameters(), max_iter=3)
    optimizer = mkor.MKOR(model, base, hybrid=mkor.HybridSwitch(**WINDOW))

    def closure():
        optimizer.zero_grad()
        loss = model(data(1)[0][0]).square().mean()
        loss.backward()
        if shown:
            optimizer.observe_loss(loss)
        losses.append(loss.item())
        return loss

    firsts, losses = [], []
    for _ in range(2):
        firsts.append(len(losses))
        optimizer.step(closure)
    assert len(losses) > 2
    meter = optimizer._handover.meter
    assert (meter.calls, meter.take(None)) == (2, sum(losses[at] for at in firsts) / 2)
