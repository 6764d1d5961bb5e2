"""What users do around a step, by every method: mixed precision, accumulation, clipping, copies."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from cases.helpers import (
    KEEPS_NORM,
    LR,
    METHODS,
    assert_same,
    build,
    every_method,
    factors,
    mlp,
    nothing_seen,
    parameters,
    sgd,
    take_step,
    train,
    updates,
)

# K-BFGS evaluates a batch again in `step(closure)`, which GradScaler doesn't take.
scaled_methods = pytest.mark.parametrize(
    "method", [name for name in METHODS if not name.startswith("kbfgs")]
)
# Blocks, draws and signs belong to a call: micro-batches give others than one batch.
of_all_rows = pytest.mark.parametrize(
    "method", [n for n in METHODS if n[-2:] != "-3" and n[:4] not in {"lowr", "hylo", "mome"}]
)
# With momentum the update has the norm of the momentum.
of_the_gradient = pytest.mark.parametrize(
    "method", [n for n in METHODS if not n.startswith(("kbfgs", "momentum"))]
)


def state_of(optimizer):
    """Everything that a checkpoint holds but what is pending, in order."""
    state = copy.deepcopy(optimizer.state_dict())
    state["preconditioner"].pop("pending")
    return state


def assert_equal(left, right):
    if isinstance(left, torch.Tensor):
        assert torch.equal(left, right)
    elif isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_equal(left[key], right[key])
    elif isinstance(left, (list, tuple)):
        for one, other in zip(left, right, strict=True):
            assert_equal(one, other)
    else:
        assert left == right


@scaled_methods
@pytest.mark.parametrize("unscale", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a60_the_official_recipe(method, dtype, unscale):
    """A step that the scaler skips leaves every trace as it was; the next update is the batch's."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3, bias=False))
    optimizer = build(method, model, sgd(model, lr=0.05, momentum=0.9), **KEEPS_NORM)
    twin = copy.deepcopy(model)
    other = build(method, twin, sgd(twin, lr=0.05, momentum=0.9), **KEEPS_NORM)
    schedule, slower = (
        torch.optim.lr_scheduler.ExponentialLR(one, 0.9) for one in (optimizer, other)
    )
    scaler = torch.amp.GradScaler("cpu", 2.0**10, growth_interval=3)
    source = torch.Generator().manual_seed(2)
    for number in range(7):
        x = torch.randn(6, 4, generator=source)
        with torch.autocast("cpu", dtype):
            loss = model(x).square().mean() * (float("inf") if number == 2 else 1)
        before = parameters(model), state_of(optimizer), optimizer.layers(), scaler.get_scale()
        scaler.scale(loss).backward()
        if unscale:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if number == 2:
            assert_same(parameters(model), before[0])
            assert_equal(state_of(optimizer), before[1])
            assert optimizer.layers() == before[2]
            assert scaler.get_scale() == before[3] / 2
            assert nothing_seen(optimizer)
            continue
        schedule.step()
        with torch.autocast("cpu", dtype):
            loss = twin(x).square().mean()
        loss.backward()
        if unscale:
            nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        other.step()
        other.zero_grad()
        slower.step()
    assert scaler.get_scale() == 2.0**10  # halved once, doubled once
    assert updates(optimizer) == updates(other)
    for one, there in zip(parameters(model).values(), parameters(twin).values(), strict=True):
        torch.testing.assert_close(one, there, rtol=2e-2, atol=2e-3)


@scaled_methods
@pytest.mark.parametrize("scalers", [1, 2])
def test_a60_two_losses_two_optimizers_and_one_or_two_scalers(method, scalers):
    """The second optimizer's step is skipped once; the first one's is not."""

    def run(scaled):
        torch.manual_seed(1)
        nets = [mlp(4, 6, 2), mlp(4, 5, 2)]
        optimizers = [build(method, net, sgd(net, lr=0.02)) for net in nets]
        scales = [torch.amp.GradScaler("cpu", 2.0**8, enabled=scaled) for _ in range(scalers)]
        source = torch.Generator().manual_seed(2)
        for number in range(5):
            x = torch.randn(6, 4, generator=source)
            losses = [net(x).square().mean() for net in nets]
            skip = number == 1
            if skip and scaled:
                losses[1] = losses[1] * float("inf")
            for k, loss in enumerate(losses):
                scales[k % scalers].scale(loss).backward()
            for k, optimizer in enumerate(optimizers):
                if scaled or not (skip and k == 1):
                    scales[k % scalers].step(optimizer)
                optimizer.zero_grad()
            for scaler in scales:
                scaler.update()
        return {f"{k}.{n}": p for k, net in enumerate(nets) for n, p in parameters(net).items()}

    found, expected = run(scaled=True), run(scaled=False)
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-3, atol=1e-5)


