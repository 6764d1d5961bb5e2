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

The gradient side is read from a *probe*: a zero leaf that is added to the output. Autograd leaves
the block sums of the output gradient in `probe.grad`, through checkpointing, accumulation and
compilation as for any parameter, and leaves it empty for a forward pass that isn't back-propagated.

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
        if self.column and self.bias_name:
            bias = self.bias_gradient()
            column = out.new_zeros(*out.shape[:2], 1) if bias is None else bias.mT
            out = torch.cat([out, column], dim=-1)
        return out.to(wide(out.dtype))

    def present(self, matrix: Tensor) -> Tensor:
        """Zero in place the bias column of a matrix [G, o, i] where the bias has no gradient."""
        if self.column and self.bias_name and self.bias_gradient() is None:
            matrix[..., -1] = 0
        return matrix

    @torch.no_grad()
    def write(self, matrix: Tensor) -> None:
        """Overwrite the gradients with `matrix`, keeping their strides and dtypes."""
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
    def input_sums(self, inputs: Tensor, blocks: int) -> tuple[Tensor, list[int]]:
        """Block sums of the input rows [G, r, i] without bias column, and rows per block."""

    def batched(self, inputs: Tensor) -> bool:
        """Whether the first dimension of an input (and so of its output) is the batch."""
        return inputs.dim() > 1

    def probe(self, output: Tensor, blocks: int) -> Tensor:
        """A zero leaf for one call, [r, …], that `attach` adds to the output."""
        shape = (blocks, *self.probe_shape(output))
        return torch.zeros(
            shape, dtype=wide(output.dtype), device=output.device, requires_grad=True
        )

    def probe_shape(self, output: Tensor) -> tuple[int, ...]:
        """Shape of one block's probe; it broadcasts against one sample of the output."""
        return (output.shape[-1],)

    def gradient_sums(self, grad: Tensor, inputs: tuple[int, ...]) -> Tensor:
        """Block sums of the row gradients [G, r, o] from a probe's gradient [r, …].

        `inputs` is the shape of the call's input.
        """
        return grad.reshape(grad.shape[0], self.shape.stack, -1).transpose(0, 1)


class LinearView(View):
    """`nn.Linear` and its subclasses, on inputs of any rank."""

    def input_sums(self, inputs: Tensor, blocks: int) -> tuple[Tensor, list[int]]:
        """Sums over all leading dimensions of [n, …, i]; a 1-D input is one row."""
        rows = inputs.reshape(-1, inputs.shape[-1])
        per_sample = rows.shape[0] // inputs.shape[0] if inputs.dim() > 1 and rows.numel() else 1
        samples = rows.shape[0] // per_sample
        sums, counts = block_sums(rows, [size * per_sample for size in sizes(samples, blocks)])
        return sums[None], counts


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

    def input_sums(self, inputs: Tensor, blocks: int) -> tuple[Tensor, list[int]]:
        """Sums over samples of the mean patch, from [n, C, *S] or [C, *S]."""
        conv: Any = self.owner
        batch = inputs if self.batched(inputs) else inputs[None]
        image, counts = block_sums(batch, sizes(batch.shape[0], blocks))  # [r, C, *S]
        mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
        image = F.pad(image, conv._reversed_padding_repeated_twice, mode=mode)
        patch = patches(image, conv.kernel_size, conv.stride, conv.dilation, average=True)
        return patch.reshape(blocks, self.shape.stack, -1).transpose(0, 1), counts

    def batched(self, inputs: Tensor) -> bool:
        """Whether an input is [n, C, *S], not [C, *S]."""
        return inputs.dim() == len(self.owner.kernel_size) + 2  # type: ignore[arg-type]

    def probe_shape(self, output: Tensor) -> tuple[int, ...]:
        """One value per channel: autograd sums over positions."""
        dims = len(self.owner.kernel_size)  # type: ignore[arg-type]
        return (output.shape[-dims - 1],) + (1,) * dims


