"""What the studies of covariances compute, against plain float64 formulas."""

import numpy as np
import pytest
import torch
from torch import nn

from mkor_bench.studies import rank, spectrum
from mkor_bench.studies.rows import Watch

D = 12


def rows(n=40, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, D, generator=generator, dtype=torch.float64) + 0.5


@pytest.mark.parametrize("count", [1, 3])
def test_the_best_rank_is_that_of_the_singular_values(count):
    matrix = (rows().mT @ rows()).numpy()
    left, values, right = np.linalg.svd(matrix)
    expected = left[:, :count] * values[:count] @ right[:count]
    assert np.allclose(rank.best(torch.from_numpy(matrix), count), expected)
    # Eckart and Young: the error is that of the singular values left out.
    left_out = np.sqrt((values[count:] ** 2).sum() / (values**2).sum())
    found = rank.error(torch.from_numpy(matrix), torch.from_numpy(expected))
    assert found == pytest.approx(left_out)


def test_a_sketch_has_the_covariance_as_its_expectation():
    signs = torch.Generator().manual_seed(0)
    found = [rank.sketch(rows(), 16, signs) for _ in range(4000)]
    mean = sum(v.mT @ v / 16 for v in found) / len(found)
    assert rank.error(rank.covariance(rows()), mean) < 0.02
    assert rank.error(rank.covariance(rows()), found[0].mT @ found[0] / 16) > 0.05


def test_the_errors_of_a_side_are_those_of_the_formulas():
    side = rank.Side(D, seed=3)
    signs = torch.Generator().manual_seed(3)
    average, sketched = torch.zeros(D, D).double(), torch.zeros(D, D).double()
    for step in range(5):
        batch = rows(seed=step)
        side.take(batch)
        true = torch.einsum("ni,nj->ij", batch, batch) / 40
        vectors = rank.sketch(batch, rank.VECTORS, signs)
        average = 0.95 * average + 0.05 * true
        sketched = 0.95 * sketched + 0.05 * vectors.mT @ vectors / rank.VECTORS
    mean = batch.mean(dim=0)
    size = true.norm()
    found = side.errors()
    assert found["mean"] == pytest.approx(float((true - mean[:, None] * mean).norm() / size))
    assert found["best rank k"] == pytest.approx(0, abs=1e-12)  # k is above D
    # As many rows as the side is wide keep the whole average of the sketches.
    whole = float((average - sketched).norm() / average.norm())
    assert found["low rank"] == pytest.approx(whole)
    assert found["window"] == pytest.approx(whole)


def test_a_window_stands_for_the_average_of_what_it_holds():
    width, updates = rank.WINDOW + 5, 25
    side = rank.Side(width, seed=1)
    signs = torch.Generator().manual_seed(1)
    held, weights = torch.zeros(width, width).double(), 0.0
    for step in range(updates):
        batch = torch.randn(40, width, generator=torch.Generator().manual_seed(step)).double()
        side.take(batch)
        vectors = rank.sketch(batch, rank.VECTORS, signs)
        age = updates - 1 - step
        if age < rank.WINDOW // rank.VECTORS:
            held += 0.95**age * vectors.mT @ vectors / rank.VECTORS
            weights += 0.95**age
    expected = held / weights * (1 - 0.95**updates)
    assert torch.allclose(rank.stands_for(side._parts["window"], updates), expected)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [(nn.Linear(6, 4), (5, 3, 6)), (nn.Conv2d(3, 4, 3, stride=2, padding=1), (5, 3, 8, 8))],
)
def test_rows_make_the_gradient_of_the_weight(layer, shape):
    model = nn.Sequential(layer, nn.Tanh())
    watch = Watch(model)
    model(torch.randn(shape)).square().sum().backward()
    ((inputs, gradients),) = watch.take().values()
    assert torch.allclose(gradients.mT @ inputs, layer.weight.grad.flatten(1).double(), atol=1e-4)
    assert watch.take() == {}


def test_methods_in_float64_are_the_dense_formulas():
    layer = spectrum.Layer(D)
    average, mass, sketched = torch.zeros(D, D).double(), 0.0, torch.zeros(D, D).double()
    signs = torch.Generator().manual_seed(0)
    for step in range(6):
        batch = rows(seed=step)
        layer.take(batch)
        vectors = rank.sketch(batch, spectrum.VECTORS, signs)
        average = 0.9 * average + 0.1 * batch.mT @ batch / 40
        sketched = 0.9 * sketched + 0.1 * vectors.mT @ vectors / spectrum.VECTORS
        mass = 0.9 * mass + 0.1
    eye = torch.eye(D).double()
    factor = average / mass
    inverse = torch.linalg.inv(factor + spectrum.DAMPING * eye)
    assert torch.allclose(layer.wide["kfac"].inverse(), inverse)
    floor = 0.01 * sketched.trace()
    low = floor * torch.linalg.inv(sketched + floor * eye)
    assert torch.allclose(layer.wide["mkor-lowrank"].inverse(), low)
    values = torch.linalg.eigvalsh(factor)
    found = layer.spectrum()
    assert found["condition"] == pytest.approx(float(values[-1] / values[0]))
    assert found["damped"] == pytest.approx(float((values[-1] + 0.003) / (values[0] + 0.003)))
    narrowed = layer.narrowed()
    assert narrowed["mkor float32"]["error"] < 1e-5 < narrowed["mkor bfloat16"]["error"]
    assert narrowed["mkor bfloat16"]["least"] > 0
