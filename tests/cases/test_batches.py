"""Batches of any size, layout and scale, by every method: what an update makes of them."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cases.helpers import (
    METHODS,
    assert_same,
    build,
    every_method,
    every_optimizer,
    factors,
    mlp,
    parameters,
    reasons,
    sgd,
    take_step,
    train,
    updates,
)

SKETCHES = ("lowrank-sketch", "momentum-rms")
"""Methods that sum rows with signs of their own, so that other rows are another draw."""

NO_DRAW = {"hylo-kis": {"rank": 1.0}, "hylo-kid": {"rank": 1.0}}
"""Options under which all rows count, where some are picked."""


def squares(model, x):
    return lambda: model(x).square().mean()


@every_optimizer
@pytest.mark.parametrize("state_dtype", [None, torch.bfloat16])
def test_a51_any_batch_size(method, state_dtype):
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2, bias=False))
    optimizer = build(method, model, state_dtype=state_dtype)
    for number, size in enumerate((8, 8, 3, 1, 2)):
        before = parameters(model)
        x = torch.randn(size, 2, 4, 4)
        take_step(model, optimizer, lambda x=x: model(x).square().sum())
        after = parameters(model)
        assert not any(torch.equal(after[name], before[name]) for name in after)
        assert set(updates(optimizer).values()) == {number + 1}
    assert all(
        bool(torch.isfinite(p).all()) for p in (parameters(model) | factors(optimizer)).values()
    )
    assert not any(info.skipped or info.rejected for info in optimizer.layers())


@every_method
def test_a51_no_rows_are_no_update_of_any_factor(method):
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2, bias=False))
    optimizer = build(method, model, **({"momentum": None} if method == "momentum-rms" else {}))
    take_step(model, optimizer, squares(model, torch.randn(4, 2, 4, 4)))
    before = parameters(model) | factors(optimizer)
    take_step(model, optimizer, lambda: model(torch.randn(0, 2, 4, 4)).square().sum())
    assert_same(parameters(model) | factors(optimizer), before)


def moment(rows):
    """E[aaᵀ], [1, d, d]."""
    return (rows.T @ rows / len(rows))[None]


def mean(rows):
    return rows.mean(dim=0)[None]


def outer_mean(rows):
    return (mean(rows).T @ mean(rows))[None]


def divided(total, weight):
    return lambda state: state[total] / state[weight][(...,) + (None,) * (state[total].dim() - 1)]


def of_rows(state):
    """The covariance that rows [1, k, d] of given sizes stand for, [1, d, d]."""
    rows = state["inputs"] * state["inputs_sizes"][..., None]
    return rows.mT @ rows


AVERAGES = {
    "kfac-eigen": (moment, divided("inputs", "inputs_weight")),
    "kfac-inverse": (moment, divided("inputs", "inputs_weight")),
    "eva": (mean, divided("inputs", "weight")),
    "kbfgs": (moment, divided("moment", "weight")),
    "kbfgs-memory": (moment, divided("moment", "weight")),
    # Of four inputs, four eigenvectors are the whole average.
    "window": (outer_mean, lambda state: of_rows(state) / (1 - 0.5**4)),
}
"""What a method averages of input rows, and how its state shows the average.

MKOR's dense rules have tests of their own (`test_numerics`). Sketches average random sums. SNGD and
HyLo keep the rows of one batch, and the next test is theirs."""


@pytest.mark.parametrize("method", AVERAGES)
def test_a51_every_update_weighs_the_same_whatever_its_batch(method):
    statistic, average = AVERAGES[method]
    model = nn.Linear(4, 3, bias=False).double()
    optimizer = build(method, model, factor_decay=0.5)
    expected, mass = 0, 0
    for size in (8, 8, 3, 1):
        x = torch.randn(size, 4, dtype=torch.float64) + 1
        take_step(model, optimizer, squares(model, x))
        expected, mass = 0.5 * expected + 0.5 * statistic(x), 0.5 * mass + 0.5
    state = {key.removeprefix("Linear."): value for key, value in factors(optimizer).items()}
    torch.testing.assert_close(average(state), expected / mass)


@pytest.mark.parametrize("method", ["sngd", "hylo-kis", "hylo-kid"])
def test_a51_an_update_replaces_the_rows_of_the_last_batch(method):
    """However many they were: a model that saw the last batch alone has the same factors."""
    model = mlp(4, 6, 3)
    optimizer = build(method, model, **NO_DRAW.get(method, {}))
    train(model, optimizer, [torch.randn(size, 4) for size in (8, 3)])
    twin = copy.deepcopy(model)
    other = build(method, twin, **NO_DRAW.get(method, {}))
    last = torch.randn(5, 4)
    for trained, own in ((model, optimizer), (twin, other)):
        train(trained, own, [last])
    assert_same(factors(optimizer), factors(other))
    assert_same(parameters(model), parameters(twin))


class LargestOutput(TorchDispatchMode):
    """Remembers the largest number of elements that an operation returned."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        self.numel = max([self.numel, *sizes])
        return out


