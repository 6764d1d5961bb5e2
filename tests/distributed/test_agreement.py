"""Workers that differ stop in seconds with one message; uneven and empty batches."""

import dataclasses
import time

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import mkor
from gloo import spawn
from mkor import agreement

THIN = {"representation": "lowrank", "rank": 3}


def net(width=5, dtype=torch.float64):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 2)).to(dtype)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def one_step(model, optimizer, rows=None):
    optimizer.zero_grad()
    rows = torch.randn(6, 4, dtype=torch.float64) if rows is None else rows
    model(rows).square().mean().backward()
    optimizer.step()


def message(function, kind=RuntimeError):
    """The message of the error that a function raises, and how long it took."""
    start = time.monotonic()
    with pytest.raises(kind) as caught:
        function()
    assert time.monotonic() - start < 20
    return str(caught.value)


def built_differently(rank):
    """What workers hear that differ in one thing, and their parameters, which no step changed."""
    out = {}
    own = {"rank": ({}, {"rank": 3 + rank}), "common": ({}, {"warmup_steps": 5 + rank})}
    for name, (_, options) in own.items():
        model = net()
        before = [p.clone() for p in model.parameters()]
        optimizer = mkor.MKOR(model, sgd(model), **{**THIN, **options})
        out[name] = message(lambda: one_step(model, optimizer))  # noqa: B023
        assert all(map(torch.equal, before, model.parameters()))
    model = net(5 + rank)
    out["model"] = message(lambda: one_step(model, mkor.MKOR(model, sgd(model))))
    model = net()
    base = sgd(model) if rank else torch.optim.AdamW(model.parameters())
    out["base"] = message(lambda: one_step(model, mkor.MKOR(model, base)))
    model = net()
    out["method"] = message(lambda: one_step(model, (mkor.Eva, mkor.KFAC)[rank](model, sgd(model))))
    agreement.installed = lambda name: f"0.{rank}"
    out["version"] = message(lambda: one_step(model, mkor.MKOR(model, sgd(model))))
    return out


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Of all jobs, by worker: starting the processes is what takes time."""
    return spawn(every_job, tmp_path_factory.mktemp("jobs"), timeout=110)


def every_job(rank):
    jobs = (drifting, partial, uneven, empty, not_finite, built_differently)
    return {job.__name__: job(rank) for job in jobs}


def test_workers_that_are_built_differently(outcomes):
    first, second = (outcome["built_differently"] for outcome in outcomes)
    assert first == second
    told = "workers are built differently: worker 0 has '{}' where worker 1 has '{}'. Build the"
    expected = {
        "rank": ("option count: 3", "option count: 4"),
        "common": ("option warmup_steps: 5", "option warmup_steps: 6"),
        "model": (
            "parameter '0.weight': (5, 4) in torch.float64",
            "parameter '0.weight': (6, 4) in torch.float64",
        ),
        "base": ("base optimizer: AdamW", "base optimizer: SGD"),
        "version": ("mkor: 0.0", "mkor: 0.1"),
    }
    for name, pair in expected.items():
        assert told.format(*pair) in first[name], name
    assert "worker 0 has 'option damping: 0.03'" in first["method"]


def drifting(rank):
    """Case A89: every step is checked, until something differs on one worker."""
    model = DistributedDataParallel(net())
    optimizer = mkor.MKOR(model, sgd(model), agreement_steps=2, factor_update_steps=1, **THIN)
    torch.manual_seed(rank)
    for _ in range(50):
        one_step(model, optimizer)
    out = {}
    state = optimizer._engine.records["2"].state["inputs"]
    state[0, 0, 0] += 1e-9 * rank
    out["factor"] = message(lambda: one_step(model, optimizer))
    state[0, 0, 0] -= 1e-9 * rank
    with torch.no_grad():
        model.module[2].bias[1] += 1e-9 * rank
    out["parameter"] = message(lambda: one_step(model, optimizer))
    return out


def test_a89_workers_that_drift_apart(outcomes):
    """50 steps on other data leave them equal to the bit."""
    first, second = (outcome["drifting"] for outcome in outcomes)
    assert first == second
    assert "step 50: the factors of layer '2' is not the same on all of them" in first["factor"]
    assert "workers differ in step 50: parameter '2.bias' is not the same" in first["parameter"]


def partial(rank):
    """Case A87: gradients that no wrapper averages."""
    model = net()
    optimizer = mkor.MKOR(model, sgd(model), agreement_steps=1)
    torch.manual_seed(rank)
    return message(lambda: one_step(model, optimizer))


def test_a87_gradients_that_nobody_averages(outcomes):
    first, second = (outcome["partial"] for outcome in outcomes)
    assert first == second
    assert "workers differ in step 0: the gradient of '0.weight'" in first


def uneven(rank):
    """Case A85: three batches here, five there."""

    def train(**join):
        model = DistributedDataParallel(net())
        optimizer = mkor.MKOR(model, sgd(model))
        with Join([model], **join):
            for _ in range(3 + 2 * rank):
                one_step(model, optimizer)

    refused = message(train)
    early = message(lambda: train(throw_on_early_termination=True))
    return refused, early


def test_a85_uneven_inputs(outcomes):
    for refused, early in (outcome["uneven"] for outcome in outcomes):
        assert "the model is trained under torch's Join without its optimizer, so that" in refused
        assert "exhausted" in early


METHODS = {
    "dense": {},
    "low rank": THIN,
    "Eva": {"method": "Eva"},
    "K-FAC": {"method": "KFAC"},
    "SNGD": {"method": "SNGD"},
    "K-BFGS": {"method": "KBFGS"},
}


def build(method="MKOR", **options):
    model = DistributedDataParallel(net())
    optimizer = getattr(mkor, method)(model, sgd(model), factor_update_steps=1, **options)
    return model, optimizer


def empty(rank):
    """All rows on one worker, none on the other, whose loss is a sum over the rows of both."""
    rows = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    out = {}
    for name, options in METHODS.items():
        model, optimizer = build(**options)
        for _ in range(3):
            own = rows if rank == 0 else rows[:0]

            def closure():
                optimizer.zero_grad()  # noqa: B023
                loss = model(own).square().sum() / 6  # noqa: B023
                loss.backward()
                return loss

            optimizer.step(closure)
        out[name] = [p.detach().clone() for p in model.parameters()]
    return out


def test_a_worker_with_an_empty_batch(outcomes):
    first, second = (outcome["empty"] for outcome in outcomes)
    for name in METHODS:
        assert all(map(torch.equal, first[name], second[name])), name
        assert all(bool(torch.isfinite(p).all()) for p in first[name]), name


def not_finite(rank):
    """A NaN on one worker: left out on all, or told by all."""
    torch.manual_seed(rank)
    out = {}
    for policy in ("skip", "raise"):
        model = DistributedDataParallel(net())
        optimizer = mkor.MKOR(model, sgd(model), on_nonfinite=policy, factor_update_steps=1)
        one_step(model, optimizer)
        rows = torch.randn(6, 4, dtype=torch.float64)
        rows[0, 0] = float("nan") if rank else 1.0
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        if policy == "raise":
            out[policy] = message(optimizer.step, FloatingPointError)
            continue
        optimizer.precondition()
        states = optimizer.state_dict()["preconditioner"]["layers"]
        out[policy] = {f"{n} {k}": t for n, s in states.items() for k, t in s["state"].items()}
    return out


def test_a63_a_nan_on_one_worker(outcomes):
    """Case A63 on several workers."""
    first, second = (outcome["not_finite"] for outcome in outcomes)
    assert first["raise"] == second["raise"]
    assert "layer '0' has a statistic or gradient that is not finite in step 1" in first["raise"]
    for key, tensor in first["skip"].items():
        assert torch.equal(tensor, second["skip"][key]), key
        assert bool(torch.isfinite(tensor).all()), key
    assert int(first["skip"]["0 events"].sum()) > 0


def test_options_by_name():
    """The lines that are compared name every option, and no address of an object."""
    model = net()
    optimizer = mkor.MKOR(model, sgd(model), damping=lambda step: 0.1 / (step + 1), **THIN)
    lines = agreement.built_as(optimizer._engine, optimizer.base, optimizer._common)
    names = {entry.name for entry in dataclasses.fields(optimizer._method)}
    named = {line.split(":")[0].removeprefix("option ") for line in lines}
    assert names | optimizer._common.keys() <= named
    assert not any(" at 0x" in line for line in lines)
