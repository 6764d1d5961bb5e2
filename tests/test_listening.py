"""A method that listens hears the gradient's size once a period, and a checkpoint remembers."""

import copy
import math

import pytest
import torch
from torch import nn

import mkor


def setting(**options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    base = torch.optim.SGD(model.parameters(), lr=0.01)
    return model, mkor.HyLo(model, base, rank=0.5, switch_steps=3, **options)


def train(model, optimizer, scales, seed=0):
    """A step for each scale of the loss; the norms of the weights' gradients."""
    source = torch.Generator().manual_seed(seed)
    norms = []
    for scale in scales:
        x = torch.randn(8, 5, generator=source)
        optimizer.zero_grad()
        (scale * model(x).square().mean()).backward()
        grads = [layer.weight.grad for layer in (model[0], model[2])]
        norms.append(math.sqrt(sum(float(g.square().sum()) for g in grads)))
        optimizer.step()
    return norms


def rms(norms):
    return math.sqrt(sum(n * n for n in norms) / len(norms))


def test_the_choice_follows_the_change_of_the_gradient():
    model, optimizer = setting()
    choices = []
    for scale in (1.0, 1.0, 10.0, 10.0):
        norms = train(model, optimizer, [scale] * 3)
        choices.append(optimizer._engine.now.choice())
        assert optimizer._engine.sizes[-1] == pytest.approx(rms(norms), rel=1e-5)
    assert choices == ["kid", "kis", "kid", "kis"]


def test_a_period_may_be_cut_by_a_checkpoint_or_a_copy():
    straight, cut = setting(), setting()
    train(*straight, [1.0] * 5 + [10.0] * 3)
    train(*cut, [1.0] * 5)
    resumed = setting()
    resumed[0].load_state_dict(cut[0].state_dict())
    resumed[1].load_state_dict(copy.deepcopy(cut[1].state_dict()))
    copied = copy.deepcopy(cut)
    for pair in (cut, resumed, copied):
        train(*pair, [10.0] * 3, seed=1)
        assert pair[1]._engine.sizes == cut[1]._engine.sizes
        assert len(pair[1]._engine.sizes) == 2
        assert pair[1]._engine.heard.calls == 2
        assert vars(pair[1]._engine.heard) == vars(cut[1]._engine.heard)


def test_the_other_methods_hear_nothing():
    model, optimizer = setting(sampling="kis")
    train(model, optimizer, [1.0] * 4)
    assert optimizer._engine.sizes == () and optimizer._engine.heard.calls == 0
