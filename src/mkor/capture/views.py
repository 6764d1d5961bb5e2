"""The matrix view of each module type: weights, gradients and rows as stacks of matrices.

One layout serves every layer. A weight is a stack [G, o, i] with an optional bias column, so that
y = W [a; 1] for a row a. A *row* is what the weight multiplies:

| layer | G | rows | a | g |
| ----- | - | ---- | - | - |
| Linear, HF Conv1D | 1 | all leading dimensions | input | output gradient |
| Conv1d/2d/3d | groups | samples | mean patch over positions | sum over positions |
| ConvTranspose | groups | samples | mean over positions | sum of output patches |
| attention input projection | 3 | tokens | query, key, value | output gradient |

Statistics are sums over rows in r contiguous blocks of the batch, so they add up over calls,
micro-batches and workers. A convolution's mean patch depends on the input linearly, so the batch is
summed before patches are taken: exact, and the unfolded batch is never formed.

The gradient side is summed in the same blocks when the backward pass comes by (see `hooks`).

Shapes: n batch, r blocks, G stack, o outputs, i inputs, C channels, S spatial, K kernel.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mkor.methods.base import LayerShape, wide

Sums = tuple[Tensor, list[int]]
"""Block sums of rows, [G, r, d], and the number of rows in each block."""


@dataclass(eq=False)
class View(ABC):
    """One weight as a stack of matrices, and how a call of its module shows its rows.

    Attributes:
        name: Layer name, stable under DDP and other wrappers.
        kind: Class name of the module, with the projection for attention.
        hooked: Module whose calls are observed.
        owner: Module that holds the parameters.
        weight_name: Name of the weight in `owner`.
        bias_name: Name of the bias in `owner`, or None.
        shape: The stack, bias column included where there is one.
        bias_rows: Entries of the bias that belong to this view.
        column: Whether the bias is a column of the matrix.
        bias_shows_gradient: Whether the bias gradient equals the sum of row gradients.
    """

    name: str
    kind: str
    hooked: nn.Module
    owner: nn.Module
    weight_name: str
    bias_name: str | None
    shape: LayerShape
    bias_rows: tuple[int | None, int | None] = (None, None)
    column: bool = True
    bias_shows_gradient: bool = True

    @property
    def weight(self) -> Tensor:
        """The weight parameter."""
        weight: Tensor = self.owner._parameters[self.weight_name]  # type: ignore[assignment]
        return weight

    @property
    def bias(self) -> Tensor | None:
        """The bias parameter, if any."""
        return self.owner._parameters[self.bias_name] if self.bias_name else None

    @property
    def has_bias_column(self) -> bool:
        """Whether the last column of the matrix is the bias."""
        return self.column and self.bias_name is not None

    def bias_gradient(self) -> Tensor | None:
        """This view's part of the bias gradient, [G, 1, o], or None."""
        grad = None if self.bias is None else self.bias.grad
        return (
            None if grad is None else grad[slice(*self.bias_rows)].reshape(self.shape.stack, 1, -1)
        )

    def gradient_norm(self) -> Tensor:
        """Frobenius norm of each matrix of the weight's gradient, [G]; zero where there is none."""
        grad = self.weight.grad
        if grad is None or grad.layout != torch.strided:
            return self.weight.new_zeros(self.shape.stack, dtype=wide(self.weight.dtype))
        dtype = wide(grad.dtype)
        norm: Tensor = torch.linalg.vector_norm(self.fold(grad), dim=(-2, -1), dtype=dtype)
        return norm

    def matrix(self) -> Tensor:
        """The gradient as a new stack [G, o, i] in float32 or wider; absent parts are zero."""
        weight = self.weight
        assert weight.grad is not None
        out = self.fold(weight.grad)
        if self.has_bias_column:
            bias = self.bias_gradient()
            column = out.new_zeros(*out.shape[:2], 1) if bias is None else bias.mT
            out = torch.cat([out, column], dim=-1)
        return out.to(wide(out.dtype))

    def present(self, matrix: Tensor) -> Tensor:
        """Zero in place the bias column of a matrix [G, o, i] where the bias has no gradient."""
        if self.has_bias_column and self.bias_gradient() is None:
            matrix[..., -1] = 0
        return matrix

    def write(self, matrix: Tensor) -> None:
        """Overwrite the gradients with `matrix`, keeping strides and dtypes; needs `no_grad`."""
        weight, bias = self.weight, self.bias
        assert weight.grad is not None
        if self.column and bias is not None:
            if bias.grad is not None:
                bias.grad[slice(*self.bias_rows)].copy_(matrix[..., -1].reshape(-1))
            matrix = matrix[..., :-1]
        weight.grad.copy_(self.unfold(matrix, weight.shape))

    def fold(self, weight: Tensor) -> Tensor:
        """A tensor of the weight's shape as [G, o, i] without bias column."""
        return weight.reshape(self.shape.stack, self.shape.outputs, -1)

    def unfold(self, matrix: Tensor, shape: torch.Size) -> Tensor:
        """The inverse of `fold`."""
        return matrix.reshape(shape)

    @abstractmethod
    def input_sums(self, inputs: Tensor, blocks: int) -> Sums:
        """Block sums of the input rows without bias column, and rows per block."""

    @abstractmethod
    def output_sums(self, grad: Tensor, inputs: torch.Size, blocks: int) -> Tensor:
        """Block sums [G, r, o] of the row gradients, from the output gradient of one call.

        `inputs` is the shape of the call's input.
        """


