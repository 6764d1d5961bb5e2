"""Layers of equal shape take a function together, and come to what each comes to alone."""

import copy

import pytest
import torch
from torch import nn

import mkor
from mkor import stacking
from mkor.messages import Stacked


class Recorder:
    """Halves the state where `given` is positive, and remembers how many matrices came at once."""

    def __init__(self):
        self.calls = []

    def __call__(self, state, given):
        self.calls.append(len(state["x"]))
        state["x"].mul_(torch.where(given["sign"][:, None] > 0, 0.5, 1.0))
        return {"sum": state["x"].sum(dim=-1)}


def request(function, stack, width, value=1.0):
    return Stacked(function, {"x": torch.full((stack, width), value)}, {"sign": torch.ones(stack)})


def test_equal_shapes_run_once_and_others_apart():
    function = Recorder()
    requests = {
        "a": request(function, 1, 3, 2.0),
        "b": request(function, 2, 3, 4.0),
        "c": request(function, 1, 5),
    }
    requests["b"].given["sign"][1] = -1
    answers = stacking.run_stacked(requests)
    assert sorted(function.calls) == [1, 3]
    assert requests["a"].state["x"].tolist() == [[1.0, 1.0, 1.0]]
    assert requests["b"].state["x"].tolist() == [[2.0] * 3, [4.0] * 3]
    assert {name: answer["sum"].tolist() for name, answer in answers.items()} == {
        "a": [3.0],
        "b": [6.0, 12.0],
        "c": [2.5],
    }


def test_other_functions_dtypes_and_wide_tensors_run_apart():
    function, other = Recorder(), Recorder()
    double = request(function, 1, 3)
    double.state["x"] = double.state["x"].double()
    wide = [request(function, 1, stacking.WIDE + 1) for _ in range(2)]
    names = dict(enumerate([request(function, 1, 3), request(other, 1, 3), double, *wide]))
    stacking.run_stacked({str(key): value for key, value in names.items()})
    assert (function.calls, other.calls) == ([1] * 4, [1])


OPTIONS = {
    "dense": {},
    "dense and a window": {"max_dim": 6, "wide_sides": "window", "window": 4},
    "window": {"representation": "window", "window": 5},
    "lowrank": {"representation": "lowrank", "statistic": "sketch", "vectors": 3, "rank": 4},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_stack_trains_as_layers_alone_do(options, monkeypatch):
    model = nn.Sequential(
        *(layer for _ in range(3) for layer in (nn.Linear(6, 6), nn.Tanh())), nn.Linear(6, 2)
    ).double()
    ends = []
    for wide in (stacking.WIDE, 0):
        monkeypatch.setattr(stacking, "WIDE", wide)
        own = copy.deepcopy(model)
        optimizer = mkor.MKOR(own, torch.optim.SGD(own.parameters(), lr=0.1), **options)
        torch.manual_seed(0)
        for _ in range(5):
            optimizer.zero_grad()
            own(torch.randn(7, 6).double()).square().mean().backward()
            optimizer.step()
        ends.append(torch.cat([p.detach().flatten() for p in own.parameters()]))
    torch.testing.assert_close(*ends, rtol=1e-9, atol=1e-12)
