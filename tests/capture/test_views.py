"""The matrix view of weights and gradients: there and back."""

import pytest
import torch
from torch import nn

from layer_oracles import Observed
from mkor.capture.views import sizes


def transformers_conv1d():
    return pytest.importorskip("transformers.pytorch_utils").Conv1D(4, 3)


MODULES = {
    "linear": lambda: nn.Linear(3, 4),
    "linear without bias": lambda: nn.Linear(3, 4, bias=False),
    "conv1d": lambda: nn.Conv1d(4, 6, 3, groups=2),
    "conv2d": lambda: nn.Conv2d(4, 6, (3, 2)),
    "depthwise": lambda: nn.Conv2d(4, 8, 3, groups=4, bias=False),
    "conv3d": lambda: nn.Conv3d(2, 3, 2),
    "transposed1d": lambda: nn.ConvTranspose1d(4, 6, 3, groups=2),
    "transposed2d": lambda: nn.ConvTranspose2d(4, 6, (3, 2)),
    "transposed3d": lambda: nn.ConvTranspose3d(2, 3, 2),
    "attention": lambda: nn.MultiheadAttention(4, 2),
    "cross attention": lambda: nn.MultiheadAttention(4, 2, kdim=3, vdim=5),
    "transformers": transformers_conv1d,
}
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def with_gradients(module, dtype=torch.float32, memory_format=torch.contiguous_format):
    module.to(dtype)
    for parameter in module.parameters():
        if parameter.dim() == 4:
            parameter.data = parameter.data.to(memory_format=memory_format)
        parameter.grad = torch.randn_like(parameter)
    return module


def layouts(module):
    return {
        name: (p.grad.dtype, p.grad.shape, p.grad.stride(), p.grad.data_ptr())
        for name, p in module.named_parameters()
    }


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", list(MODULES))
def test_writing_a_matrix_back_changes_nothing(kind, dtype, memory_format):
    module = with_gradients(MODULES[kind](), dtype, memory_format)
    before = {name: p.grad.clone() for name, p in module.named_parameters()}
    layout = layouts(module)
    for layer in Observed(module).layers.values():
        matrix = layer.view.matrix()
        shape = layer.view.shape
        assert matrix.shape == (shape.stack, shape.outputs, shape.inputs)
        assert matrix.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        layer.view.write(matrix.clone())
    assert layouts(module) == layout
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter.grad, before[name]), name


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("kind", list(MODULES))
def test_what_is_written_is_read_again(kind, memory_format):
    module = with_gradients(MODULES[kind](), torch.float64, memory_format)
    layout = layouts(module)
    for layer in Observed(module).layers.values():
        view = layer.view
        matrix = torch.randn_like(view.matrix())
        view.write(matrix.clone())
        assert torch.equal(view.matrix(), matrix)
    assert layouts(module) == layout


@pytest.mark.parametrize("kind", list(MODULES))
def test_every_entry_of_a_weight_stands_in_the_matrix_once(kind):
    module = with_gradients(MODULES[kind](), torch.float64)
    number = 1
    for parameter in module.parameters():
        count = parameter.numel()
        parameter.grad = torch.arange(number, number + count, dtype=torch.float64).view_as(
            parameter
        )
        number += count
    entries = [layer.view.matrix().flatten() for layer in Observed(module).layers.values()]
    found = torch.cat(entries).sort().values
    expected = [
        parameter.grad.flatten()
        for name, parameter in module.named_parameters()
        if not (kind.startswith("transposed") and name == "bias")
    ]
    assert torch.equal(found, torch.cat(expected).sort().values)


@pytest.mark.parametrize("kind", list(MODULES))
def test_fold_and_unfold_are_inverses(kind):
    module = MODULES[kind]()
    for layer in Observed(module).layers.values():
        weight = torch.randn_like(layer.view.weight)
        folded = layer.view.fold(weight)
        assert torch.equal(layer.view.unfold(folded, weight.shape), weight)


def test_a_missing_bias_gradient_is_a_column_of_zeros():
    module = nn.Linear(3, 4)
    module.weight.grad = torch.randn(4, 3)
    view = Observed(module).view()
    matrix = view.matrix()
    assert torch.equal(matrix[0, :, -1], torch.zeros(4))
    view.write(torch.ones(1, 4, 4))
    assert module.bias.grad is None
    assert torch.equal(module.weight.grad, torch.ones(4, 3))


def test_expanded_gradients_survive_the_round_trip():
    module = nn.Linear(3, 4)
    module(torch.ones(2, 3)).sum().backward()
    view = Observed(module).view()
    view.write(2 * view.matrix())
    torch.testing.assert_close(module.weight.grad, torch.full((4, 3), 4.0))
    torch.testing.assert_close(module.bias.grad, torch.full((4,), 4.0))


@pytest.mark.parametrize("blocks", [1, 2, 3, 7])
@pytest.mark.parametrize("samples", range(12))
def test_blocks_of_samples(samples, blocks):
    lengths = sizes(samples, blocks)
    assert len(lengths) == blocks and sum(lengths) == samples
    assert max(lengths) - min(lengths) <= 1
