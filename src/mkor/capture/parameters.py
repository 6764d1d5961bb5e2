"""The weight and bias of a layer as a stack of matrices, and their gradients.

Where they are spread over workers, a method gets the whole matrix, gathered, or the block that this
worker holds (see `Block`). What is summed up of a gradient, such as its norm, is then a worker's
share: shares add up over the workers that hold the blocks.

Shapes: G stack, o outputs, i inputs.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mkor.blocks import Block
from mkor.capture.part import Part
from mkor.distributed.comm import is_sharded
from mkor.distributed.sharded import (
    Cut,
    alike,
    copy_block_,
    cuts,
    groups_of,
    laid_like,
    local,
    placed,
    whole,
)
from mkor.methods.base import LayerShape, wide

Groups = tuple[Any, ...]
"""Process groups, over each of which in turn a sum is taken."""


class Parameters:
    """One weight with its bias, and how they make a matrix."""

    name: str
    owner: nn.Module
    weight_name: str
    bias_name: str | None
    shape: LayerShape
    bias_rows: tuple[int | None, int | None]
    column: bool
    kept: dict[str, Tensor]
    part: Part

    output_dim: ClassVar[int] = 0  # of the weight; the inputs' is the other of the first two

    def keep(self) -> None:
        """Remember parameters that FSDP2 replaces by gathered ones while the module runs."""
        names = [name for name in (self.weight_name, self.bias_name) if name is not None]
        own = {name: self.owner._parameters[name] for name in names}
        self.kept = {name: p for name, p in own.items() if p is not None and is_sharded(p)}
        self.part = Part()

    def parameter(self, name: str) -> Tensor | None:
        """The parameter that is optimized.

        Raises:
            RuntimeError: The module doesn't have it any more.
        """
        if name not in self.owner._parameters:
            raise RuntimeError(
                f"the {name} of layer '{self.name}' is no parameter any more: it was pruned, "
                "parametrised or deleted after the optimizer was built; build the optimizer anew "
                "after such changes"
            )
        held, kept = self.owner._parameters[name], self.kept.get(name)
        return held if kept is None or (held is not None and alike(held, kept)) else kept

    @property
    def weight(self) -> Tensor:
        """The weight parameter."""
        weight: Tensor = self.parameter(self.weight_name)  # type: ignore[assignment]
        return weight

    @property
    def bias(self) -> Tensor | None:
        """The bias parameter, if any."""
        return self.parameter(self.bias_name) if self.bias_name else None

    @property
    def has_bias_column(self) -> bool:
        """Whether the last column of the matrix is the bias."""
        return self.column and self.bias_name is not None

    @property
    def scattered(self) -> bool:
        """Whether the weight is spread over workers."""
        return bool(self.kept)

    def gradient(self) -> Tensor | None:
        """The gradient of the weight, if there is a dense one."""
        grad = self.weight.grad
        return None if grad is None or grad.layout != torch.strided else grad

    def bias_gradient(self) -> Tensor | None:
        """The gradient of the bias, of other parts of an attention as well; or None."""
        return None if self.bias is None else self.bias.grad

    def settle(self) -> None:
        """Lay gradients out as their parameters, if workers have yet to add them up.

        Raises:
            RuntimeError: A parameter was sharded since the layer was found.
        """
        self.check_kept()
        for name in self.kept:
            parameter = self.parameter(name)
            if parameter is not None and parameter.grad is not None:
                parameter.grad = laid_like(parameter.grad, parameter)

    def check_kept(self) -> None:
        """Raise RuntimeError if a parameter was sharded since the layer was found."""
        for name in (self.weight_name, self.bias_name):
            held = self.owner._parameters.get(name) if name is not None else None
            if held is not None and name not in self.kept and is_sharded(held):
                raise RuntimeError(
                    f"the {name} of layer '{self.name}' was sharded after the optimizer was built, "
                    "which takes it for whole: build the optimizer after fully_shard. Where a "
                    "framework shards a model together with its optimizer, give it the base "
                    "optimizer, and build mkor's around what becomes of that. Nothing was changed"
                )

    def groups(self) -> tuple[Groups, Groups]:
        """Groups over which shares of the weight's gradient add up, and those of the bias's."""
        return groups_of(self.weight), () if self.bias is None else groups_of(self.bias)

    def bias_share(self) -> Tensor | None:
        """This worker's share of this layer's part of the bias gradient, [G, 1, o], or None."""
        grad = self.bias_gradient()
        if grad is None:
            return None
        return placed(local(grad), grad)[slice(*self.bias_rows)].reshape(self.shape.stack, 1, -1)

    def norm_share(self) -> Tensor:
        """Frobenius norm of each matrix of the weight's gradient, [G]; zero where there is none.

        It is the squares of shares that add up.
        """
        grad, stack, dtype = self.gradient(), self.shape.stack, wide(self.weight.dtype)
        if grad is None:
            return torch.zeros(stack, dtype=dtype, device=self.weight.device)
        norm: Tensor
        if is_sharded(grad):
            rows = torch.linalg.vector_norm(local(grad).flatten(1), dim=1, dtype=dtype)
            norm = torch.linalg.vector_norm(placed(rows, grad).view(stack, -1), dim=1)
        else:
            norm = torch.linalg.vector_norm(self.fold(grad), dim=(-2, -1), dtype=dtype)
        return norm

    def square_share(self) -> Tensor:
        """The squared norm of the weight's gradient, as a scalar whose mean over workers is it."""
        parts = math.prod(cut.parts for cut in cuts(self.weight).values())
        return self.norm_share().square().sum() * parts

    def checksums(self, gradient: Tensor) -> Tensor:
        """A few sums of the weight gradient's entries, [G, o], to compare it with later."""
        if not is_sharded(gradient):
            return self.fold(gradient)[..., ::2].sum(dim=-1, dtype=wide(gradient.dtype))
        entries = local(gradient).flatten()[::2].to(wide(gradient.dtype))
        size = self.shape.stack * self.shape.outputs
        sums = F.pad(entries, (0, -len(entries) % size)).view(-1, size).sum(dim=0)
        return sums.view(self.shape.stack, self.shape.outputs)

    def block(self) -> Block | None:
        """What this worker holds of the matrix, if that is a block of a single one; else None."""
        own = cuts(self.weight)
        if not own or self.shape.stack > 1 or any(dim > 1 for dim in own):
            return None
        outputs, inputs = self.cut(own, self.output_dim), self.cut(own, 1 - self.output_dim)
        sides = slice(outputs.start, outputs.stop), slice(inputs.start, inputs.stop)
        # All workers that hold some of a row have its bias at hand; the first of them counts it.
        return Block(*sides, self.has_bias_column, inputs.start == 0)

    def block_groups(self) -> tuple[Groups, Groups]:
        """Groups of the workers with other outputs, and of those with other inputs."""
        own = cuts(self.weight)
        return tuple(self.cut(own, d).groups for d in (self.output_dim, 1 - self.output_dim))  # type: ignore[return-value]

    def cut(self, own: dict[int, Cut], dim: int) -> Cut:
        """This worker's part of a side of the matrix, by the dimension of the weight."""
        # Kernels lie behind the second dimension: an entry of that is several of the side.
        each = self.weight.shape[2:].numel() if dim == 1 else 1
        cut = own.get(dim, Cut(0, self.weight.shape[dim]))
        return Cut(cut.start * each, cut.stop * each, cut.groups)

    def matrix(self, block: Block | None = None) -> Tensor:
        """The gradient as a new stack [G, o, i] in float32 or wider, or a block [1, o', i'] of it.

        Absent parts are zero. Without `block`, a gradient that is spread over workers is gathered.
        """
        grad = self.weight.grad
        assert grad is not None
        out = self.fold(whole(grad) if block is None else local(grad))
        if self.has_bias_column:
            out = torch.cat([out, self.bias_column(out, block)], dim=-1)
        return out.to(wide(out.dtype))

    def columns(self) -> list[Tensor] | None:
        """The gradients themselves as pieces [G, o, …] of the columns of the matrix.

        None where they are spread over workers, narrower than float32, of two dtypes or in another
        order.
        """
        bias = self.bias_gradient() if self.has_bias_column else None
        grads = [grad for grad in (self.gradient(), bias) if grad is not None]
        wanted = wide(self.weight.dtype)
        plain = all(grad.is_contiguous() and grad.dtype == wanted for grad in grads)
        if self.scattered or not plain:
            return None
        out = [self.fold(grads[0])]
        return out if bias is None else [*out, self.bias_column(out[0], None)]

    def bias_column(self, beside: Tensor, block: Block | None) -> Tensor:
        """The bias gradient as a column [G, o, 1] beside the rows of a matrix."""
        grad = self.bias_gradient()
        if grad is None:
            return beside.new_zeros(*beside.shape[:2], 1)
        if block is not None and groups_of(grad) == self.block_groups()[0]:
            return local(grad).view(1, -1, 1)  # split as the rows are
        first, last = self.bias_range(block)
        return whole(grad)[first:last].reshape(self.shape.stack, -1, 1)

    def bias_range(self, block: Block | None) -> tuple[int, int]:
        """Which entries of the bias belong to a matrix, or to the rows of a block of it."""
        assert self.bias is not None
        first, last, _ = slice(*self.bias_rows).indices(len(self.bias))
        if block is None:
            return first, last
        return first + block.outputs.start, first + block.outputs.stop

    def present(self, matrix: Tensor) -> Tensor:
        """Zero in place the bias column of a matrix [G, o, i] where the bias has no gradient."""
        if self.has_bias_column and self.bias_gradient() is None:
            matrix[..., -1] = 0
        return matrix

    def write(self, matrix: Tensor, block: Block | None = None) -> None:
        """Overwrite the gradients with `matrix`, keeping strides and dtypes; needs `no_grad`.

        Args:
            matrix: [G, o, i], or a block [1, o', i'] of it.
            block: Which block, if it is one.
        """
        grad = self.weight.grad
        assert grad is not None
        if self.column and self.bias is not None:
            if self.bias.grad is not None:
                self.write_bias(matrix[..., -1].reshape(-1), *self.bias_range(block))
            matrix = matrix[..., :-1]
        if block is None:
            copy_block_(grad, self.unfold(matrix, grad.shape))
        else:
            own = local(grad)
            own.copy_(self.unfold(matrix, own.shape))

    def write_bias(self, column: Tensor, first: int, last: int) -> None:
        """Overwrite the entries from `first` to `last` of the bias gradient, as far as held."""
        grad = self.bias_gradient()
        assert grad is not None
        cut = cuts(grad).get(0, Cut(0, len(grad)))
        start, stop = max(first, cut.start), min(last, cut.stop)
        if start < stop:
            own = local(grad)[start - cut.start : stop - cut.start]
            own.copy_(column[start - first : stop - first])

    def scale(self, factor: Tensor) -> None:
        """Multiply the gradients in place."""
        weight, bias = self.weight, self.bias_gradient()
        assert weight.grad is not None
        local(weight.grad).mul_(factor)
        if self.column and bias is not None:
            first, last = self.bias_range(None)
            cut = cuts(bias).get(0, Cut(0, len(bias)))
            start, stop = max(first, cut.start), min(last, cut.stop)
            local(bias)[start - cut.start : max(start, stop) - cut.start].mul_(factor)

    def weights(self) -> Tensor:
        """The weight with its bias column, [G, o, i], in float32 or wider; gathered if spread."""
        out = self.fold(whole(self.weight.detach()))
        if self.has_bias_column and self.bias is not None:
            bias = whole(self.bias.detach())[slice(*self.bias_rows)]
            out = torch.cat([out, bias.reshape(*out.shape[:2], 1)], dim=-1)
        return out.to(wide(out.dtype))

    def fold(self, weight: Tensor) -> Tensor:
        """A tensor of the weight's shape, or a block of it, as [G, o, i] without bias column."""
        flat = weight.flatten(1)
        return flat.reshape(self.shape.stack, len(flat) // self.shape.stack, flat.shape[1])

    def unfold(self, matrix: Tensor, shape: torch.Size) -> Tensor:
        """The inverse of `fold`."""
        return matrix.reshape(shape)
