"""Options that are functions of the step, and checkpoints of other options."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mkor


def setting(cls=mkor.MKOR, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    base = torch.optim.SGD(model.parameters(), lr=0.05)
    return model, cls(model, base, **options)


def step(model, optimizer):
    source = torch.Generator().manual_seed(1)
    x, y = torch.randn(8, 5, generator=source), torch.randint(0, 3, (8,), generator=source)

    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    return float(optimizer.step(closure).detach())


def later(good, bad):
    return lambda at: good if at < 3 else bad


LATER = {
    "damping": (mkor.KFAC, 0.1, -1.0, r"damping\(3\)=-1.0 is out of range"),
    "damping of Eva": (mkor.Eva, 0.1, 0.0, r"damping\(3\)=0.0 is out of range"),
    "damping of K-BFGS": (mkor.KBFGS, 0.1, float("nan"), r"damping\(3\)=nan is out of range"),
    "factor_decay": (mkor.MKOR, 0.5, 5, r"factor_decay\(3\)=5 is out of range"),
    "kl_clip": (mkor.KFAC, 0.1, None, r"kl_clip\(3\)=None is out of range"),
    "factor_update_steps": (mkor.MKOR, 1, 2.5, r"factor_update_steps\(3\)=2.5 is out of range"),
    "inverse_update_steps": (mkor.KFAC, 1, 0, r"inverse_update_steps\(3\)=0 is out of range"),
    "sampling": (mkor.HyLo, "kid", "kit", r"sampling\(3\)='kit' is out of range"),
}


@pytest.mark.parametrize("case", LATER)
def test_a_function_of_the_step_is_checked_in_every_step(case):
    cls, good, bad, message = LATER[case]
    options = {"warmup_steps": 0, "factor_update_steps": 1}
    options[case.split(" ", maxsplit=1)[0]] = later(good, bad)
    model, optimizer = setting(cls, **options)
    with pytest.raises(ValueError, match=message):
        for _ in range(6):
            step(model, optimizer)


def test_hylo_takes_its_sampling_from_the_step():
    model, optimizer = setting(mkor.HyLo, sampling=later("kid", "kis"))
    for _ in range(6):
        step(model, optimizer)
    assert {info.updates for info in optimizer.layers()} == {6}


OTHER = {
    "solver": (mkor.KFAC, {"solver": "eigen"}, {"solver": "inverse"}, "inputs_values"),
    "representation": (mkor.MKOR, {}, {"representation": "lowrank"}, "inputs_gram"),
    "rank": (
        mkor.MKOR,
        {"representation": "lowrank", "rank": 2},
        {"representation": "lowrank", "rank": 3},
        r"\[1, 2, 6\] there and \[1, 3, 6\] here",
    ),
    "wide_sides": (
        mkor.MKOR,
        {"max_dim": 4, "wide_sides": "window", "window": 2},
        {"max_dim": 6},
        "keeps inputs_gram, inputs_place, .* there and less here",
    ),
    "wide_sides of another kind": (
        mkor.MKOR,
        {"max_dim": 5, "wide_sides": "window", "window": 2},
        {"max_dim": 5, "wide_sides": "lowrank", "rank": 2},
        "keeps inputs_place, outputs_place there and inputs_trace, outputs_trace here",
    ),
    "packed": (mkor.MKOR, {"packed": True}, {}, r"\[1, 6\] there and \[1, 3, 3\] here"),
    "memory": (mkor.KBFGS, {"memory": 2}, {"memory": 3}, r"\[1, 2, 6\] there"),
}


@pytest.mark.parametrize("case", OTHER)
def test_a_checkpoint_of_other_options_is_refused_or_starts_anew(case):
    cls, there, here, message = OTHER[case]
    model, optimizer = setting(cls, **there)
    step(model, optimizer)
    saved = optimizer.state_dict()
    model, optimizer = setting(cls, **here)
    with pytest.raises(ValueError, match=rf"layer '0'(.|\n)*{message}(.|\n)*strict=False"):
        optimizer.load_state_dict(saved)
    optimizer.load_state_dict(saved, strict=False)
    assert {info.updates for info in optimizer.layers()} == {0}
    for _ in range(3):
        step(model, optimizer)
    assert {info.updates for info in optimizer.layers()} == {3}


def test_an_error_in_the_second_pass_costs_that_pass_only():
    model, optimizer = setting(mkor.KBFGS)
    calls = 0

    def closure():
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        optimizer.zero_grad()
        loss = model(torch.randn(8, 5)).square().mean()
        loss.backward()
        return loss

    with pytest.raises(KeyboardInterrupt):
        optimizer.step(closure)
    losses = [step(model, optimizer) for _ in range(20)]
    assert losses[-1] < losses[0]
    assert {info.updates for info in optimizer.layers()} == {21}


def test_a_closure_without_gradients_is_told():
    model, optimizer = setting(mkor.KBFGS)
    with pytest.warns(UserWarning, match="the closure showed no gradients"):
        optimizer.step(lambda: model(torch.randn(8, 5)).sum())
    optimizer.step(lambda: model(torch.randn(8, 5)).sum())  # told once


def test_a_split_of_a_damping_that_is_not_split_is_refused():
    with pytest.raises(ValueError, match="damping_split='plain' has no effect with solver='eigen'"):
        setting(mkor.KFAC, solver="eigen", damping_split="plain")


def test_numbers_of_numpy_are_numbers():
    numpy = pytest.importorskip("numpy")
    _, optimizer = setting(damping=numpy.float32(0.1), max_dim=numpy.int64(64))
    assert optimizer._method.max_dim == 64
