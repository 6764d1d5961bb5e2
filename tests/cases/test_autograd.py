"""What runs around the backward pass: checkpoints, compilation, transforms, several passes."""

import weakref

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.utils.checkpoint import checkpoint

from cases.helpers import (
    after_steps,
    assert_moment,
    assert_same,
    build,
    every_method,
    factors,
    gradient_moment,
    input_moment,
    mlp,
    nothing_seen,
    observer,
    one_or_three,
    parameters,
    shown,
    take_step,
    train,
    updates,
)


class Checkpointed(nn.Module):
    """A block that may be recomputed, around a layer that is also called outside of it."""

    def __init__(self, reentrant, bias, shared):
        super().__init__()
        self.block = mlp(4, 8, 4, bias=bias)
        self.outside = self.block[0] if shared else nn.Linear(4, 8, bias=bias)
        self.reentrant = reentrant

    def forward(self, x):
        if self.reentrant is None:
            return self.outside(self.block(x))
        return self.outside(checkpoint(self.block, x, use_reentrant=self.reentrant))


@every_method
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shared", [False, True], ids=["a13", "a14"])
def test_a13_a14_checkpointing(method, reentrant, bias, shared):
    def run(mode):
        torch.manual_seed(1)
        model = Checkpointed(mode, bias, shared)
        optimizer = build(method, model)
        train(model, optimizer, batches)
        assert set(updates(optimizer).values()) == {3}
        return parameters(model) | factors(optimizer)

    batches = [torch.randn(6, 4, requires_grad=True) for _ in range(3)]
    assert_same(run(reentrant), run(None), 1e-5)


@every_method
def test_a17_per_sample_gradients(method):
    def run(transform):
        torch.manual_seed(1)
        model = mlp(4, 8, 2, bias=False)
        optimizer = build(method, model)
        if transform:
            values = {name: p.detach() for name, p in model.named_parameters()}

            def loss(values, row):
                return functional_call(model, values, (row,)).square().sum()

            per_sample = vmap(grad(loss), (None, 0))(values, x)
            rows = vmap(model)(x)
            assert nothing_seen(optimizer)
            torch.testing.assert_close(rows, model(x))
            for n, row in enumerate(x):
                one = torch.autograd.grad(model(row).square().sum(), list(model.parameters()))
                for expected, actual in zip(one, per_sample.values(), strict=True):
                    torch.testing.assert_close(actual[n], expected)
        train(model, optimizer, [x])
        assert updates(optimizer) == {"0": 1, "2": 1}
        return parameters(model) | factors(optimizer)

    x = torch.randn(6, 4)
    assert_same(run(transform=True), run(transform=False))


@every_method
@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_a18_create_graph_holds_no_graph(method):
    model = mlp(4, 8, 2, bias=False)
    optimizer = build(method, model, factor_update_steps=10)
    held = []  # the graph saves the output of tanh
    model[1].register_forward_hook(lambda module, args, out: held.append(weakref.ref(out)))

    def backward(loss):
        loss.backward(create_graph=True)
        assert held[-1]() is not None

    for _ in range(20):
        x = torch.randn(6, 4)
        take_step(model, optimizer, lambda x=x: model(x).square().mean(), backward)
        optimizer.zero_grad()
        assert not any(ref() is not None for ref in held)
    assert set(updates(optimizer).values()) == {11}  # ten of warm-up, and the eleventh
    layers = optimizer.state_dict()["preconditioner"]["layers"].values()
    assert all(tensor.grad_fn is None for layer in layers for tensor in layer["state"].values())


@every_method
@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_a18_create_graph_changes_no_number(method):
    def run(create_graph):
        torch.manual_seed(1)
        model = mlp(4, 8, 2, bias=False)
        optimizer = build(method, model)
        for x in batches:
            take_step(
                *(model, optimizer, lambda x=x: model(x).square().mean()),
                lambda loss: loss.backward(create_graph=create_graph),
            )
        return parameters(model) | factors(optimizer)

    batches = [torch.randn(6, 4) for _ in range(3)]
    assert_same(run(create_graph=True), run(create_graph=False), 1e-6)


