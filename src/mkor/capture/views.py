"""The matrix view of a module: weights, gradients and rows as stacks of matrices.

One layout serves every layer. A weight is a stack [G, o, i] with an optional bias column, so that
y = W [a; 1] for a row a. A *row* is what the weight multiplies:

| layer | G | rows | a | g |
| ----- | - | ---- | - | - |
| Linear, HF Conv1D | 1 | all leading dimensions | input | output gradient |
| Conv1d/2d/3d | groups | samples | mean patch over positions | sum over positions |
| ConvTranspose | groups | samples | mean over positions | sum of output patches |
| attention input projection | 3 | tokens | query, key, value | output gradient |

Sums are over rows in r contiguous blocks of the batch, so they add up over calls, micro-batches and
workers. Single rows can be had in two ways where a weight is used at several places of a sample:
"expand" takes every token or position as a row, "reduce" one row a sample, the mean of its inputs
and the sum of its gradients.

Shapes: n batch, r blocks, G stack, o outputs, i inputs, C channels, S spatial, K kernel.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from mkor.capture.parameters import Parameters
from mkor.methods.base import LayerShape, wide

BlockSums = tuple[Tensor, list[int]]
"""Block sums of rows, [G, r, d], and the number of rows in each block."""


@dataclass(eq=False)
class View(Parameters, ABC):
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

    spatial: ClassVar[bool] = False  # whether a weight meets every position of a sample

    def __post_init__(self) -> None:
        """Remember parameters that are spread over workers."""
        self.keep()

    @abstractmethod
    def input_sums(self, inputs: Tensor, blocks: int) -> BlockSums:
        """Block sums of the input rows without bias column, and rows per block."""

    @abstractmethod
    def output_sums(self, grad: Tensor, inputs: torch.Size, blocks: int) -> Tensor:
        """Block sums [G, r, o] of the row gradients, from the output gradient of one call.

        `inputs` is the shape of the call's input.
        """

    @abstractmethod
    def samples(self, inputs: torch.Size, shared: str) -> int:
        """Number of samples of a call, by the shape of its input."""

    @abstractmethod
    def input_rows(self, inputs: Tensor, shared: str) -> Tensor:
        """The input rows of a call without bias column, [G, n, i]."""

    @abstractmethod
    def output_rows(self, grad: Tensor, inputs: torch.Size, shared: str) -> Tensor:
        """The row gradients of a call, [G, n, o]."""

    @abstractmethod
    def row_mask(self, mask: Tensor, inputs: torch.Size) -> Tensor | None:
        """Whether each row counts, [n], by a mask of leading dimensions; None if it doesn't fit."""

    @abstractmethod
    def without(self, tensor: Tensor, rows: Tensor) -> Tensor:
        """A call's input or output gradient with zeros where a row doesn't count."""

    def pieces(self, tensor: Tensor, inputs: torch.Size) -> Iterable[Tensor]:
        """A call's input or output gradient in parts whose rows fit into memory."""
        return (tensor,)


class LinearView(View):
    """`nn.Linear` and its subclasses, on inputs of any rank."""

    def input_sums(self, inputs: Tensor, blocks: int) -> BlockSums:
        """Sums over all leading dimensions of [n, …, i]; a 1-D input is one row."""
        rows = inputs.reshape(-1, inputs.shape[-1])
        per_sample = rows.shape[0] // inputs.shape[0] if inputs.dim() > 1 and rows.numel() else 1
        samples = rows.shape[0] // per_sample
        counts = [size * per_sample for size in sizes(samples, blocks)]
        return block_sums(rows, counts)[None], counts

    def output_sums(self, grad: Tensor, inputs: torch.Size, blocks: int) -> Tensor:
        """Sums over all leading dimensions, as of the inputs."""
        return self.input_sums(grad, blocks)[0]

    def samples(self, inputs: torch.Size, shared: str) -> int:
        """Every token is a sample; in "reduce" the first dimension counts them."""
        if len(inputs) == 1:
            return 1
        return inputs[0] if shared == "reduce" else inputs[:-1].numel()

    def input_rows(self, inputs: Tensor, shared: str) -> Tensor:
        """All leading dimensions, or the mean over all but the first."""
        if shared == "reduce" and inputs.dim() > 2:
            return inputs.flatten(1, -2).mean(dim=1, dtype=wide(inputs.dtype))[None]
        return inputs.reshape(1, -1, inputs.shape[-1])

    def output_rows(self, grad: Tensor, inputs: torch.Size, shared: str) -> Tensor:
        """All leading dimensions, or the sum over all but the first."""
        if shared == "reduce" and grad.dim() > 2:
            return grad.flatten(1, -2).sum(dim=1, dtype=wide(grad.dtype))[None]
        return grad.reshape(1, -1, grad.shape[-1])

    def row_mask(self, mask: Tensor, inputs: torch.Size) -> Tensor | None:
        """An entry of the mask goes for all rows that share its leading dimensions."""
        lead = inputs[:-1]
        if lead[: mask.dim()] != mask.shape:
            return None
        rows = mask.reshape(*mask.shape, *[1] * (len(lead) - mask.dim())).expand(lead)
        return rows.reshape(-1)

    def without(self, tensor: Tensor, rows: Tensor) -> Tensor:
        """Rows are all leading dimensions."""
        return tensor.masked_fill(~rows.view(*tensor.shape[:-1], 1), 0)


class HFConv1DView(LinearView):
    """Transformers' `Conv1D`: a linear layer whose weight is stored as [i, o]."""

    output_dim = 1

    def fold(self, weight: Tensor) -> Tensor:
        """[i, o] as [1, o, i]."""
        return weight.mT[None]

    def unfold(self, matrix: Tensor, shape: torch.Size) -> Tensor:
        """[1, o, i] as [i, o]."""
        return matrix[0].mT


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
