"""A mean gradient that is zero in theory must not fill a factor with its rounding noise."""

import pytest
import torch
from torch import nn

import mkor
from mkor.methods.statistics import informative


def factors_after_a_step(model, loss):
    """Output factors by layer name after one update."""
    base = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer = mkor.MKOR(model, base)
    loss().backward()
    optimizer.step()
    layers = optimizer.state_dict()["preconditioner"]["layers"]
    return {name: layer["state"]["outputs"] for name, layer in layers.items()}


def is_identity(factor):
    return torch.equal(factor, torch.eye(factor.shape[-1], dtype=factor.dtype))


@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_before_batch_normalisation_keeps_its_output_factor(bias):
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=bias), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 4)
    )
    x, y = torch.randn(16, 3, 6, 6), torch.randint(0, 4, (16,))
    outputs = factors_after_a_step(model, lambda: nn.functional.cross_entropy(model(x), y))
    assert is_identity(outputs["0"][0])
    assert not is_identity(outputs["4"][0])


def test_the_keys_of_an_attention_keep_their_output_factor():
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(16, 2, batch_first=True)})
    x = torch.randn(4, 6, 16)
    loss = lambda: model["attention"](x, x, x)[0].square().mean()  # noqa: E731
    query, key, value = factors_after_a_step(model, loss)["attention.in_proj"]
    assert is_identity(key)
    assert not is_identity(query) and not is_identity(value)


def test_informative_is_a_ratio_to_the_gradient():
    inputs, outputs = torch.ones(3, 2, 1), torch.ones(3, 2, 1)  # ‖g‖‖a‖ = 2
    gradient = torch.tensor([1.0, 1.9e4, 2.1e4])
    assert informative(inputs, outputs, gradient).tolist() == [True, True, False]
    assert informative(1e-12 * inputs, 1e9 * outputs, 1e-3 * gradient).tolist() == [
        True,
        True,
        False,
    ]
