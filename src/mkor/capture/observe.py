"""The identity that carries statistics through the backward pass.

`Observe` returns a layer's output unchanged. Its backward passes the gradient on and gives the
layer's leaves their statistics as gradients: the input fold that the forward pass made, and the
fold of the output gradient. What autograd adds up there is what was back-propagated.

Rows don't add up. `ObserveRows` keeps the input that the layer's own backward needs anyway, and
hands the rows of a call to a `RowLeaf` in the backward pass. They count once the leaf's token gets
its gradient: in a pass for input gradients alone it gets none.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mkor.capture.folds import fold_outputs, input_shape, output_shape
from mkor.capture.views import View
from mkor.distributed.sharded import laid_as, placements_of
from mkor.methods.base import Compress, Kind, Sketch, wide


@dataclass
class Leaves:
    """Zero tensors that require grad; their gradients are the folds of a layer (see `folds`).

    Attributes:
        inputs: The input side.
        outputs: The output side.
        seed: What a sketch makes its signs from in this step, a scalar.
        fed: Of each call that was not compiled, whether its input needed no gradient.
    """

    inputs: Tensor
    outputs: Tensor
    seed: Tensor
    fed: list[bool] = field(default_factory=list)

    @classmethod
    def beside(cls, view: View, kinds: tuple[Kind, Kind], seed: int) -> Leaves:
        """Leaves on the device of the view's weight."""
        shapes = (input_shape(kinds[0], view), output_shape(kinds[1], view))
        number = torch.zeros((), dtype=torch.int64, device=view.weight.device)
        inputs, outputs = (leaf(view.weight, shape) for shape in shapes)
        leaves = cls(inputs, outputs, number)
        if isinstance(kinds[0], Sketch):
            leaves.begin(view.name, seed)
        return leaves

    def begin(self, name: str, seed: int) -> None:
        """Other signs for a layer in a step."""
        self.seed.fill_(zlib.crc32(f"{name} {seed}".encode()))

    @property
    def mark(self) -> Tensor:
        """A tensor whose device and dtype are those of the leaves."""
        return self.inputs

    def note(self, inputs: tuple[Tensor, ...]) -> None:
        """Note where the inputs of a call come from, unless it is compiled."""
        if not torch.compiler.is_compiling():
            self.fed.append(not any(tensor.requires_grad for tensor in inputs))

    def clear(self) -> None:
        """Forget the statistics."""
        self.inputs.grad = self.outputs.grad = None
        self.fed.clear()


def begin(
    leaves: Mapping[str, Leaves | RowLeaf], kinds: dict[str, tuple[Kind, Kind]], seed: int
) -> None:
    """Begin a step for the layers that are sketched."""
    for name, own in leaves.items():
        if isinstance(own, Leaves) and isinstance(kinds[name][0], Sketch):
            own.begin(name, seed)


Keep = Callable[[Tensor, Tensor, int | Tensor], None]
"""Takes the rows of a call, those that don't count as zeros, and the number of the others."""


class RowLeaf:
    """The rows of a layer's calls, and a token whose gradient says which of them count.

    Attributes:
        mark: The token, a zero that requires grad, on the device and in the dtype of the rows.
        seen: What was kept of each call that counts.
        rows: Number of rows of those calls; a scalar tensor where a mask left out some.
    """

    def __init__(self, view: View) -> None:
        """Empty."""
        self.name = view.name
        self.mark = leaf(view.weight, ())
        self.mark.register_hook(self.confirm)
        self.clear()

    def clear(self) -> None:
        """Forget the rows."""
        self.pending: list[tuple[int, int | Tensor, dict[str, Tensor]]] = []
        self.seen: list[dict[str, Tensor]] = []
        self.rows: int | Tensor = 0

    def keeper(self, compress: Compress | None, seed: int) -> Keep:
        """A function that takes the rows a [G, n, i] and g [G, n, o] of a call when called."""

        def keep(inputs: Tensor, grads: Tensor, rows: int | Tensor) -> None:
            kept = {"inputs": inputs, "grads": grads}
            if compress is not None:
                number = len(self.seen) + len(self.pending)
                kept = compress(inputs, grads, zlib.crc32(f"{self.name} {seed} {number}".encode()))
            task = torch._C._current_graph_task_id()
            self.pending.append((task, rows, kept))

        return keep

    def confirm(self, _: Tensor) -> None:
        """Count the rows of this backward pass; those of others never got a gradient."""
        task = torch._C._current_graph_task_id()
        for other, rows, kept in self.pending:
            if other == task:
                self.seen.append(kept)
                self.rows += rows
        self.pending.clear()


