"""Random signs, and what a sketch of rows estimates."""

import pytest
import torch
from torch import nn

import mkor
from layer_oracles import Observed
from mkor.capture import sketch
from mkor.capture.signs import signs
from mkor.capture.sketch import OUTPUTS, sign_table, signed_sum
from mkor.methods.base import Sketch


def start(number=12345):
    return torch.tensor(number)


@pytest.mark.parametrize("salt", [0, OUTPUTS])
def test_signs_are_fair_and_uncorrelated(salt):
    """Of rows, of vectors (also of different hashes), of neighbouring starts, of both sides."""
    n, r = 2**14, 40
    table = signs(start(), 0, n, r, salt)
    assert table.shape == (r, n) and set(table.unique().tolist()) == {-1.0, 1.0}
    bound = 5 / n**0.5
    assert float(table.mean(dim=1).abs().max()) < bound
    assert float((table @ table.T / n - torch.eye(r)).abs().max()) < bound
    for shift in (1, 2, 3, 64, 1000):
        assert float((table[:, shift:] * table[:, :-shift]).mean(dim=1).abs().max()) < bound
    other = signs(start(), 0, n, r, OUTPUTS if salt == 0 else 0)
    assert float((table @ other.T / n).abs().max()) < bound
    over_vectors = signs(start(), 0, 64, r * 100, salt)
    assert float((over_vectors.T @ over_vectors / (r * 100) - torch.eye(64)).abs().max()) < 0.1


def test_signs_follow_the_number_of_a_row():
    whole = signs(start(), 0, 100, 8, 0)
    assert torch.equal(whole[:, 30:], signs(start(12375), 0, 70, 8, 0))
    assert torch.equal(whole[:, 30:], signs(start(), 30, 70, 8, 0))
    top = signs(start(2**32 - 10), 0, 20, 8, 0)  # numbers wrap around
    assert torch.equal(top[:, 10:], signs(start(0), 0, 10, 8, 0))