@one_or_three
@pytest.mark.parametrize("bias", [True, False])
def test_a20_two_backwards_through_one_forward(vectors, bias):
    class Branched(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk = nn.Linear(4, 3, bias=bias)
            self.a = nn.Linear(3, 2)
            self.b = nn.Linear(3, 2)

    model = Branched()
    optimizer = observer(model, vectors)
    x = torch.randn(6, 4)
    g = (model.a.weight + model.b.weight).sum(dim=0).detach().expand(6, 3)
    h = model.trunk(x)
    model.a(h).sum().backward(retain_graph=True)
    model.b(h).sum().backward()
    optimizer.step()
    # The gradients of both add up, as `.grad` does, and rows count once.
    assert updates(optimizer) == {"trunk": 1, "a": 1, "b": 1}
    assert_moment(shown(optimizer, "trunk", "inputs"), input_moment(x.chunk(vectors), bias))
    assert_moment(shown(optimizer, "trunk", "outputs"), gradient_moment(g.chunk(vectors), bias))


def cleared_by_optimizer(model, optimizer):
    optimizer.zero_grad()


def cleared_by_model(model, optimizer):
    model.zero_grad()


@every_method
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("clear", [cleared_by_optimizer, cleared_by_model])
def test_a21_gradients_cleared_before_backward(method, bias, clear):
    def run(late):
        torch.manual_seed(1)
        model = mlp(4, 8, 2, bias=bias)
        optimizer = build(method, model)
        for x in batches:

            def loss(x=x):
                if not late:
                    clear(model, optimizer)
                value = model(x).square().mean()
                if late:
                    clear(model, optimizer)
                return value

            take_step(model, optimizer, loss)
        assert updates(optimizer) == {"0": 3, "2": 3}
        return parameters(model) | factors(optimizer)

    batches = [torch.randn(6, 4) for _ in range(3)]
    assert_same(run(late=True), run(late=False))


@every_method
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("clear", [cleared_by_optimizer, cleared_by_model])
def test_a21_a_dropped_batch_leaves_no_statistic(method, bias, clear):
    def run(dropped):
        torch.manual_seed(1)
        model = mlp(4, 8, 2, bias=bias)
        optimizer = build(method, model)
        if dropped:
            model(torch.full((6, 4), torch.nan)).square().mean().backward()
            clear(model, optimizer)
        take_step(model, optimizer, lambda: model(x).square().mean())
        return parameters(model) | factors(optimizer)

    x = torch.randn(6, 4)
    assert_same(run(dropped=True), run(dropped=False))


@every_method
def test_a10_evaluation_in_train_mode(method):
    torch.manual_seed(1)
    model = mlp(64, 64, 2)
    optimizer = build(method, model)
    held = []
    with torch.no_grad():
        for _ in range(50):
            x = torch.randn(128, 64)
            held += [weakref.ref(x), weakref.ref(model(x))]
    del x
    assert not any(ref() is not None for ref in held)
    assert nothing_seen(optimizer)
    torch.manual_seed(2)
    batch = torch.randn(8, 64)
    train(model, optimizer, [batch])
    twin = after_steps(method, lambda: mlp(64, 64, 2), [batch])
    assert_same(parameters(model) | factors(optimizer), twin)


@every_method
@pytest.mark.parametrize("bias", [True, False])
def test_a12_forward_without_backward(method, bias):
    torch.manual_seed(1)
    model = mlp(4, 8, 2, bias=bias)
    optimizer = build(method, model)
    x1, x2 = torch.randn(5, 4), torch.randn(7, 4)
    out = model(x1)
    held = weakref.ref(x1)
    del x1, out
    assert held() is None
    take_step(model, optimizer, lambda: model(x2).square().mean())
    twin = after_steps(method, lambda: mlp(4, 8, 2, bias=bias), [x2])
    assert_same(parameters(model) | factors(optimizer), twin)