def leaf(weight: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Zeros beside a weight that require grad; one number in memory, whatever the shape."""
    # Without elements it is contiguous: torch warns where gradients of others are added up.
    own = shape if 0 in shape else ()
    zero = torch.zeros(own, dtype=wide(weight.dtype)).to(weight.device)
    return zero.expand(shape).requires_grad_()


class Observe(torch.autograd.Function):
    """The identity on a layer's output, which leaves statistics in the leaves' gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        output: Tensor,
        own: bool,
        view: View,
        shape: torch.Size,
        kind: Kind,
        outputs: Tensor | None,
        start: Tensor,
        mask: Tensor | None,
        *leaves_and_folds: Tensor,
    ) -> Tensor:
        """Keep the input folds for the backward pass.

        Args:
            ctx: Autograd's context.
            output: The layer's output.
            own: Whether nothing else holds the output, so that it needs no copy.
            view: Folds the output gradient.
            shape: Shape of the call's input.
            kind: What the output gradient is folded to.
            outputs: Leaf for that, None where `bias.grad` is used.
            start: For the signs of a sketch.
            mask: Which rows count, [n]; None if all do.
            leaves_and_folds: Leaves for the input folds, then the folds, one each a view.
        """
        ctx.view, ctx.shape = view, shape
        ctx.kind = None if outputs is None else kind
        ctx.placements = placements_of(output)
        ctx.views = len(leaves_and_folds) // 2
        ctx.save_for_backward(start, mask, *leaves_and_folds[ctx.views :])
        return passed_on(ctx, output, own)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Pass the gradient on; give the folds to the leaves."""
        outputs = None
        start, mask, *folds = ctx.saved_tensors
        if ctx.kind is not None:
            with torch.no_grad(), torch.autocast(grad.device.type, enabled=False):
                part, own = ctx.view.part, laid_as(grad, ctx.placements)
                rows = part.rows(own, ctx.shape)
                fold = fold_outputs(ctx.kind, ctx.view, rows, ctx.shape, start, mask)
                outputs = part.output_share(fold, divided=rows is not own)
        return (grad, *[None] * 4, outputs, None, None, *folds, *[None] * ctx.views)


class ObserveRows(torch.autograd.Function):
    """The identity on a layer's output, which hands the rows of the call to a `RowLeaf`."""

    @staticmethod
    def forward(
        ctx: Any,
        output: Tensor,
        own: bool,
        view: View,
        keep: Keep,
        mark: Tensor,
        inputs: Tensor,
        mask: Tensor | None,
    ) -> Tensor:
        """Keep the input, which the layer's own backward keeps as well."""
        ctx.view, ctx.keep, ctx.dtype = view, keep, mark.dtype
        ctx.save_for_backward(inputs, mask)
        return passed_on(ctx, output, own)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Pass the gradient on; keep the rows."""
        view, (inputs, mask) = ctx.view, ctx.saved_tensors
        shared = "reduce" if view.spatial else "expand"
        with torch.no_grad(), torch.autocast(grad.device.type, enabled=False):
            a = view.input_rows(inputs, shared).to(ctx.dtype)  # [G, n, i]
            if view.has_bias_column:
                a = F.pad(a, (0, 1), value=1.0)
            g = view.output_rows(grad, inputs.shape, shared).to(ctx.dtype)
            rows: int | Tensor = a.shape[1]
            if mask is not None:
                a, g = (side.masked_fill(~mask[:, None], 0) for side in (a, g))
                rows = mask.sum(dtype=ctx.dtype)
            ctx.keep(a, g, rows)
        return (grad, None, None, None, grad.new_zeros((), dtype=ctx.dtype), None, None)


def passed_on(ctx: Any, output: Tensor, own: bool) -> Tensor:
    """The output itself, marked as edited in place, where nothing else holds it; else a copy."""
    if own:
        ctx.mark_dirty(output)
        return output
    # A view of an input made here could not be edited in place later on.
    return output.clone()


PLAIN = {
    cls.forward
    for cls in (
        nn.Linear,
        *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
        *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    )
}
"""Forwards whose result is new and not kept for their own backward."""


def fresh(module: nn.Module) -> bool:
    """Whether a module's output belongs to nobody else: torch's own forward, no other hook."""
    alone = len(module._forward_hooks) == 1 and not torch.compiler.is_compiling()
    return alone and type(module).forward in PLAIN
