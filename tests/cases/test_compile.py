"""torch.compile, traces and exports of a model that an optimizer observes."""

import warnings

import pytest
import torch
from torch import nn

import mkor
from cases.helpers import (
    assert_same,
    build,
    every_method,
    factors,
    mlp,
    nothing_seen,
    parameters,
    train,
    updates,
)

# torch on itself, when it traces an autograd function.
traced = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
# torch on itself, where a method that keeps rows breaks the graph.
at_a_break = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


def compiled(model):
    return torch.compile(model, backend="eager")


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield torch._dynamo.utils.counters
    torch._dynamo.reset()


@traced
@at_a_break
@every_method
def test_a15_compiled_after_the_optimizer(method, fresh_dynamo):
    def run(wrap):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2, bias=False))
        optimizer = build(method, model, warmup_steps=0, factor_update_steps=2)
        train(wrap(model), optimizer, batches)
        assert updates(optimizer) == {"0": 2, "2": 2}
        return parameters(model) | factors(optimizer)

    batches = [torch.randn(6, 4) for _ in range(4)]
    assert_same(run(compiled), run(lambda model: model), 1e-6)


@traced
@every_method
def test_a15_compiled_before_the_optimizer(method, fresh_dynamo):
    model = mlp(4, 8, 2)
    fast = compiled(model)
    fast(torch.randn(6, 4))
    optimizer = build(method, model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(fast, optimizer, [torch.randn(6, 4) for _ in range(2)])
    silent = [name for name, count in updates(optimizer).items() if count < 2]
    told = [str(w.message) for w in caught if "no statistics arrived for" in str(w.message)]
    assert len(told) == (1 if silent else 0)
    assert all(name in told[0] for name in silent)


@traced
def test_a15_compiled_model_given_to_the_optimizer(fresh_dynamo):
    model = compiled(mlp(4, 8, 2))
    optimizer = build("exact", model)
    train(model, optimizer, [torch.randn(6, 4) for _ in range(2)])
    assert updates(optimizer) == {"0": 2, "2": 2}


@traced
@pytest.mark.parametrize("method", ["exact", "lowrank-sketch"])
def test_a16_capture_breaks_no_graph_and_recompiles_once(method, fresh_dynamo):
    """One graph for steps that update and one for the others, micro-batches included."""
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(64, 2, bias=False)
    )
    optimizer = build(method, model, warmup_steps=2, factor_update_steps=3)
    fast = torch.compile(model, backend="eager", fullgraph=True)
    for _ in range(9):
        for _ in range(5):
            fast(torch.randn(6, 2, 6, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert updates(optimizer) == {"0": 4, "3": 4}
    assert fresh_dynamo["stats"]["unique_graphs"] == 2
    assert not fresh_dynamo["graph_break"]


def test_a16_traces_and_exports_hold_nothing_of_the_capture():
    model, x = mlp(4, 8, 2), torch.randn(6, 4)
    optimizer = build("exact", model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates its own tracer
        traced_model = torch.jit.trace(model, x)
        exported = torch.export.export(model, (x,)).module()
    for fast in (traced_model, exported):
        torch.testing.assert_close(fast(x), model(x))
    assert nothing_seen(optimizer)
    assert not any("clone" in str(node.target) for node in exported.graph.nodes)


@traced
def test_a15_compiled_across_a_hand_over(fresh_dynamo):
    def run(wrap):
        torch.manual_seed(1)
        model = mlp(4, 8, 2)
        hybrid = mkor.HybridSwitch(at_step=3)
        optimizer = build("exact", model, factor_update_steps=2, hybrid=hybrid)
        train(wrap(model), optimizer, batches)
        assert not any(info.preconditioned for info in optimizer.layers())
        return parameters(model)

    batches = [torch.randn(6, 4) for _ in range(6)]
    assert_same(run(compiled), run(lambda model: model), 1e-6)
