"""Layers called several times or on inputs of other ranks, and decompositions that fail, by every
method."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cases.helpers import (
    METHODS,
    assert_same,
    build,
    evaluates_again,
    every_method,
    every_optimizer,
    factors,
    mlp,
    parameters,
    sgd,
    take_step,
    train,
    updates,
)
from cases.test_batches import NO_DRAW, SKETCHES

BLOCKS = ("exact-3", "reference-3")
"""Methods that cut each call into blocks, so that two calls are other blocks than one."""

of_all_rows = pytest.mark.parametrize(
    "method", [name for name in METHODS if name not in (*BLOCKS, *SKETCHES)]
)
BY_ROW = ("kfac-eigen", "kfac-inverse", "sngd", "hylo-kis", "hylo-kid")
"""Methods that take the gradient of each row by itself."""


def double(method, make):
    """A seeded model in float64 and its optimizer, without draws."""
    torch.manual_seed(1)
    model = make().double()
    return model, build(method, model, sgd(model, lr=0.02), **NO_DRAW.get(method, {}))


def rows(*shape):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def everything(method, model, optimizer):
    """Parameters, and factors of which neither signs nor an order of rows is arbitrary."""
    if method in (*SKETCHES, "kfac-eigen", "window", "sngd", "hylo-kis", "hylo-kid"):
        return parameters(model)
    return parameters(model) | factors(optimizer)


@of_all_rows
@pytest.mark.parametrize("bias", [True, False])
def test_a07_two_calls_of_different_sizes_are_one_of_all_rows(method, bias):
    x, z = rows(2, 4), rows(2, 5, 4)

    def run(calls):
        model, optimizer = double(method, lambda: nn.Linear(4, 3, bias=bias))
        take_step(model, optimizer, lambda: sum(model(part).square().sum() for part in calls) / 36)
        assert updates(optimizer) == {"Linear": 1}
        return everything(method, model, optimizer)

    assert_same(run([x, z]), run([torch.cat([x, z.flatten(0, 1)])]), 1e-8)


class Cell(nn.Module):
    """A layer called once a time step; what it saw and made is kept."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(7, 4)

    def forward(self, x):  # [T, n, 3]
        self.seen, self.made = [], []
        h = x.new_zeros(x.shape[1], 4)
        for x_t in x:
            self.seen.append(torch.cat([x_t, h], dim=-1))
            self.made.append(self.fc(self.seen[-1]))
            h = self.made[-1].tanh()
        return h


@of_all_rows
def test_a08_an_unrolled_cell_is_one_call_of_all_its_rows(method):
    """A linear loss on all rows has the same gradients. K-BFGS compares that of a second pass."""
    cell, optimizer = double(method, Cell)
    model, other = double(method, Cell)
    x = rows(5, 6, 3)
    loss = model(x).square().mean()
    grads = torch.cat(torch.autograd.grad(loss, model.made)).detach()
    inputs = torch.cat(model.seen).detach()
    other.zero_grad()
    take_step(cell, optimizer, lambda: cell(x).square().mean())
    take_step(model, other, lambda: model.fc(inputs).mul(grads).sum() * 1.0)
    assert updates(optimizer) == updates(other) == {"fc": 1}
    found, there = everything(method, cell, optimizer), everything(method, model, other)
    if evaluates_again(optimizer):
        first = ("fc.moment", "fc.weight", "fc.bias", "fc.inputs")
        found, there = ({key: part[key] for key in first} for part in (found, there))
    assert_same(found, there, 1e-8)


class Branched(nn.Module):
    """A trunk under two heads."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(4, 3)
        self.a = nn.Linear(3, 2)
        self.b = nn.Linear(3, 2)

    def forward(self, x):
        h = self.trunk(x).tanh()
        return self.a(h).square().mean(), self.b(h).square().mean()


@every_method
def test_a20_two_backwards_through_one_forward(method):
    """Sums of gradients add up, as `.grad` does; single rows of a pass join as a micro-batch's."""

    def run(passes):
        model, optimizer = double(method, Branched)

        def closure():
            optimizer.zero_grad()
            one, two = model(x)
            if passes == "apart":
                one.backward(retain_graph=True)
                two.backward()
            elif passes == "together":
                (one + two).backward()
            else:
                one.backward()
                model(x)[1].backward()
            return one + two

        optimizer.step(closure)
        assert updates(optimizer) == {"trunk": 1, "a": 1, "b": 1}
        return parameters(model)

    x = rows(6, 4)
    assert_same(run("apart"), run("forwards" if method in BY_ROW else "together"), 1e-8)


@of_all_rows
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(4,), (3, 5, 4), (3, 2, 5, 4)])
def test_a46_a47_inputs_of_any_rank_are_their_rows(method, shape, bias):
    def run(x):
        model, optimizer = double(method, lambda: nn.Linear(4, 3, bias=bias))
        take_step(model, optimizer, lambda: model(x).square().mean())
        return everything(method, model, optimizer)

    x = rows(*shape)
    assert_same(run(x), run(x.reshape(-1, 4)), 1e-8)