class LinearView(View):
    """`nn.Linear` and its subclasses, on inputs of any rank."""

    def input_sums(self, inputs: Tensor, blocks: int) -> Sums:
        """Sums over all leading dimensions of [n, …, i]; a 1-D input is one row."""
        rows = inputs.reshape(-1, inputs.shape[-1])
        per_sample = rows.shape[0] // inputs.shape[0] if inputs.dim() > 1 and rows.numel() else 1
        samples = rows.shape[0] // per_sample
        counts = [size * per_sample for size in sizes(samples, blocks)]
        return block_sums(rows, counts)[None], counts

    def output_sums(self, grad: Tensor, inputs: torch.Size, blocks: int) -> Tensor:
        """Sums over all leading dimensions, as of the inputs."""
        return self.input_sums(grad, blocks)[0]


class HFConv1DView(LinearView):
    """Transformers' `Conv1D`: a linear layer whose weight is stored as [i, o]."""

    def fold(self, weight: Tensor) -> Tensor:
        """[i, o] as [1, o, i]."""
        return weight.mT[None]

    def unfold(self, matrix: Tensor, shape: torch.Size) -> Tensor:
        """[1, o, i] as [i, o]."""
        return matrix[0].mT


class ConvView(View):
    """Conv1d/2d/3d with any stride, dilation, groups and padding."""

    def input_sums(self, inputs: Tensor, blocks: int) -> Sums:
        """Sums over samples of the mean patch, from [n, C, *S] or [C, *S]."""
        conv: Any = self.owner
        batch = self.batch(inputs, inputs.shape)
        counts = sizes(batch.shape[0], blocks)
        image = block_sums(batch, counts)  # [r, C, *S]
        mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
        image = F.pad(image, conv._reversed_padding_repeated_twice, mode=mode)
        patch = patches(image, conv.kernel_size, conv.stride, conv.dilation, average=True)
        return self.stacked(patch), counts

    def output_sums(self, grad: Tensor, inputs: torch.Size, blocks: int) -> Tensor:
        """Sums over samples of the sum over positions."""
        batch = self.batch(grad, inputs)
        totals = batch.flatten(2).sum(dim=-1, dtype=wide(grad.dtype))  # [n, C]
        return self.stacked(block_sums(totals, sizes(batch.shape[0], blocks)))

    def batch(self, tensor: Tensor, inputs: torch.Size) -> Tensor:
        """An input or output with its batch dimension, which the call's input may lack."""
        kernel: tuple[int, ...] = self.owner.kernel_size  # type: ignore[assignment]
        return tensor if len(inputs) == len(kernel) + 2 else tensor[None]

    def stacked(self, rows: Tensor) -> Tensor:
        """Rows [r, G · d, …] as [G, r, d]."""
        return rows.reshape(rows.shape[0], self.shape.stack, -1).transpose(0, 1)


