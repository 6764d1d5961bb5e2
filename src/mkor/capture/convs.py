"""The matrix views of convolutions.

A convolution's mean patch depends on the input linearly, so the batch is summed before patches are
taken: exact, and the unfolded batch is never formed. Where patches are needed one by one, the batch
goes in pieces.

Shapes: n batch, r blocks, G stack, o outputs, i inputs, C channels, S positions, K kernel.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mkor.capture.views import BlockSums, View, block_sums, sizes
from mkor.methods.base import wide

PIECE = 2**23
"""Entries of the patches that are formed at a time."""


class ConvView(View):
    """Conv1d/2d/3d with any stride, dilation, groups and padding."""

    spatial = True

    def input_sums(self, inputs: Tensor, blocks: int) -> BlockSums:
        """Sums over samples of the mean patch, from [n, C, *S] or [C, *S]."""
        batch = self.batch(inputs, inputs.shape)
        counts = sizes(batch.shape[0], blocks)
        image = block_sums(batch, counts)  # [r, C, *S]
        return self.stacked(self.input_patches(image).mean(dim=self.places)), counts

    def output_sums(self, grad: Tensor, inputs: torch.Size, blocks: int) -> Tensor:
        """Sums over samples of the sum over positions."""
        batch = self.batch(grad, inputs)
        totals = batch.flatten(2).sum(dim=-1, dtype=wide(grad.dtype))  # [n, C]
        return self.stacked(block_sums(totals, sizes(batch.shape[0], blocks)))

    def samples(self, inputs: torch.Size, shared: str) -> int:
        """The batch size."""
        return inputs[0] if len(inputs) == len(self.places) + 2 else 1

    def input_rows(self, inputs: Tensor, shared: str) -> Tensor:
        """The patch at every position, or each sample's mean patch."""
        windows = self.input_patches(self.batch(inputs, inputs.shape))  # [n, C, *S, *K]
        if shared == "reduce":
            return self.stacked(windows.mean(dim=self.places, dtype=wide(inputs.dtype)))
        return self.spread(windows)

    def output_rows(self, grad: Tensor, inputs: torch.Size, shared: str) -> Tensor:
        """The gradient at every position, or each sample's sum over positions."""
        batch = self.batch(grad, inputs)  # [n, C, *S]
        if shared == "reduce":
            return self.stacked(batch.flatten(2).sum(dim=-1, dtype=wide(grad.dtype)))
        return self.spread(batch)

    def positions(self, inputs: torch.Size) -> int:
        """How often a call on such inputs applies the weight to a sample."""
        conv: Any = self.owner
        pads = conv._reversed_padding_repeated_twice[::-1]
        spatial = inputs[-len(self.places) :]
        return math.prod(
            self.spots([n + pads[2 * d] + pads[2 * d + 1] for d, n in enumerate(spatial)])
        )

    def weighted_inputs(self, images: Tensor, inputs: torch.Size, weights: Tensor) -> Tensor:
        """The rows of [r, C, *S_in] summed with weights [r, P] of positions, [G, r, i]."""
        return self.stacked(self.weighted_patches(self.padded(images), weights))

    def weighted_outputs(self, images: Tensor, inputs: torch.Size, weights: Tensor) -> Tensor:
        """The rows of [r, C, *S_out] summed with weights [r, P] of positions, [G, r, o]."""
        return self.stacked(images.flatten(2) @ weights[..., None])

    def pieces(self, tensor: Tensor, inputs: torch.Size) -> Iterable[Tensor]:
        """Parts of the batch: a patch is several times the size of what it is cut from."""
        batch = self.batch(tensor, inputs)
        patch = batch[:1].numel() * math.prod(self.owner.kernel_size)  # type: ignore[arg-type]
        pieces: tuple[Tensor, ...] = torch.split(batch, max(1, PIECE // max(patch, 1)))
        return pieces

    def row_mask(self, mask: Tensor, inputs: torch.Size) -> Tensor | None:
        """A mask of samples; one of positions doesn't fit, since patches overlap."""
        batched = len(inputs) == len(self.places) + 2
        return mask if batched and mask.shape == inputs[:1] else None

    def without(self, tensor: Tensor, rows: Tensor) -> Tensor:
        """Rows are samples."""
        return tensor.masked_fill(~rows.view(-1, *[1] * (tensor.dim() - 1)), 0)

    @property
    def places(self) -> tuple[int, ...]:
        """The dimensions of positions in a batch."""
        return tuple(range(2, 2 + len(self.owner.kernel_size)))  # type: ignore[arg-type]

    def input_patches(self, image: Tensor) -> Tensor:
        """The padded patches of [n, C, *S_in], a view [n, C, *S, *K]."""
        return self.patches(self.padded(image))

    def padded(self, image: Tensor) -> Tensor:
        """An input [n, C, *S_in] as the kernel meets it."""
        conv: Any = self.owner
        mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
        return F.pad(image, conv._reversed_padding_repeated_twice, mode=mode)

    def patches(self, image: Tensor) -> Tensor:
        """The kernel-sized patches of a padded [n, C, *S], a view [n, C, *S_out, *K]."""
        conv: Any = self.owner
        return patches(image, conv.kernel_size, conv.stride, conv.dilation)

    def weighted_patches(self, image: Tensor, weights: Tensor) -> Tensor:
        """The patches of a padded [r, C, *S] summed with weights [r, P], [r, C, K].

        Not the patches are formed but, for each entry of the kernel, a map of the weights over what
        it meets of the image: as many numbers as the patches of one channel have.
        """
        conv: Any = self.owner
        kernel, spots = conv.kernel_size, self.spots(image.shape[2:])
        most = max(1, PIECE // max(math.prod(kernel) * image[0, 0].numel(), 1))
        sums: list[Tensor] = []
        for part, own in zip(image.split(most), weights.split(most), strict=True):
            maps = part.new_zeros(part.shape[0], *kernel, *part.shape[2:])
            first, *far = maps.stride()
            near = far[len(kernel) :]
            steps = [by * step for by, step in zip(near, conv.stride, strict=True)]
            gaps = [k + by * gap for k, by, gap in zip(far, near, conv.dilation, strict=False)]
            met = maps.as_strided((len(part), *spots, *kernel), (first, *steps, *gaps))
            met.copy_(own.view(len(part), *spots, *[1] * len(kernel)))
            maps = maps.flatten(1 + len(kernel)).flatten(1, -2)  # [r, K, S]
            sums.append(part.flatten(2) @ maps.mT)
        return torch.cat(sums)

    def spots(self, padded: Sequence[int]) -> list[int]:
        """How many places the kernel has in a padded image, along each dimension."""
        conv: Any = self.owner
        sizes = zip(padded, conv.kernel_size, conv.stride, conv.dilation, strict=True)
        return [(n - gap * (size - 1) - 1) // step + 1 for n, size, step, gap in sizes]

    def spread(self, windows: Tensor) -> Tensor:
        """Positions as rows: [n, G · C, *S, *K] as [G, n · S, C · K]."""
        places = self.places
        split = windows.unflatten(1, (self.shape.stack, -1))  # [n, G, C, *S, *K]
        kernel = range(3 + len(places), split.dim())
        rows = split.permute(1, 0, *(d + 1 for d in places), 2, *kernel)
        out: Tensor = rows.flatten(2 + len(places)).flatten(1, -2)
        return out

    def batch(self, tensor: Tensor, inputs: torch.Size) -> Tensor:
        """An input or output with its batch dimension, which the call's input may lack."""
        kernel: tuple[int, ...] = self.owner.kernel_size  # type: ignore[assignment]
        return tensor if len(inputs) == len(kernel) + 2 else tensor[None]

    def stacked(self, rows: Tensor) -> Tensor:
        """Rows [r, G · d, …] as [G, r, d]."""
        split: Tensor = rows.flatten(1).unflatten(1, (self.shape.stack, -1))
        return split.transpose(0, 1)


class TransposedConvView(ConvView):
    """Transposed convolutions: each input position spreads a patch of the output.

    The matrix maps input channels to a patch [C_out/G · K], so the bias, which belongs to output
    positions, is no column of it and stays with the base optimizer.
    """

    output_dim = 1

    def fold(self, weight: Tensor) -> Tensor:
        """[C_in, C_out/G, *K] as [G, C_out/G · K, C_in/G]."""
        return super().fold(weight).mT

    def unfold(self, matrix: Tensor, shape: torch.Size) -> Tensor:
        """The inverse of `fold`."""
        return matrix.mT.reshape(shape)

    def input_sums(self, inputs: Tensor, blocks: int) -> BlockSums:
        """Sums over samples of the mean over positions, from [n, C, *S] or [C, *S]."""
        batch = self.batch(inputs, inputs.shape)
        means = batch.flatten(2).mean(dim=-1, dtype=wide(batch.dtype))  # [n, C]
        counts = sizes(batch.shape[0], blocks)
        return self.stacked(block_sums(means, counts)), counts

    def output_sums(self, grad: Tensor, inputs: torch.Size, blocks: int) -> Tensor:
        """Sums over samples of the sum of the gradient's patches over input positions."""
        batch = self.batch(grad, inputs)
        image = block_sums(batch, sizes(batch.shape[0], blocks))  # [r, C_out, *S_out]
        return self.stacked(self.output_patches(image, inputs).sum(dim=self.places))

    def input_rows(self, inputs: Tensor, shared: str) -> Tensor:
        """The channels at every position, or each sample's mean."""
        batch = self.batch(inputs, inputs.shape)
        if shared == "reduce":
            return self.stacked(batch.flatten(2).mean(dim=-1, dtype=wide(batch.dtype)))
        return self.spread(batch)

    def output_rows(self, grad: Tensor, inputs: torch.Size, shared: str) -> Tensor:
        """The gradient's patch at every input position, or each sample's sum of them."""
        windows = self.output_patches(self.batch(grad, inputs), inputs)
        if shared == "reduce":
            return self.stacked(windows.sum(dim=self.places, dtype=wide(grad.dtype)))
        return self.spread(windows)

    def positions(self, inputs: torch.Size) -> int:
        """Of the input."""
        return math.prod(inputs[-len(self.places) :])

    def weighted_inputs(self, images: Tensor, inputs: torch.Size, weights: Tensor) -> Tensor:
        """The rows of [r, C, *S_in] summed with weights [r, P] of positions, [G, r, i]."""
        return super().weighted_outputs(images, inputs, weights)

    def weighted_outputs(self, images: Tensor, inputs: torch.Size, weights: Tensor) -> Tensor:
        """The rows of [r, C, *S_out] summed with weights [r, P] of positions, [G, r, o]."""
        return self.stacked(self.weighted_patches(self.reached(images, inputs), weights))

    def output_patches(self, image: Tensor, inputs: torch.Size) -> Tensor:
        """The patches of [n, C_out, *S_out] that input positions reach, [n, C_out, *S_in, *K]."""
        return self.patches(self.reached(image, inputs))

    def reached(self, image: Tensor, inputs: torch.Size) -> Tensor:
        """An output [n, C_out, *S_out] with all that inputs reach around it, before its padding."""
        conv: Any = self.owner
        spatial = inputs[-len(conv.kernel_size) :]
        pads: list[int] = []
        for d in reversed(range(len(spatial))):
            extent = conv.dilation[d] * (conv.kernel_size[d] - 1) + 1
            reach = (spatial[d] - 1) * conv.stride[d] + extent
            pads += [conv.padding[d], reach - image.shape[d + 2] - conv.padding[d]]
        return F.pad(image, pads)


def patches(
    image: Tensor, kernel: tuple[int, ...], stride: tuple[int, ...], dilation: tuple[int, ...]
) -> Tensor:
    """The kernel-sized patches of [n, C, *S] at every position, a view [n, C, *S_out, *K]."""
    windows = image
    for d, (size, step, gap) in enumerate(zip(kernel, stride, dilation, strict=True)):
        windows = windows.unfold(d + 2, gap * (size - 1) + 1, step)[..., ::gap]
    return windows
