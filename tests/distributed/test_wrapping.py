"""How DDP is used around an optimizer: wrapped before or after, micro-batches under no_sync."""

from contextlib import nullcontext

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from collectives import counted
from gloo import spawn
from small_workers import batch, build, net

METHODS = {
    "dense": {},
    "low rank": {"representation": "lowrank", "rank": 3},
    "Eva": {"method": "Eva"},
    "K-FAC": {"method": "KFAC"},
    "SNGD": {"method": "SNGD"},
}
STEPS, ROWS = 5, 8


def train(model, optimizer, rank, micro=1, steps=range(STEPS)):
    """Steps of several micro-batches; names of the collectives of passes and of steps."""
    passes, ends = [], []
    for step in steps:
        optimizer.zero_grad()
        parts = batch(rank, step, ROWS).chunk(micro)
        with counted() as calls:
            for number, rows in enumerate(parts):
                last = number == len(parts) - 1
                with nullcontext() if last else model.no_sync():
                    (model(rows).square().mean() / len(parts)).backward()
        passes.append([name for name, _ in calls])
        with counted() as calls:
            optimizer.step()
        ends.append([name for name, _ in calls])
    return passes, ends


def parameters(model):
    return {n.removeprefix("module."): p.detach().clone() for n, p in model.named_parameters()}


def every_way(rank):
    out = {}
    for name, options in METHODS.items():
        model = DistributedDataParallel(net())
        optimizer = build(model, **options)
        calls = train(model, optimizer, rank)
        out[name, "after"] = parameters(model), calls
        out[name, "state"] = optimizer.state_dict()
        raw = net()
        optimizer = build(raw, **options)
        wrapped = DistributedDataParallel(raw)
        calls = train(wrapped, optimizer, rank)
        out[name, "before"] = parameters(wrapped), calls
        model = DistributedDataParallel(net())
        calls = train(model, build(model, **options), rank, micro=4)
        out[name, "no_sync"] = parameters(model), calls
        model = DistributedDataParallel(net())
        optimizer = build(model, **options)
        optimizer.load_state_dict(out[name, "state"])
        model.module.load_state_dict(out[name, "after"][0])
        train(model, optimizer, rank, steps=range(STEPS, 2 * STEPS))
        out[name, "went on"] = parameters(model)
    return out


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return spawn(every_way, tmp_path_factory.mktemp("ways"))


def assert_near(actual, expected, bound):
    for key, tensor in expected.items():
        assert float((actual[key] - tensor).abs().max()) <= bound * float(tensor.abs().max()), key


def test_a71_statistics_cross_once_a_step(outcomes):
    """Nothing in micro-batches, as much as for one batch in a step, and the same result."""
    for name in METHODS:
        (one, calls), (several, accumulated) = (
            outcomes[0][name, way] for way in ("after", "no_sync")
        )
        assert accumulated == calls, name
        passes, ends = calls
        assert passes == [[]] * STEPS, name
        assert ends[3] == [], name  # no update in it
        assert all(ends[step].count("all_reduce") == 1 for step in (1, 4)), name
        assert_near(several, one, 1e-9)


def test_a84_an_optimizer_built_before_or_after_wrapping(outcomes):
    for name in METHODS:
        (before, calls), (after, others) = (outcomes[0][name, way] for way in ("before", "after"))
        assert calls == others
        assert [key for key, p in after.items() if not torch.equal(before[key], p)] == [], name


def test_a84_a_checkpoint_has_no_name_of_a_wrapper(outcomes):
    """Saved under DDP, loaded by one worker on both batches, and by two under DDP."""
    for name, options in METHODS.items():
        state = outcomes[0][name, "state"]
        assert set(state["preconditioner"]["layers"]) == {"0", "2", "4"}
        assert state["preconditioner"]["parameters"] == [
            ["0.weight", "0.bias", "2.weight", "4.weight", "4.bias"]
        ]
        model = net()
        optimizer = build(model, **options)
        optimizer.load_state_dict(state)
        model.load_state_dict(outcomes[0][name, "after"][0])
        for step in range(STEPS, 2 * STEPS):
            optimizer.zero_grad()
            model(
                torch.cat([batch(worker, step, ROWS) for worker in (0, 1)])
            ).square().mean().backward()
            optimizer.step()
        assert_near(parameters(model), outcomes[0][name, "went on"], 1e-6)