class TransposedConvView(ConvView):
    """Transposed convolutions: each input position spreads a patch of the output.

    The matrix maps input channels to a patch [C_out/G · K], so the bias, which belongs to output
    positions, is no column of it and stays with the base optimizer.
    """

    def fold(self, weight: Tensor) -> Tensor:
        """[C_in, C_out/G, *K] as [G, C_out/G · K, C_in/G]."""
        return weight.reshape(self.shape.stack, self.shape.inputs, -1).mT

    def unfold(self, matrix: Tensor, shape: torch.Size) -> Tensor:
        """The inverse of `fold`."""
        return matrix.mT.reshape(shape)

    def input_sums(self, inputs: Tensor, blocks: int) -> Sums:
        """Sums over samples of the mean over positions, from [n, C, *S] or [C, *S]."""
        batch = self.batch(inputs, inputs.shape)
        means = batch.flatten(2).mean(dim=-1, dtype=wide(batch.dtype))  # [n, C]
        counts = sizes(batch.shape[0], blocks)
        return self.stacked(block_sums(means, counts)), counts

    def output_sums(self, grad: Tensor, inputs: torch.Size, blocks: int) -> Tensor:
        """Sums over samples of the sum of the gradient's patches over input positions."""
        conv: Any = self.owner
        batch = self.batch(grad, inputs)
        image = block_sums(batch, sizes(batch.shape[0], blocks))  # [r, C_out, *S_out]
        spatial = inputs[-len(conv.kernel_size) :]
        pads: list[int] = []
        for d in reversed(range(len(spatial))):
            extent = conv.dilation[d] * (conv.kernel_size[d] - 1) + 1
            reach = (spatial[d] - 1) * conv.stride[d] + extent
            pads += [conv.padding[d], reach - image.shape[d + 2] - conv.padding[d]]
        image = F.pad(image, pads)
        return self.stacked(
            patches(image, conv.kernel_size, conv.stride, conv.dilation, average=False)
        )


def sizes(samples: int, blocks: int) -> list[int]:
    """Sizes of `blocks` contiguous blocks of `samples`, as even as possible."""
    bounds = [-(-j * samples // blocks) for j in range(blocks + 1)]
    return [end - start for start, end in itertools.pairwise(bounds)]


def block_sums(rows: Tensor, lengths: list[int]) -> Tensor:
    """Sums of contiguous blocks of rows [N, …] → [r, …], accumulated in float32 or wider."""
    dtype = wide(rows.dtype)
    if len(lengths) > 1:
        return torch.stack([part.sum(dim=0, dtype=dtype) for part in rows.split(lengths)])
    fast = rows.device.type == "cpu" and rows.dtype == torch.float32 and rows.is_contiguous()
    if fast and rows.numel():
        # Twice as fast as `sum` on the CPU, at the speed of memory.
        flat = rows.new_ones(1, rows.shape[0]) @ rows.reshape(rows.shape[0], -1)
        return flat.view(1, *rows.shape[1:])
    return rows.sum(dim=0, keepdim=True, dtype=dtype)


def patches(
    image: Tensor,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    dilation: tuple[int, ...],
    average: bool,
) -> Tensor:
    """Mean or sum over positions of the kernel-sized patches of [r, C, *S] → [r, C, *K]."""
    windows = image
    for d, (size, step, gap) in enumerate(zip(kernel, stride, dilation, strict=True)):
        windows = windows.unfold(d + 2, gap * (size - 1) + 1, step)[..., ::gap]
    positions = tuple(range(2, 2 + len(kernel)))
    return windows.mean(dim=positions) if average else windows.sum(dim=positions)
