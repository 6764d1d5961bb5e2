"""What the capture shows of each layer type, against rows by explicit loops."""

import zlib

import pytest
import torch
from torch import nn

import layer_oracles as oracle
from layer_oracles import Observed, backward
from mkor.capture.signs import signs
from mkor.capture.sketch import OUTPUTS, POSITIONS, first_number
from mkor.methods.base import Moment, Rows, Sketch

CLOSE = {"rtol": 1e-10, "atol": 1e-12}


def check(module, inputs, explicit_rows, blocks, *, conv=False, bias_column=True):
    """Captured sums and the matrix view of the gradient against explicit rows."""
    module = module.double()
    observed = Observed(module, blocks)
    output = module(inputs)
    grad_output = backward(output)
    rows, grads = explicit_rows(inputs.detach(), grad_output)
    stack, samples, positions, _ = rows.shape
    seen, view = observed.seen(), observed.view()
    column = bias_column and module.bias is not None

    # The gradient in the matrix view is Σ g aᵀ, with a constant 1 in each row for the bias.
    expected = oracle.weight_gradient(rows, grads)
    if column:
        expected = torch.cat([expected, grads.sum(dim=(1, 2))[..., None]], dim=-1)
    assert expected.shape == (view.shape.stack, view.shape.outputs, view.shape.inputs)
    torch.testing.assert_close(view.matrix(), expected, **CLOSE)

    # A convolution's row is the mean patch of a sample; elsewhere each position is a row.
    per_sample = 1 if conv else positions
    sizes = [int(count) // per_sample for count in seen.rows]
    assert int(seen.rows.sum()) == samples * per_sample
    parts = oracle.block_of_samples(sizes, samples)
    assert seen.inputs.shape == (stack, blocks, view.shape.inputs)
    for j, part in enumerate(parts):
        chosen = rows[:, part]
        sums = (chosen.mean(dim=2) if conv else chosen.sum(dim=2)).sum(dim=1)
        if column:
            ones = torch.full((stack, 1), float(seen.rows[j]), dtype=torch.float64)
            sums = torch.cat([sums, ones], dim=-1)
        torch.testing.assert_close(seen.inputs[:, j], sums, **CLOSE)
        if not seen.grads_reduced:
            torch.testing.assert_close(seen.grads[:, j], grads[:, part].sum(dim=(1, 2)), **CLOSE)
    if seen.grads_reduced:
        assert module.bias is not None
        torch.testing.assert_close(seen.grads[:, 0], grads.sum(dim=(1, 2)), **CLOSE)
    total = seen.grads.sum(dim=1)
    torch.testing.assert_close(total, grads.sum(dim=(1, 2)), **CLOSE)
    check_moments(module, inputs, grad_output, rows, grads, conv, column)
    check_single_rows(module, inputs, grad_output, rows, grads, conv, column)
    check_sketch(module, inputs, grad_output, rows, grads, conv, column)


def observed_again(module, inputs, grad_output, kind):
    """The same call under another kind of statistic."""
    module.zero_grad()
    observed = Observed(module, kinds=(kind, kind))
    module(inputs).backward(grad_output)
    return observed.seen()


def with_ones(rows, column):
    """Rows [G, n, i] with the constant of the bias."""
    return torch.cat([rows, torch.ones_like(rows[..., :1])], dim=-1) if column else rows


def check_moments(module, inputs, grad_output, rows, grads, conv, column):
    """Second moments with every position a row, or one row a sample."""
    for shared in ("expand", "reduce"):
        a, g = rows.flatten(1, 2), grads.flatten(1, 2)
        if shared == "reduce":
            a, g = rows.mean(dim=2), grads.sum(dim=2)
        samples = rows.shape[1] if conv or shared == "reduce" else a.shape[1]
        a = with_ones(a, column)
        seen = observed_again(module, inputs, grad_output, Moment(shared))
        torch.testing.assert_close(seen.inputs, a.mT @ a, **CLOSE)
        torch.testing.assert_close(seen.grads, g.mT @ g, **CLOSE)
        torch.testing.assert_close(seen.input_sums, a.sum(dim=1), **CLOSE)
        assert (seen.rows.tolist(), seen.samples.tolist()) == ([a.shape[1]], [samples])
        assert not seen.grads_reduced
        torch.testing.assert_close(seen.shown, seen.true, rtol=0, atol=0)
        assert seen.shown.abs().sum() > 0


def check_single_rows(module, inputs, grad_output, rows, grads, conv, column):
    """Tokens as rows; of a convolution the mean patch and the sum of gradients of a sample."""
    a = rows.mean(dim=2) if conv else rows.flatten(1, 2)
    g = grads.sum(dim=2) if conv else grads.flatten(1, 2)
    seen = observed_again(module, inputs, grad_output, Rows())
    torch.testing.assert_close(seen.inputs, with_ones(a, column), **CLOSE)
    torch.testing.assert_close(seen.grads, g, **CLOSE)
    assert seen.rows.tolist() == [a.shape[1]]


def sign_table(samples, positions, conv, salt, start, vectors=5):
    """What every row counts in each sum, [r, n, P]: of a convolution, by sample and by position."""

    def dealt(count):
        own = signs(start, 0, count, 1, salt)[0].double()
        table = torch.zeros(vectors, count, dtype=torch.float64)
        for row in range(count):
            table[row % vectors, row] = own[row] * vectors**0.5
        return table

    if not conv:
        return dealt(samples * positions).view(-1, samples, positions)
    few = samples < vectors
    of_samples = signs(start, 0, samples, vectors, salt) if few else dealt(samples)
    of_places = signs(start, 0, positions, vectors, salt ^ POSITIONS)
    return of_samples[:, :, None] * of_places[:, None]


def check_sketch(module, inputs, grad_output, rows, grads, conv, column):
    """Sums with signs, every position a row."""
    seen = observed_again(module, inputs, grad_output, Sketch(5))
    samples, positions = rows.shape[1:3]
    seed = torch.tensor(zlib.crc32(f"{Observed(module).view().name} 0".encode()))
    start = first_number(seed, inputs.detach())
    of_inputs, of_grads = (
        sign_table(samples, positions, conv, salt, start).double() for salt in (0, OUTPUTS)
    )
    a = with_ones(rows, column)
    torch.testing.assert_close(seen.inputs, torch.einsum("rnp,gnpi->gri", of_inputs, a), **CLOSE)
    torch.testing.assert_close(seen.grads, torch.einsum("rnp,gnpi->gri", of_grads, grads), **CLOSE)
    assert seen.rows.tolist() == [samples * positions]
    assert seen.samples.tolist() == [samples if conv else samples * positions]
    assert not seen.grads_reduced


# --- Linear --------------------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", [1, 2, 4])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(3,), (5, 3), (1, 3), (5, 4, 3), (3, 2, 4, 3)])
def test_linear(shape, bias, blocks):
    inputs = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    check(nn.Linear(3, 2, bias=bias), inputs, oracle.linear_rows, blocks)


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("shape", [(5, 3), (4, 2, 3)])
def test_transformers_conv1d(shape, blocks):
    utils = pytest.importorskip("transformers.pytorch_utils")
    layer = utils.Conv1D(2, 3)
    inputs = torch.randn(shape, dtype=torch.float64)
    check(layer, inputs, oracle.linear_rows, blocks)


# --- Convolutions --------------------------------------------------------------------------------

CONVS = [nn.Conv1d, nn.Conv2d, nn.Conv3d]
SPATIAL = {1: (7,), 2: (6, 5), 3: (4, 5, 4)}
CONV_OPTIONS = [
    {"kernel_size": 1},
    {"kernel_size": 3},
    {"kernel_size": 3, "stride": 2, "padding": 1},
    {"kernel_size": 2, "dilation": 2, "padding": 2},
    {"kernel_size": 3, "groups": 2, "padding": 1},
    {"kernel_size": 3, "groups": 4, "padding": 1, "stride": 2},  # depthwise
    {"kernel_size": 3, "padding": "valid"},
    {"kernel_size": 3, "padding": "same"},
    {"kernel_size": 2, "padding": "same", "dilation": 3},
    {"kernel_size": 2, "padding": 2, "stride": 3, "dilation": 2, "groups": 2},
]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("options", CONV_OPTIONS, ids=str)
@pytest.mark.parametrize("cls", CONVS)
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
def test_convolution(cls, options, bias):
    dims = CONVS.index(cls) + 1
    conv = cls(4, 8, bias=bias, **options)
    inputs = torch.randn(3, 4, *SPATIAL[dims], dtype=torch.float64)
    check(conv, inputs, lambda a, g: oracle.conv_rows(conv, a, g), blocks=1, conv=True)


@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
@pytest.mark.parametrize("padding", [1, 2, "same"])
@pytest.mark.parametrize("cls", CONVS)
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
def test_padding_modes(cls, padding, mode):
    dims = CONVS.index(cls) + 1
    conv = cls(2, 3, kernel_size=2, dilation=3, padding=padding, padding_mode=mode, bias=False)
    inputs = torch.randn(2, 2, *SPATIAL[dims], dtype=torch.float64)
    check(conv, inputs, lambda a, g: oracle.conv_rows(conv, a, g), blocks=2, conv=True)


def test_convolution_with_options_that_differ_by_axis():
    conv = nn.Conv2d(2, 4, (3, 2), stride=(1, 2), padding=(2, 0), dilation=(2, 1), groups=2)
    inputs = torch.randn(3, 2, 6, 7, dtype=torch.float64)
    check(conv, inputs, lambda a, g: oracle.conv_rows(conv, a, g), blocks=2, conv=True)


@pytest.mark.parametrize("blocks", [1, 2, 3, 5])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("cls", CONVS)
def test_convolution_blocks(cls, bias, blocks):
    """Five blocks of three samples leave two blocks empty."""
    dims = CONVS.index(cls) + 1
    conv = cls(2, 4, kernel_size=3, padding=1, groups=2, bias=bias)
    inputs = torch.randn(3, 2, *SPATIAL[dims], dtype=torch.float64)
    check(conv, inputs, lambda a, g: oracle.conv_rows(conv, a, g), blocks, conv=True)


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("cls", CONVS)
def test_convolution_without_batch_dimension(cls, bias, blocks):
    dims = CONVS.index(cls) + 1
    conv = cls(2, 4, kernel_size=3, bias=bias)
    inputs = torch.randn(2, *SPATIAL[dims], dtype=torch.float64)
    check(conv, inputs, lambda a, g: oracle.conv_rows(conv, a, g), blocks, conv=True)


# --- Transposed convolutions ---------------------------------------------------------------------

TRANSPOSED = [nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d]
SMALL = {1: (5,), 2: (3, 4), 3: (3, 2, 3)}
TRANSPOSED_OPTIONS = [
    {"kernel_size": 1},
    {"kernel_size": 3},
    {"kernel_size": 2, "stride": 2},
    {"kernel_size": 3, "stride": 2, "padding": 1, "output_padding": 1},
    {"kernel_size": 3, "padding": 1, "groups": 2},
    {"kernel_size": 2, "stride": 3, "output_padding": 2},
    {"kernel_size": 2, "dilation": 2, "stride": 2, "padding": 1, "groups": 2},
    {"kernel_size": 1, "stride": 2, "output_padding": 1},
]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("options", TRANSPOSED_OPTIONS, ids=str)
@pytest.mark.parametrize("cls", TRANSPOSED)
def test_transposed_convolution(cls, options, bias):
    dims = TRANSPOSED.index(cls) + 1
    conv = cls(4, 6, bias=bias, **options)
    inputs = torch.randn(3, 4, *SMALL[dims], dtype=torch.float64)
    check(
        conv,
        inputs,
        lambda a, g: oracle.transposed_rows(conv, a, g),
        blocks=1,
        conv=True,
        bias_column=False,
    )


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("blocks", [1, 2, 5])
@pytest.mark.parametrize("cls", TRANSPOSED)
def test_transposed_convolution_blocks_and_missing_batch(cls, blocks, batched):
    dims = TRANSPOSED.index(cls) + 1
    conv = cls(2, 4, kernel_size=3, stride=2, padding=1, groups=2)
    shape = (2, *SMALL[dims])
    inputs = torch.randn((3, *shape) if batched else shape, dtype=torch.float64)
    check(
        conv,
        inputs,
        lambda a, g: oracle.transposed_rows(conv, a, g),
        blocks,
        conv=True,
        bias_column=False,
    )


def test_transposed_convolution_with_options_that_differ_by_axis():
    conv = nn.ConvTranspose2d(2, 3, (3, 2), stride=(2, 3), padding=(1, 0), output_padding=(0, 2))
    inputs = torch.randn(2, 2, 3, 4, dtype=torch.float64)
    check(
        conv,
        inputs,
        lambda a, g: oracle.transposed_rows(conv, a, g),
        blocks=2,
        conv=True,
        bias_column=False,
    )


def test_transposed_convolution_with_an_output_size():
    conv = nn.ConvTranspose2d(2, 3, 3, stride=2, padding=1)
    inputs = torch.randn(2, 2, 3, 4, dtype=torch.float64)

    class Sized(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = conv
            self.bias = conv.bias

        def forward(self, images):
            return self.conv(images, output_size=[6, 8])

    conv.double()
    observed = Observed(conv)
    grad_output = backward(Sized()(inputs))
    rows, grads = oracle.transposed_rows(conv, inputs, grad_output)
    seen = observed.seen()
    torch.testing.assert_close(
        observed.view().matrix(), oracle.weight_gradient(rows, grads), **CLOSE
    )
    torch.testing.assert_close(seen.grads[:, 0], grads.sum(dim=(1, 2)), **CLOSE)