@pytest.mark.parametrize("method", [name for name in METHODS if name not in SKETCHES])
@pytest.mark.parametrize("kind", ["Conv1d", "Conv2d", "ConvTranspose1d", "ConvTranspose2d"])
def test_a47_a_convolution_of_one_sample(method, kind):
    """Signs are made of the input by its dimensions: a sketch of it is another draw."""

    def run(x):
        model, optimizer = double(method, lambda: getattr(nn, kind)(3, 4, 3))
        take_step(model, optimizer, lambda: model(x).square().mean())
        return everything(method, model, optimizer)

    x = rows(3, 8) if "1d" in kind else rows(3, 6, 5)
    assert_same(run(x), run(x[None]), 1e-8)


PADDED = {
    "zeros": ({"padding": 1}, (1, 1, 1, 1), "constant"),
    "even-same": ({"kernel_size": 2, "padding": "same"}, (0, 1, 0, 1), "constant"),
    "circular": ({"padding": (2, 1), "padding_mode": "circular"}, (1, 1, 2, 2), "circular"),
    "reflect": ({"padding": 1, "padding_mode": "reflect", "stride": 2}, (1, 1, 1, 1), "reflect"),
    "replicate": (
        {"padding": 2, "padding_mode": "replicate", "dilation": 2},
        (2, 2, 2, 2),
        "replicate",
    ),
}


@every_method
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
@pytest.mark.parametrize("kind", PADDED)
def test_a41_a42_a44_padding_is_what_the_layer_pads(method, kind):
    options, pads, mode = PADDED[kind]
    bare = {k: v for k, v in options.items() if not k.startswith("padding")}

    def run(padded):
        size = {"kernel_size": 3, **(options if padded else bare)}
        model, optimizer = double(method, lambda: nn.Conv2d(2, 3, **size))
        inputs = x if padded else F.pad(x, pads, mode=mode)
        take_step(model, optimizer, lambda: model(inputs).square().mean())
        return parameters(model)

    x = rows(3, 2, 6, 5)
    if method in SKETCHES:  # signs are made of the input as it comes, which is padded in one
        assert all(bool(torch.isfinite(p).all()) for p in run(True).values())
        return
    assert_same(run(True), run(False), 1e-8)


def failing(*args, **kwargs):
    raise torch.linalg.LinAlgError("did not converge")


def without_root(matrix, **kwargs):
    info = torch.ones(matrix.shape[:-2], dtype=torch.int32)
    return torch.return_types.linalg_cholesky_ex((torch.full_like(matrix, torch.nan), info))


DECOMPOSE = [
    *("kfac-eigen", "kfac-inverse", "sngd", "hylo-kis", "hylo-kid", "window"),
    *("dense-window", "lowrank-sketch", "momentum-rms", "kbfgs", "kbfgs-memory", "auto"),
]
"""What computes eigenvectors or Cholesky factors; the others multiply and divide."""


@every_optimizer
def test_a68_decompositions_that_fail_keep_the_last_and_are_counted(method, monkeypatch):
    torch.manual_seed(1)
    model = mlp(4, 6, 3)
    optimizer = build(method, model, sgd(model, lr=0.02))
    data = list(torch.randn(4, 6, 4))
    train(model, optimizer, data[:2])
    with monkeypatch.context() as broken:
        broken.setattr(torch.linalg, "eigh", failing)
        broken.setattr(torch.linalg, "cholesky_ex", without_root)
        train(model, optimizer, data[2:3])
    rejected = {info.name: info.rejected for info in optimizer.layers()}
    assert all(count > 0 for count in rejected.values()) == (method in DECOMPOSE)
    assert any(rejected.values()) == (method in DECOMPOSE)
    assert ("rejected" in repr(optimizer)) == (method in DECOMPOSE)
    losses = train(model, optimizer, data[3:] * 3)
    assert losses[-1] < losses[0]
    everything = parameters(model) | factors(optimizer)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in everything.values())


@every_optimizer
def test_a68_factors_of_rank_one(method):
    """One constant row a batch: all but one eigenvalue of either side are zero."""
    torch.manual_seed(1)
    model = nn.Linear(96, 8)
    damped = {"damping": 0.9} if method.startswith(("kfac", "kbfgs", "eva")) else {}
    optimizer = build(method, model, sgd(model, lr=0.002), **damped)
    x, y = torch.ones(1, 96), torch.randn(1, 8)
    losses = [
        take_step(model, optimizer, lambda: (model(x) - y).square().mean()).loss for _ in range(12)
    ]
    assert losses[-1] < losses[0]
    (info,) = optimizer.layers()
    assert info.updates >= 10 and (info.skipped, info.resets) == (0, 0)
    everything = parameters(model) | factors(optimizer)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in everything.values())
