"""Warnings point at the line of the user which caused them, by whatever way it is reached."""

import pytest
import torch
from torch import nn

import mkor


class Direct(nn.Module):
    """Calls the `forward` of a layer, which runs no hook."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.two(self.one.forward(x))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def lbfgs(model):
    return torch.optim.LBFGS(model.parameters(), lr=0.1)


WAYS = {
    "mkor": lambda model: mkor.MKOR(model, sgd(model)),
    "lbfgs": lambda model: mkor.MKOR(model, lbfgs(model)),
    "kbfgs": lambda model: mkor.KBFGS(model, sgd(model)),
    "auto": mkor.auto,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("scheduled", [True, False])
def test_a_step_that_sees_nothing_of_a_layer(way, scheduled):
    model = Direct()
    optimizer = WAYS[way](model)
    if scheduled:  # wraps `step`
        torch.optim.lr_scheduler.StepLR(optimizer, 1)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(5, 4)).square().mean()
        loss.backward()
        return loss

    with pytest.warns(UserWarning, match="no statistics arrived for one") as told:
        optimizer.step(closure)
    assert [warning.filename for warning in told] == [__file__]


@pytest.mark.parametrize("make", [mkor.MKOR, mkor.KFAC, mkor.Eva, mkor.HyLo])
def test_an_optimizer_without_a_layer(make):
    model = nn.LayerNorm(4)
    with pytest.warns(UserWarning, match="no layer is preconditioned") as told:
        make(model, sgd(model))
    assert [warning.filename for warning in told] == [__file__]


def test_a_pattern_that_matches_nothing():
    model = nn.Linear(4, 3)
    with pytest.warns(UserWarning, match="matches no module name") as told:
        mkor.MKOR(model, sgd(model), skip=["nowhere"])
    assert [warning.filename for warning in told] == [__file__]


def test_a_hybrid_switch_that_saw_no_loss():
    model = nn.Linear(4, 3)
    optimizer = mkor.MKOR(model, sgd(model), hybrid=mkor.HybridSwitch(window=2))
    with pytest.warns(UserWarning, match="loss") as told:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(5, 4)).square().mean().backward()
            optimizer.step()
    assert [warning.filename for warning in told] == [__file__]
