"""K-BFGS: a batch far beyond the usual is bounded, and one that strays makes no pair."""

import pytest
import torch
from torch import nn

import mkor
from method_driver import finish, happened, init
from mkor.factors import bfgs, covariance
from quadratic_layer import (
    F64,
    LEVEL,
    SHAPE,
    Batch,
    copies,
    damped_moment,
    method,
    run_first,
    run_revisit,
    seen_of,
    trained,
    weights,
)
from workers import together


def mean_eigenvalue(matrix):
    return matrix.diagonal(dim1=-2, dim2=-1).mean(dim=-1)


@pytest.mark.parametrize("scale", [1e2, 1e6, 1e12])
def test_a_huge_batch_doubles_the_damped_moment_at_most(scale):
    state, batch = trained(), Batch()
    batch.inputs[1] *= scale
    before = damped_moment(state)
    state = run_first(method(starting=False), state, batch.seen(weights()))
    after = damped_moment(state)
    decay, level = 0.9, LEVEL * torch.eye(4, dtype=F64)
    moment = batch.inputs.mT @ batch.inputs / 12
    mass = state["weight"][0]
    old_mass = (mass - (1 - decay)) / decay
    usual = (decay * old_mass * (before[0] - level) + (1 - decay) * moment[0]) / mass
    torch.testing.assert_close(after[0] - level, usual)
    bound = mean_eigenvalue(before[1]) / (1 - decay) / mean_eigenvalue(moment[1])
    held = (decay * old_mass * (before[1] - level) + (1 - decay) * bound * moment[1]) / mass
    torch.testing.assert_close(after[1] - level, held)
    assert happened(state)["bounded"] == 1


def test_nothing_bounds_the_first_batch_or_one_after_zeros():
    batch = Batch()
    batch.inputs *= 1e6
    state = run_first(method(), init(method(), SHAPE, F64), batch.seen(weights()))
    assert "bounded" not in happened(state)
    zeros, mass = torch.zeros(1, 4, 4, dtype=F64), torch.full((1,), 0.5, dtype=F64)
    moment = torch.eye(4, dtype=F64)[None]
    gain, bounded = covariance.bounded(zeros, mass, moment, torch.ones(1, dtype=F64), 0.9, LEVEL)
    assert gain.item() == 1 and not bounded.item()  # the damping leaves room
    gain, bounded = covariance.bounded(zeros, mass, 9 * moment, torch.ones(1, dtype=F64), 0.9, 0.3)
    assert gain.item() == pytest.approx(3 / 9) and bounded.item()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_not_made_finite_by_a_bound(bad):
    moment = torch.eye(4, dtype=F64)[None].clone()
    moment[0, 1, 1] = bad
    eye, mass = torch.eye(4, dtype=F64)[None], torch.ones(1, dtype=F64)
    gain, _ = covariance.bounded(eye, mass, moment, mass, 0.9, LEVEL)
    assert not torch.isfinite(gain * moment.diagonal(dim1=-2, dim2=-1)).all()


def test_a_pair_is_bounded_by_its_averages_as_a_whole():
    averages = (torch.tensor([[3.0, 4.0], [0.0, 0.0]]), torch.tensor([[1.0, 0.0], [1.0, 0.0]]))
    pair = (torch.tensor([[30.0, 40.0], [9e9, 0.0]]), torch.tensor([[0.0, 1e4], [0.0, 50.0]]))
    number, bounded = bfgs.bounded(averages, pair, 100.0)
    assert number.flatten().tolist() == pytest.approx([1e-2, 1.0])
    assert bounded.tolist() == [True, False]
    number, bounded = bfgs.bounded(averages, (pair[0] * 0, pair[1] * 0), 100.0)
    assert number.flatten().tolist() == [1.0, 1.0] and not bounded.any()


@pytest.mark.parametrize("memory", [None, 5])
def test_a_huge_pair_is_forgotten_like_ten_others(memory):
    now = method(memory=memory)
    state, batch, weight = trained(memory=memory), Batch(), weights()
    state = run_first(now, state, batch.seen(weight))
    before = copies(state)
    grads = 1e9 * batch.grads(weight + 0.1)
    state = run_revisit(now, state, seen_of(batch.inputs, grads, weight + 0.1))
    assert happened(state)["bounded"] == 2
    moved = state["y"] - 0.9 * before["y"]
    ratio = moved.norm(dim=-1) / before["y"].norm(dim=-1)
    torch.testing.assert_close(ratio, torch.full((2,), 10.0, dtype=F64))
    for _ in range(30):  # 10·0.9³⁰ is below a half
        weight = weight + 0.1 * weights()
        state = run_first(now, state, batch.seen(weight))
        state = run_revisit(now, state, batch.seen(weight + 0.01 * weights()))
    assert state["y"].norm(dim=-1).max() < 1


