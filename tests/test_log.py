"""The logger `mkor`: a line at each fault, told once, and nothing waited for in a step."""

import copy
import logging
import pickle

import pytest
import torch
from torch import nn

import mkor
from small_runs import backward, data, mlp, sgd, train
from test_hybrid import METHODS, adam, every_method
from test_hybrid import sgd as plain
from test_no_sync import no_sync

NAN = float("nan")


def build(method, model, base=adam, **options):
    cls, own = METHODS[method]
    return cls(model, base(model), **{**own, **options})


def step(model, optimizer, batch):
    def closure():
        optimizer.zero_grad()
        return backward(model, batch)

    optimizer.step(closure)


def poisoned(method, model, **options):
    """An optimizer after three steps, the second on inputs that are not finite."""
    torch.manual_seed(0)
    optimizer = build(method, model, **options)
    weights = [p.detach().clone() for p in model.parameters()]
    for number, (x, y) in enumerate(data(3)):
        step(model, optimizer, (x * NAN if number == 1 else x, y))
        if number == 1:  # as a user would who goes back
            with torch.no_grad():
                for p, kept in zip(model.parameters(), weights, strict=True):
                    p.copy_(kept)
    return optimizer


@every_method
def test_faults_are_told_once_by_layer(method, caplog):
    model = mlp()
    optimizer = poisoned(method, model)
    assert caplog.messages == []
    optimizer.log_events()
    infos = {info.name: info for info in optimizer.layers()}
    told = ("skipped", "resets", "rejected", "bounded", "mismatched")
    counts = {n: {key: getattr(info, key) for key in told} for n, info in infos.items()}
    faulty = [n for n, count in counts.items() if any(count.values())]
    assert faulty
    assert caplog.messages == [
        " ".join([f"fault: step=3 layer={n}", *(f"{k}={v}" for k, v in counts[n].items())])
        for n in faulty
    ]
    assert {record.levelno for record in caplog.records} == {logging.WARNING}
    optimizer.log_events()
    optimizer.state_dict()
    assert len(caplog.messages) == len(faulty)


def test_only_what_is_new_is_told(caplog):
    model = mlp()
    optimizer = poisoned("mkor", model)
    optimizer.log_events()
    first = {info.name: info.skipped for info in optimizer.layers()}
    weights = copy.deepcopy(model.state_dict())
    step(model, optimizer, (data(1)[0][0] * NAN, data(1)[0][1]))
    model.load_state_dict(weights)
    caplog.clear()
    optimizer.log_events()
    now = {info.name: info.skipped for info in optimizer.layers()}
    assert [m.split(" resets")[0] for m in caplog.messages] == [
        f"fault: step=4 layer={name} skipped={now[name] - first[name]}" for name in now
    ]


def test_a_checkpoint_tells_what_it_saves_and_its_reader_does_not(caplog):
    optimizer = poisoned("mkor", mlp())
    saved = copy.deepcopy(optimizer.state_dict())
    assert len(caplog.messages) == 2
    caplog.clear()
    other = build("mkor", mlp())
    other.load_state_dict(saved)
    for one in (optimizer, other, pickle.loads(pickle.dumps(optimizer)), copy.deepcopy(optimizer)):
        one.log_events()
    assert caplog.messages == []
    anew = build("mkor", mlp())
    optimizer.load_state_dict(copy.deepcopy(anew.state_dict()))
    optimizer.log_events()
    assert caplog.messages == []


def test_a_hand_over_tells_what_is_freed(caplog):
    optimizer = poisoned("mkor", mlp(), hybrid=mkor.HybridSwitch(at_step=3))
    assert [message.split()[0] for message in caplog.messages] == ["fault:", "fault:"]
    assert not any(info.updates for info in optimizer.layers())


def test_an_error_that_is_raised_is_told(caplog):
    model = mlp()
    optimizer = sgd(model, on_nonfinite="raise")
    backward(model, (data(1)[0][0] * NAN, data(1)[0][1]))
    with pytest.raises(FloatingPointError):
        optimizer.step()
    assert caplog.messages == ["not finite: step=0 layer=0"]


def test_layers_that_show_nothing_are_told(caplog):
    class Direct(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(5, 5), nn.Linear(5, 3)

        def forward(self, x):
            return self.two(self.one.forward(x))

    model = Direct()
    optimizer = sgd(model)
    with pytest.warns(UserWarning, match="no statistics arrived for one") as told:
        train(model, optimizer, data(1))
    assert told[0].filename.endswith("small_runs.py")  # where step() was called
    assert caplog.messages == ["no statistics: step=0 layers=one"]


@pytest.mark.parametrize("method", ["mkor", "kfac", "eva", "kbfgs"])
def test_a_faulty_step_waits_for_nothing(method, caplog):
    model = mlp()
    optimizer = build(method, model, plain)
    step(model, optimizer, data(1)[0])
    x, y = data(1)[0]
    bad = x * NAN
    with no_sync():
        step(model, optimizer, (bad, y))
    assert caplog.messages == []