DENSE = [
    *("exact", "exact-3", "paper", "reference", "reference-3"),
    *("kfac-eigen", "kfac-inverse", "kbfgs"),
]
"""Methods whose factors of outputs are matrices, so that `max_dim` bounds them."""

WIDE = 20_000


@every_optimizer
def test_a53_a_very_wide_layer(method):
    """A factor of its outputs would take 1.6 GB; nothing of more than some rows is ever made."""
    model = nn.Linear(16, WIDE, bias=False)
    small = {"rank": 6, "vectors": 4} if method == "auto" else {}
    optimizer = build(method, model, **small)
    before = parameters(model)
    x = torch.randn(4, 16) + 1
    with LargestOutput() as largest:
        take_step(model, optimizer, squares(model, x))
    assert largest.numel <= model.weight.numel()
    (info,) = optimizer.layers()
    assert info.preconditioned and info.updates == 1
    assert info.bytes <= 4 * 16 * WIDE
    if method in DENSE:
        assert info.reason == "outputs side without factor: wider than max_dim=8192"
        assert info.bytes < 2**16
    else:
        pairs = method == "kbfgs-memory"  # its other side is a matrix, and narrow
        assert info.reason is None or pairs
    after = parameters(model)
    assert torch.isfinite(after["weight"]).all()
    assert not torch.equal(after["weight"], before["weight"])


@pytest.mark.parametrize("method", [m for m in DENSE if m != "kbfgs-memory"])
def test_a53_a_layer_wide_on_both_sides_is_left_to_the_base(method):
    model = mlp(6, 7, 2)
    optimizer = build(method, model, max_dim=2)
    assert reasons(optimizer) == {"0": "both sides are wider than max_dim=2"}
    before = parameters(model)
    taken = take_step(model, optimizer, squares(model, torch.randn(4, 6)))
    after = parameters(model)
    for name in ("0.weight", "0.bias"):
        torch.testing.assert_close(after[name], before[name] - 0.1 * taken.grads[name])
    assert not torch.allclose(after["2.weight"], before["2.weight"] - 0.1 * taken.grads["2.weight"])


@every_optimizer
def test_a54_channels_last(method):
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Conv2d(4, 6, 3, padding=1), nn.Tanh(), nn.Conv2d(6, 4, 3)).double()
    last = copy.deepcopy(plain).to(memory_format=torch.channels_last)
    runs = [(model, build(method, model)) for model in (plain, last)]
    kept = []

    def backward(loss):
        loss.backward()
        kept[:] = [p.grad.stride() for p in last.parameters() if p.grad is not None]

    for x in torch.randn(3, 3, 4, 6, 6, dtype=torch.float64):
        for model, optimizer in runs:
            take_step(model, optimizer, squares(model, x), backward)
    assert last[0].weight.grad.is_contiguous(memory_format=torch.channels_last)
    assert [p.grad.stride() for p in last.parameters()] == kept
    assert_same(parameters(last), parameters(plain), 1e-8)


@every_optimizer
def test_a54_a_transposed_gradient_keeps_its_strides(method):
    torch.manual_seed(1)
    model = nn.Linear(4, 3).double()
    twin = copy.deepcopy(model)
    optimizer, other = build(method, model), build(method, twin)
    given = []

    def transposed(loss):
        loss.backward()
        model.weight.grad = model.weight.grad.t().contiguous().t()
        given.append(model.weight.grad)

    x = torch.randn(6, 4, dtype=torch.float64) + 1
    take_step(model, optimizer, squares(model, x), transposed)
    take_step(twin, other, squares(twin, x))
    assert model.weight.grad.stride() == (1, 3)
    assert any(model.weight.grad is grad for grad in given)
    assert_same(parameters(model), parameters(twin), 1e-12)


@every_method
def test_a55_sparse_embedding_gradients_pass_untouched(method):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2))
    alone = copy.deepcopy(model)
    optimizer, base = build(method, model), sgd(alone)
    tokens = torch.tensor([1, 3, 3, 7])
    for m, own in ((model, optimizer), (alone, base)):
        take_step(m, own, squares(m, tokens))
    assert model[0].weight.grad.is_sparse
    assert torch.equal(model[0].weight, alone[0].weight)
    assert not torch.equal(model[1].weight, alone[1].weight)
    assert updates(optimizer) == {"1": 1}
    assert reasons(optimizer) == {"0": "no rule for Embedding"}


def test_a55_auto_refuses_a_sparse_embedding():
    """AdamW, which would train it, takes no sparse gradients."""
    model = nn.Sequential(nn.EmbeddingBag(10, 4, sparse=True), nn.Linear(4, 2))
    with pytest.raises(ValueError, match=r"'0'.*sparse=True.*sparse=False"):
        build("auto", model)
    model[0].requires_grad_(False)  # it gets no gradient then
    assert updates(build("auto", model)) == {"1": 0}