@every_method
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("state_dtype", [None, torch.bfloat16])
def test_a58_pure_half_parameters(method, dtype, state_dtype):
    torch.manual_seed(1)
    model = mlp(4, 8, 2).to(dtype)
    optimizer = build(method, model, sgd(model, lr=0.05), state_dtype=state_dtype)
    x = torch.randn(8, 4, dtype=dtype) + 0.5
    losses = train(model, optimizer, [x] * 10)
    assert losses[-1] < losses[0]
    assert {p.dtype for p in model.parameters()} == {dtype}
    kept = {t.dtype for t in factors(optimizer).values() if t.is_floating_point()}
    assert (state_dtype or torch.float32) in kept
    assert all(bool(torch.isfinite(t).all()) for t in factors(optimizer).values())


@of_all_rows
@pytest.mark.parametrize("cuts", [(5, 3, 4), (1, 11)])
@pytest.mark.parametrize("bias", [True, False])
def test_a70_micro_batches_of_unequal_size_are_one_batch(method, cuts, bias):
    def run(sizes):
        torch.manual_seed(1)
        model = mlp(4, 6, 2, bias=bias).double()
        optimizer = build(method, model, sgd(model, lr=0.02))
        for x in torch.randn(3, 12, 4, dtype=torch.float64):

            def loss(x=x):
                for part in x.split(sizes)[:-1]:
                    (model(part).square().mean() * len(part) / 12).backward()
                last = x.split(sizes)[-1]
                return model(last).square().mean() * len(last) / 12

            take_step(model, optimizer, loss)
        assert set(updates(optimizer).values()) == {3}
        return parameters(model)

    assert_same(run(cuts), run((12,)), 1e-8)


@every_method
@pytest.mark.parametrize("set_to_none", [True, False])
def test_a70_gradients_may_be_cleared_either_way(method, set_to_none):
    torch.manual_seed(1)
    model = mlp(4, 6, 2)
    optimizer = build(method, model)
    source = torch.Generator().manual_seed(2)
    for _ in range(4):
        x = torch.randn(6, 4, generator=source)
        take_step(model, optimizer, lambda x=x: model(x).square().mean(), set_to_none=set_to_none)
    torch.manual_seed(1)
    twin = mlp(4, 6, 2)
    other = build(method, twin)
    source = torch.Generator().manual_seed(2)
    train(twin, other, [torch.randn(6, 4, generator=source) for _ in range(4)])
    assert_same(parameters(model) | factors(optimizer), parameters(twin) | factors(other))


def clip_norm(model):
    return nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def clip_value(model):
    return nn.utils.clip_grad_value_(model.parameters(), 0.002)


@of_the_gradient
@pytest.mark.parametrize("clip", [clip_norm, clip_value])
def test_a69_what_is_clipped_before_the_step_is_what_the_base_gets(method, clip):
    """Clip, precondition, rescale: the update of a layer has the norm of its clipped gradient."""
    torch.manual_seed(1)
    model = mlp(4, 6, 2, bias=False)
    optimizer = build(method, model, **KEEPS_NORM)
    for _ in range(4):
        (100 * model(torch.randn(6, 4)).square().mean()).backward()
        clip(model)
        norms = [p.grad.norm() for p in model.parameters()]
        assert max(p.grad.abs().max() for p in model.parameters()) <= 0.01
        before = parameters(model)
        optimizer.step()
        optimizer.zero_grad()
        for (name, p), norm in zip(model.named_parameters(), norms, strict=True):
            torch.testing.assert_close((before[name] - p).norm(), LR * norm, rtol=1e-4, atol=1e-6)


class Recomputed(nn.Module):
    def __init__(self, mode):
        super().__init__()
        self.first, self.block = nn.Linear(4, 6), mlp(6, 6, 6)
        self.head, self.mode = nn.Linear(6, 2), mode

    def forward(self, x):
        h = self.first(x)
        if self.mode is not None:
            return self.head(checkpoint(self.block, h, use_reentrant=self.mode))
        return self.head(self.block(h))


@every_method
@pytest.mark.parametrize("reentrant", [True, False])
def test_a13_activation_checkpointing_by_every_method(method, reentrant):
    def run(mode):
        torch.manual_seed(1)
        model = Recomputed(mode)
        optimizer = build(method, model)
        train(model, optimizer, torch.randn(3, 6, 4))
        assert set(updates(optimizer).values()) == {3}
        return parameters(model) | factors(optimizer)

    assert_same(run(reentrant), run(None), 1e-6)


@every_method
@pytest.mark.parametrize("frozen", [True, False])
def test_a83_two_optimizers_on_one_graph(method, frozen):
    """The generator's step leaves no trace in the discriminator, by every method."""

    def run(generator_steps):
        torch.manual_seed(1)
        G, D = mlp(2, 4, 3), mlp(3, 4, 1)
        generator, critic = build(method, G, sgd(G, lr=0.0)), build(method, D, sgd(D, lr=0.01))
        source = torch.Generator().manual_seed(2)
        for _ in range(3):
            noise = torch.randn(6, 2, generator=source)
            real = torch.randn(6, 3, generator=source) + 1
            fake = G(noise).detach()
            take_step(D, critic, lambda f=fake, r=real: D(f).mean() + (1 - D(r)).square().mean())
            if generator_steps:
                D.requires_grad_(not frozen)
                take_step(G, generator, lambda z=noise: (1 - D(G(z))).square().mean())
                D.requires_grad_(True)
        assert not generator_steps or set(updates(generator).values()) == {3}
        return parameters(D) | factors(critic)

    assert_same(run(True), run(False))