def test_pieces_of_rows_are_one_sum(monkeypatch):
    rows = torch.randn(1, 50, 3, dtype=torch.float64)
    whole = signed_sum(rows, start(), 4, 0)
    monkeypatch.setattr(sketch, "PIECE", 7)
    for one, other in zip(signed_sum(rows, start(), 4, 0), whole, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("rows", [1, 3, 4, 23])
def test_rows_are_dealt_to_sums_in_turn(rows):
    """And a mask that keeps all of them changes nothing."""
    x = torch.randn(2, rows, 3, dtype=torch.float64)
    own = signs(start(), 0, rows, 1, 7)[0].double() * 4**0.5
    expected = torch.zeros(2, 4, 3, dtype=torch.float64)
    for row in range(rows):
        expected[:, row % 4] += own[row] * x[:, row]
    for mask in (None, torch.ones(rows, dtype=torch.bool)):
        sums, ones = signed_sum(x, start(), 4, 7, mask)
        torch.testing.assert_close(sums, expected)
        parts = [own[row::4].sum() for row in range(4)]
        torch.testing.assert_close(ones, torch.stack(parts))
    if rows <= 4:
        torch.testing.assert_close(sums.mT @ sums / 4, x.mT @ x)  # exact


def test_dealt_rows_vary_no_more_than_rows_in_every_sum():
    """The mean square of the error over draws, of rows that have much in common."""
    x = torch.randn(96, 6, dtype=torch.float64) + 1

    def error(table):
        v = table.double() @ x
        return float((v.mT @ v / 8 - x.mT @ x).square().sum())

    places = torch.arange(96)
    tables = [
        [sign_table(start(n), places, 8, 0, few, torch.float64) for n in range(400)]
        for few in (False, True)
    ]
    dealt, spread = (sum(map(error, own)) for own in tables)
    assert dealt < 1.1 * spread


def sketches(module, inputs, grads, draws, calls=1, vectors=4):
    """The mean of VᵀV/r over draws, both sides; the calls see parts of the batch."""
    module = module.double()
    observed = Observed(module, kinds=(Sketch(vectors), Sketch(vectors)))
    totals = [0, 0]
    for seed in range(draws):
        observed.capture.arm(observed.capture.kinds, seed)
        module.zero_grad()
        for part, grad in zip(inputs.chunk(calls), grads.chunk(calls), strict=True):
            module(part).backward(grad)
        seen = observed.seen()
        for side, tensor in enumerate((seen.inputs, seen.grads)):
            totals[side] = totals[side] + tensor.mT @ tensor / vectors / draws
    return totals


LAYERS = {
    "linear": (lambda: nn.Linear(4, 3), (6, 4), (6, 3)),
    "tokens": (lambda: nn.Linear(4, 3, bias=False), (4, 3, 4), (4, 3, 3)),
    "convolution": (lambda: nn.Conv2d(2, 4, 2, groups=2), (4, 2, 3, 4), (4, 4, 2, 3)),
    "transposed": (lambda: nn.ConvTranspose1d(2, 3, 2), (4, 2, 3), (4, 3, 4)),
}


@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("layer", list(LAYERS))
def test_a_sketch_is_unbiased(layer, calls):
    """Over draws of the signs it is the sum of outer products, of several calls together too."""
    make, shape, out = LAYERS[layer]
    inputs, grads = torch.randn(shape).double() + 1, torch.randn(out).double()
    draws = 3000
    found = sketches(make(), inputs, grads, draws, calls)
    view = Observed(make().double()).view()
    a, g = view.input_rows(inputs, "expand"), view.output_rows(grads, inputs.shape, "expand")
    if view.has_bias_column:
        a = torch.cat([a, torch.ones_like(a[..., :1])], dim=-1)
    for estimate, rows in zip(found, (a, g), strict=True):
        expected = rows.mT @ rows
        size = expected.diagonal(dim1=-2, dim2=-1).sum(dim=-1)[:, None, None]
        assert float(((estimate - expected) / size).abs().max()) < 4 / draws**0.5


def step_of(seed=0, rng=0):
    """One update of a small model with sketches; the state."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5), nn.Linear(5, 2, bias=False))
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = mkor.MKOR(model, base, statistic="sketch", vectors=3, representation="lowrank")
    for _ in range(seed):
        optimizer.step()
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(rng)
    model[1].eval()
    state = torch.get_rng_state()
    model(x).square().mean().backward()
    optimizer.step()
    assert torch.equal(torch.get_rng_state(), state)
    layers = optimizer.state_dict()["preconditioner"]["layers"]
    return {f"{n}.{k}": t for n, layer in layers.items() for k, t in layer["state"].items()}


def test_numbers_differ_by_seed_and_input_but_not_by_rounding():
    tensor = torch.randn(40, 7)
    one = sketch.first_number(start(), tensor)
    assert 0 <= int(one) < 2**32
    assert torch.equal(one, sketch.first_number(start(), tensor * (1 + 1e-7)))
    others = [tensor.flip(0), tensor.mT, -tensor, 1.1 * tensor, torch.randn(40, 7)]
    numbers = [sketch.first_number(start(), other) for other in others]
    assert len({int(s) for s in [one, sketch.first_number(start(3), tensor), *numbers]}) == 7


@pytest.mark.parametrize("shape", [(5,), (0, 3), (10**5,), (3000, 2000), (300, 64, 32, 32)])
def test_numbers_are_made_of_inputs_of_any_shape(shape):
    tensor = torch.ones(()).expand(shape)
    assert 0 <= int(sketch.first_number(start(), tensor)) < 2**32


def test_signs_depend_on_the_step_and_the_numbers_alone():
    """Not on the global random state, which they leave as it is."""
    one, other, later = step_of(), step_of(rng=5), step_of(seed=1)
    assert all(torch.equal(one[key], other[key]) for key in one)
    assert not torch.equal(one["0.inputs"], later["0.inputs"])


def test_a_million_rows_are_folded_in_bounded_memory():
    """Signs of all rows at once would take 64 MB as numbers, and their hashes twice that."""
    rows = torch.ones(1, 1, 1).expand(1, 10**6, 1)
    with torch.profiler.profile(profile_memory=True) as profile:
        sums, ones = signed_sum(rows, start(), 16, 0)
    torch.testing.assert_close(sums[0, :, 0], ones)
    assert float(ones.abs().max()) < 5 * 1000
    largest = max(abs(event.cpu_memory_usage) for event in profile.events())
    assert largest < 40e6