def test_a55_auto_refuses_a_sparse_gradient_before_anything_changes():
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 2))
    optimizer = build("auto", model)
    model[0].sparse = True  # later than anyone looks
    before = parameters(model)
    with pytest.raises(RuntimeError, match=r"shape \(10, 4\) is sparse; mkor.auto takes"):
        take_step(model, optimizer, squares(model, torch.tensor([1, 3])))
    assert_same(parameters(model), before)
    assert updates(optimizer) == {"1": 0}


RELATIVE = [
    *("exact", "exact-3", "paper", "reference", "reference-3"),
    *("window", "dense-window", "lowrank-sketch"),
]
"""Methods whose damping is relative, so that the scale of a loss doesn't matter to them."""

ABSOLUTE = ["kfac-eigen", "kfac-inverse", "eva", "sngd", "hylo-kis", "hylo-kid"]
"""Methods whose damping λ is absolute: with c times the loss, c²·λ is the same damping.

K-BFGS has one λ for the inputs, which know of no loss, and for pairs of gradients, so that no λ
makes up for c (docs/methods/kbfgs.md)."""


def after_loss(method, factor, lr, **options):
    torch.manual_seed(1)
    model = mlp(5, 4, 3).double()
    optimizer = build(method, model, sgd(model, lr=lr), kl_clip=None, **options)
    source = torch.Generator().manual_seed(2)
    for _ in range(3):
        x = torch.randn(6, 5, generator=source, dtype=torch.float64)
        take_step(model, optimizer, lambda x=x: model(x).square().mean() * factor)
    return parameters(model)


SCALE = 18.0
"""From the mean over 6 samples of 3 outputs to the sum."""


@pytest.mark.parametrize("method", RELATIVE)
def test_a56_the_reduction_of_the_loss_is_a_learning_rate(method):
    assert_same(after_loss(method, SCALE, 0.1 / SCALE), after_loss(method, 1.0, 0.1), 1e-9)


@pytest.mark.parametrize("method", ABSOLUTE)
def test_a56_the_reduction_of_the_loss_is_a_damping_and_a_learning_rate(method):
    def run(factor, damping):
        return after_loss(method, factor, 0.01 * factor, damping=damping, rescale=None)

    mean_loss = run(1.0, 0.1)
    assert_same(run(SCALE, 0.1 * SCALE**2), mean_loss, 1e-9)
    other = run(SCALE, 0.1)
    assert not all(torch.allclose(other[name], mean_loss[name], rtol=1e-3) for name in other)


def test_a56_a_step_of_unit_size_is_blind_to_the_loss():
    """MKOR on the momentum with the root mean square of 1."""
    assert_same(after_loss("momentum-rms", SCALE, 0.1), after_loss("momentum-rms", 1.0, 0.1), 1e-9)


@pytest.mark.parametrize("method", [name for name in METHODS if name not in SKETCHES])
def test_a56_a_batch_repeated_is_the_same_batch(method):
    """For what draws signs or rows it is another draw of the same distribution."""

    def run(times):
        torch.manual_seed(1)
        model = mlp(5, 4, 3).double()
        optimizer = build(method, model, sgd(model, lr=0.02), **NO_DRAW.get(method, {}))
        source = torch.Generator().manual_seed(2)
        for _ in range(3):
            x = torch.randn(6, 5, generator=source, dtype=torch.float64)
            train(model, optimizer, [x.repeat_interleave(times, 0)])
        return parameters(model)

    assert_same(run(2), run(1), 1e-8)


@every_optimizer
def test_a57_masked_tokens_count_unless_a_mask_is_set(method):
    """A layer sees the rows that it multiplies; `set_mask` tells which of them are padding."""
    x = torch.randn(3, 2, 6, 4, dtype=torch.float64)
    target = torch.randint(0, 3, (2, 6))
    target[:, 3:] = -100
    keep = target != -100

    def run(packed, mask=None):
        torch.manual_seed(1)
        model = nn.Linear(4, 3).double()
        optimizer = build(method, model, **NO_DRAW.get(method, {}))
        for tokens in x:

            def loss(tokens=tokens):
                if mask is not None:
                    optimizer.set_mask(mask)
                if packed:
                    return F.cross_entropy(model(tokens[:, :3]).flatten(0, 1), target[keep])
                return F.cross_entropy(model(tokens).flatten(0, 1), target.flatten())

            take_step(model, optimizer, loss)
        assert updates(optimizer) == {"Linear": 3}
        return parameters(model)

    alone = run(packed=True)
    assert_same(run(packed=False, mask=keep), alone, 1e-8)
    blind = run(packed=False)
    assert not all(torch.allclose(blind[key], alone[key], rtol=1e-4) for key in alone)
