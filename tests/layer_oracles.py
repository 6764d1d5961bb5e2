"""Rows of each layer type by explicit loops over samples and positions, in float64.

The rows of a layer are a pair: inputs [G, n, P, i] and output gradients [G, n, P, o] for n samples
and P positions, such that Σ g aᵀ over both is the gradient of the weight as a stack [G, o, i].
"""

import itertools

import torch

from mkor.capture.discover import find_layers
from mkor.capture.hooks import Capture
from mkor.methods.base import Sums


class Observed:
    """A module under capture, without an optimizer."""

    def __init__(self, module, blocks=1, kinds=None):
        everything = {id(parameter) for parameter in module.parameters()}
        self.layers, self.left = find_layers(module, everything, (), lambda shape: None)
        kinds = dict.fromkeys(self.layers, kinds or (Sums(blocks), Sums(blocks)))
        self.capture = Capture(absolute=True)
        self.capture.watch(self.layers, kinds)
        self.capture.arm(kinds, 0)

    def seen(self, name=None):
        """What a layer showed (the only one, without a name)."""
        layer = self.layers[name] if name is not None else next(iter(self.layers.values()))
        return self.capture.collect(layer)

    def view(self, name=None):
        layer = self.layers[name] if name is not None else next(iter(self.layers.values()))
        return layer.view


def backward(output):
    """Back-propagate a random linear function of the output; its gradient in float64."""
    weights = torch.randn(output.shape, dtype=torch.float64)
    (output * weights.to(output.dtype)).sum().backward()
    return weights.to(output.dtype).double()


def linear_rows(inputs, grads):
    """[n, …, i] and [n, …, o]; a 1-D input is one sample."""
    if inputs.dim() == 1:
        inputs, grads = inputs[None], grads[None]
    samples = inputs.shape[0]
    rows = inputs.double().reshape(1, samples, -1, inputs.shape[-1])
    return rows, grads.reshape(1, samples, -1, grads.shape[-1])


def source(index, size, mode):
    """Index into an unpadded axis, or None for a zero."""
    if 0 <= index < size:
        return index
    if mode == "zeros":
        return None
    if mode == "circular":
        return index % size
    if mode == "replicate":
        return min(max(index, 0), size - 1)
    return -index if index < 0 else 2 * (size - 1) - index  # reflect


def leading_pads(conv):
    """Padding before the first entry of each axis."""
    if conv.padding == "valid":
        return [0] * len(conv.kernel_size)
    if conv.padding == "same":
        pairs = zip(conv.kernel_size, conv.dilation, strict=True)
        return [gap * (size - 1) // 2 for size, gap in pairs]
    return list(conv.padding)


def ranges(shape):
    return list(itertools.product(*(range(n) for n in shape)))


def conv_rows(conv, inputs, grads):
    """Every patch that a convolution multiplies, and the output gradient there."""
    inputs = inputs.double()
    dims, groups = len(conv.kernel_size), conv.groups
    if inputs.dim() == dims + 1:
        inputs, grads = inputs[None], grads[None]
    samples, per_group = inputs.shape[0], inputs.shape[1] // groups
    spatial, positions = inputs.shape[2:], ranges(grads.shape[2:])
    pads, offsets = leading_pads(conv), ranges(conv.kernel_size)
    patches = torch.zeros(
        samples, len(positions), inputs.shape[1], len(offsets), dtype=torch.float64
    )
    for (p, position), (k, offset) in itertools.product(enumerate(positions), enumerate(offsets)):
        at = [
            source(
                position[d] * conv.stride[d] + offset[d] * conv.dilation[d] - pads[d],
                spatial[d],
                conv.padding_mode,
            )
            for d in range(dims)
        ]
        if None not in at:
            patches[:, p, :, k] = inputs[(slice(None), slice(None), *at)]
    rows = patches.reshape(samples, len(positions), groups, per_group * len(offsets))
    outs = grads.flatten(2).reshape(samples, groups, -1, len(positions))
    return rows.permute(2, 0, 1, 3), outs.permute(1, 0, 3, 2)


def transposed_rows(conv, inputs, grads):
    """Every position a transposed convolution reads, and the gradient of the patch it spreads."""
    inputs = inputs.double()
    dims, groups = len(conv.kernel_size), conv.groups
    if inputs.dim() == dims + 1:
        inputs, grads = inputs[None], grads[None]
    samples, channels = grads.shape[:2]
    positions, offsets = ranges(inputs.shape[2:]), ranges(conv.kernel_size)
    patches = torch.zeros(samples, len(positions), channels, len(offsets), dtype=torch.float64)
    for (p, position), (k, offset) in itertools.product(enumerate(positions), enumerate(offsets)):
        at = [
            position[d] * conv.stride[d] + offset[d] * conv.dilation[d] - conv.padding[d]
            for d in range(dims)
        ]
        if all(0 <= at[d] < grads.shape[2 + d] for d in range(dims)):
            patches[:, p, :, k] = grads[(slice(None), slice(None), *at)]
    rows = inputs.flatten(2).reshape(samples, groups, -1, len(positions)).permute(1, 0, 3, 2)
    outs = patches.reshape(samples, len(positions), groups, -1)
    return rows, outs.permute(2, 0, 1, 3)


def weight_gradient(inputs, grads):
    """Σ g aᵀ over samples and positions, [G, o, i]."""
    return torch.einsum("gnpo,gnpi->goi", grads, inputs)


def block_of_samples(sizes, samples):
    """The samples of each block, given block sizes in samples."""
    assert sum(sizes) == samples
    assert max(sizes) - min(sizes) <= 1
    return [list(part) for part in torch.arange(samples).split(sizes)]