class TransposedConvView(View):
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

    def batched(self, inputs: Tensor) -> bool:
        """Whether an input is [n, C, *S], not [C, *S]."""
        return inputs.dim() == len(self.owner.kernel_size) + 2  # type: ignore[arg-type]

    def input_sums(self, inputs: Tensor, blocks: int) -> tuple[Tensor, list[int]]:
        """Sums over samples of the mean over positions, from [n, C, *S] or [C, *S]."""
        batch = inputs if self.batched(inputs) else inputs[None]
        means = batch.flatten(2).mean(dim=-1, dtype=wide(batch.dtype))  # [n, C]
        sums, counts = block_sums(means, sizes(batch.shape[0], blocks))
        return sums.reshape(blocks, self.shape.stack, -1).transpose(0, 1), counts

    def probe_shape(self, output: Tensor) -> tuple[int, ...]:
        """One image: the patches of its gradient are taken after the batch is summed."""
        dims = len(self.owner.kernel_size)  # type: ignore[arg-type]
        return tuple(output.shape[-dims - 1 :])

    def gradient_sums(self, grad: Tensor, inputs: tuple[int, ...]) -> Tensor:
        """Sum over input positions of the gradient's patches, from [r, C_out, *S_out]."""
        conv: Any = self.owner
        spatial = inputs[-len(conv.kernel_size) :]
        pads: list[int] = []
        for d in reversed(range(len(spatial))):
            extent = conv.dilation[d] * (conv.kernel_size[d] - 1) + 1
            reach = (spatial[d] - 1) * conv.stride[d] + extent
            pads += [conv.padding[d], reach - grad.shape[d + 2] - conv.padding[d]]
        image = F.pad(grad, pads)
        patch = patches(image, conv.kernel_size, conv.stride, conv.dilation, average=False)
        return patch.reshape(grad.shape[0], self.shape.stack, -1).transpose(0, 1)


def sizes(samples: int, blocks: int) -> list[int]:
    """Sizes of `blocks` contiguous blocks of `samples`, as even as possible."""
    bounds = [-(-j * samples // blocks) for j in range(blocks + 1)]
    return [end - start for start, end in itertools.pairwise(bounds)]


def block_of_sample(samples: int, blocks: int, device: torch.device) -> Tensor:
    """Block number of each sample, [n], in agreement with `sizes`."""
    return torch.arange(samples, device=device) * blocks // samples


def block_sums(rows: Tensor, lengths: list[int]) -> tuple[Tensor, list[int]]:
    """Sums of contiguous blocks of rows [N, …] → [r, …], accumulated in float32 or wider."""
    dtype = wide(rows.dtype)
    if len(lengths) == 1:
        fast = rows.device.type == "cpu" and rows.dtype == torch.float32 and rows.is_contiguous()
        if fast and rows.numel():
            # Twice as fast as `sum` on the CPU, at the speed of memory.
            flat = rows.new_ones(1, rows.shape[0]) @ rows.reshape(rows.shape[0], -1)
            return flat.view(1, *rows.shape[1:]), lengths
        return rows.sum(dim=0, keepdim=True, dtype=dtype), lengths
    parts = [part.sum(dim=0, dtype=dtype) for part in rows.split(lengths)]
    return torch.stack(parts), lengths


def attach(output: Tensor, probe: Tensor, batched: bool) -> Tensor:
    """Add a probe [r, …] to an output: block j of the batch gets probe[j]."""
    if probe.shape[0] == 1 or not batched or output.shape[0] == 0:
        return output + probe[0].to(output.dtype)
    tail = probe.shape[1:]
    spread = probe[block_of_sample(output.shape[0], probe.shape[0], output.device)]  # [n, *tail]
    middle = (1,) * (output.dim() - 1 - len(tail))
    return output + spread.view(output.shape[0], *middle, *tail).to(output.dtype)


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
