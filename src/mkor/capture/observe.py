"""The identity that carries statistics through the backward pass.

`Observe` returns a layer's output unchanged. Its backward passes the gradient on and gives the
layer's leaves their statistics as gradients: the input sums that the forward pass made, and the
output gradient summed in the same blocks. What autograd adds up there is what was back-propagated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mkor.capture.views import View


@dataclass
class Leaves:
    """Zero tensors that require grad; their gradients are the statistics of a layer.

    Attributes:
        inputs: Sums of input rows, with the number of rows as last column, [G, r, i + 1].
        outputs: Sums of row gradients, [G, r, o].
    """

    inputs: Tensor
    outputs: Tensor

    def clear(self) -> None:
        """Forget the statistics."""
        self.inputs.grad = self.outputs.grad = None


class Observe(torch.autograd.Function):
    """The identity on a layer's output, which leaves statistics in the leaves' gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        output: Tensor,
        own: bool,
        view: View,
        shape: torch.Size,
        outputs: Tensor | None,
        *leaves_and_sums: Tensor,
    ) -> Tensor:
        """Keep the input sums, [G, r, i + 1] each, for the backward pass.

        Args:
            ctx: Autograd's context.
            output: The layer's output.
            own: Whether nothing else holds the output, so that it needs no copy.
            view: Sums the output gradient.
            shape: Shape of the call's input.
            outputs: Leaf for the summed output gradient, None where `bias.grad` is used.
            leaves_and_sums: Leaves for the input sums, then the sums, one each a view.
        """
        ctx.view, ctx.shape = view, shape
        ctx.blocks = None if outputs is None else outputs.shape[1]
        ctx.views = len(leaves_and_sums) // 2
        ctx.save_for_backward(*leaves_and_sums[ctx.views :])
        if own:
            ctx.mark_dirty(output)
            return output
        # A view of an input made here could not be edited in place later on.
        return output.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Pass the gradient on; give the sums to the leaves."""
        outputs = None
        if ctx.blocks is not None:
            outputs = ctx.view.output_sums(grad, ctx.shape, ctx.blocks)
        return (grad, None, None, None, outputs, *ctx.saved_tensors, *[None] * ctx.views)


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


def with_counts(sums: Tensor, counts: list[int]) -> Tensor:
    """Block sums [G, r, i] with the number of rows of each block as one more column."""
    # Filled on the device: a copy from the host would wait for it.
    parts = [
        F.pad(block, (0, 1), value=count)
        for block, count in zip(sums.split(1, dim=1), counts, strict=True)
    ]
    return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]