@every_method
@pytest.mark.parametrize("kind", ["ema", "swa"])
def test_averaged_copies_change_nothing_and_show_nothing(method, kind):
    def run(averages):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2))
        optimizer = build(method, model)
        ema = get_ema_multi_avg_fn(0.5) if kind == "ema" else None
        average = AveragedModel(model, multi_avg_fn=ema) if averages else None
        by_hand = None
        for number, x in enumerate(torch.randn(4, 6, 4)):
            train(model, optimizer, [x])
            if average is None:
                continue
            average.update_parameters(model)
            average(x).sum().backward()  # in train mode, with gradients of its own
            now = parameters(model)
            weight = 0.5 if kind == "ema" else 1 / (number + 1)
            old = by_hand or now
            by_hand = {k: old[k] + (now[k] - old[k]) * weight for k in now}
            assert nothing_seen(optimizer)
        if average is not None:
            assert_same(parameters(average.module), by_hand, 1e-6)
            torch.optim.swa_utils.update_bn(torch.randn(3, 6, 4), average)
            # torch's function of the moving average is local, which no pickle takes.
            copied = kind == "ema"
            again = copy.deepcopy(average) if copied else pickle.loads(pickle.dumps(average))
            x = torch.randn(2, 4)
            assert torch.equal(again.eval()(x), average.eval()(x))
        return parameters(model) | factors(optimizer)

    assert_same(run(True), run(False))


@every_method
def test_a91_heads_of_a_token_and_of_a_sample(method):
    torch.manual_seed(1)
    model = nn.ModuleDict({"trunk": mlp(5, 4, 4), "token": mlp(4, 3), "cls": mlp(4, 2)})
    optimizer = build(method, model, sgd(model, lr=0.05), factor_update_steps=1, **KEEPS_NORM)
    tokens, labels = torch.randint(0, 3, (6, 7)), torch.randint(0, 2, (6,))
    x = F.one_hot(tokens + labels[:, None], 5).float()

    def loss():
        hidden = model["trunk"](x)
        token = F.cross_entropy(model["token"](hidden).flatten(0, 1), tokens.flatten())
        return token + F.cross_entropy(model["cls"](hidden.mean(dim=1)), labels, reduction="sum")

    losses = [take_step(model, optimizer, loss).loss for _ in range(12)]
    assert method == "paper" or losses[-1] < losses[0]
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())
    assert set(updates(optimizer).values()) == {12}


def train_pickled(data):
    """In a fresh process: a pickled pair trains on; its state in the end, pickled."""
    torch.set_num_threads(1)
    ends = []
    for model, optimizer in pickle.loads(data):
        torch.manual_seed(7)
        train(model, optimizer, torch.randn(2, 6, 4))
        ends.append(parameters(model) | factors(optimizer))
    return pickle.dumps(ends)


@pytest.mark.slow
def test_a24_pickled_pairs_train_on_in_a_spawned_process():
    pairs = []
    for method in METHODS:
        torch.manual_seed(1)
        model = mlp(4, 6, 2)
        optimizer = build(method, model, sgd(model, momentum=0.9))
        train(model, optimizer, torch.randn(2, 6, 4))
        pairs.append((model, optimizer))
    data = pickle.dumps(pairs)
    with torch.multiprocessing.get_context("spawn").Pool(1) as pool:
        there = pickle.loads(pool.apply(train_pickled, (data,)))
    for found, expected in zip(there, pickle.loads(train_pickled(data)), strict=True):
        assert_same(found, expected)


@pytest.mark.parametrize("method", ["exact", "kfac-eigen", "kfac-inverse", "kbfgs", "kbfgs-memory"])
@pytest.mark.parametrize("bias", [True, False])
def test_a70_micro_batches_of_a_layer_with_a_wide_side(method, bias):
    """What has no factor shows no matrix, and adds up as well."""

    def run(sizes):
        torch.manual_seed(1)
        model = nn.Linear(4, 6, bias=bias).double()
        optimizer = build(method, model, sgd(model, lr=0.02), max_dim=5)

        def loss():
            *first, last = x.split(sizes)
            for part in first:
                (model(part).square().mean() * len(part) / 12).backward()
            return model(last).square().mean() * len(last) / 12

        take_step(model, optimizer, loss)
        return parameters(model) | factors(optimizer)

    x = torch.randn(12, 4, dtype=torch.float64)
    assert_same(run((4, 3, 5)), run((12,)), 1e-8)