class Blobs:
    """A small classifier on four blobs of points."""

    def __init__(self, **options):
        torch.manual_seed(0)
        self.centers = 1.5 * torch.randn(4, 20)
        self.model = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 4))
        base = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.optimizer = mkor.KBFGS(self.model, base, **options)

    def batch(self, scale=1.0):
        labels = torch.randint(4, (32,))
        return scale * (self.centers[labels] + torch.randn(32, 20)), labels

    def step(self, draw):
        def closure():
            self.optimizer.zero_grad()
            inputs, labels = draw()
            loss = nn.functional.cross_entropy(self.model(inputs), labels)
            loss.backward()
            return loss

        return self.optimizer.step(closure).item()

    def steps(self, count):
        losses = []
        for _ in range(count):
            batch = self.batch()
            losses.append(self.step(lambda batch=batch: batch))
        return sum(losses[-10:]) / 10

    def events(self, name):
        return {layer.name: getattr(layer, name) for layer in self.optimizer.layers()}


@pytest.mark.parametrize("at", [2, 30])
@pytest.mark.parametrize("memory", [None, 5])
def test_training_recovers_from_a_batch_a_million_times_as_large(memory, at):
    losses = []
    for scale in (1.0, 1e6):
        run = Blobs(memory=memory)
        run.steps(at)
        huge = run.batch(scale)
        run.step(lambda huge=huge: huge)
        assert run.events("bounded")["0"] >= (1 if scale > 1 else 0)
        losses.append(run.steps(40))
    assert losses[0] < 0.1
    assert losses[1] < losses[0] + 0.05
    assert sum(run.events("bounded").values()) < 20
    assert " bounded" in repr(run.optimizer)


def test_a_closure_that_draws_another_batch_makes_no_pair_and_is_happened():
    run = Blobs()
    start = 12
    for _ in range(start):
        run.step(drawn(run))
    assert run.events("mismatched") == {"0": start, "2": start}
    for record in run.optimizer.state_dict()["preconditioner"]["layers"].values():
        outputs = record["state"]["outputs"][0]
        assert torch.equal(outputs, torch.eye(len(outputs)))
        assert not record["state"]["s"].any()
    assert "12 mismatched" in repr(run.optimizer)
    run.steps(3)
    assert run.events("mismatched") == {"0": start, "2": start}


def drawn(run):
    """Batches from a generator of its own, as a loader's; a replay doesn't rewind it."""
    source = torch.Generator().manual_seed(torch.randint(1 << 30, ()).item())

    def draw():
        inputs, labels = run.batch()
        return inputs + torch.randn(inputs.shape, generator=source), labels

    return draw


def test_a_batch_of_another_size_is_noticed_behind_an_embedding():
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 2))
    optimizer = mkor.KBFGS(model, torch.optim.SGD(model.parameters(), lr=0.1))
    sizes = iter([5, 6, 5, 5])

    def closure():
        optimizer.zero_grad()
        loss = model(torch.randint(7, (next(sizes),))).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    optimizer.step(closure)  # of one size, and the same: random numbers are replayed
    assert {layer.mismatched for layer in optimizer.layers() if layer.preconditioned} == {1}


def test_one_worker_that_strays_speaks_for_all():
    now, batch, weight = method(), Batch(count=12), weights()
    two, later = [init(now, SHAPE, F64) for _ in range(2)], weight + 0.1
    for run, at in (("update", weight), ("revisit", later)):
        parts = []
        for number, half in enumerate((slice(0, 6), slice(6, 12))):
            same = torch.tensor(number == 0) if run == "revisit" else None
            grads = 2 * batch.grads(at)[:, half]
            parts.append(seen_of(batch.inputs[:, half], grads, at, same=same))
        pairs = zip(two, parts, strict=True)
        two = together([getattr(now, run)(state, part) for state, part in pairs])
    for state in two:
        assert happened(state) == {"mismatched": 2}
        assert not state["s"].any() and not state["pending"].any()


def test_the_same_batch_counts_for_nothing():
    now, batch, weight = method(), Batch(), weights()
    states = []
    for same in (None, torch.tensor(True)):
        state = run_first(now, init(now, SHAPE, F64), batch.seen(weight))
        generator = now.revisit(state, batch.seen(weight + 0.1, same=same))
        states.append(finish(generator, next(generator)))
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
