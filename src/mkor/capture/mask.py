"""Which rows count: what a mask leaves out of the statistics.

A mask has one entry a row in the leading dimensions of a layer's input, such as [batch, tokens]. A
view maps it to its own rows (`View.row_mask`). Rows that don't count become zero, so that sums,
moments, sketches and rows hold nothing of them, and what is left is to count the others: on the
device, since a mask is never read back.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mkor.capture.views import View
from mkor.methods.base import wide

Shapes = tuple[torch.Size, str, torch.Size]
"""A mask's shape, a layer's name, and the shape of its input."""


def check_mask(mask: object) -> None:
    """Check the type of a mask; whether it fits shows in a forward pass.

    Raises:
        TypeError: It is no tensor of booleans or integers.
        ValueError: It has no dimension.
    """
    if not isinstance(mask, Tensor):
        raise TypeError(f"mask must be a tensor or None, got {type(mask).__name__}")
    if mask.is_floating_point() or mask.is_complex():
        raise TypeError(
            f"mask is {mask.dtype}, which could be a mask that is added to attention scores: pass "
            "booleans or integers, true or not 0 where a row counts"
        )
    if mask.dim() == 0:
        raise ValueError(
            "mask has no dimension: it must have those of a layer's input without the last one, "
            "such as [batch, tokens], or the first of them"
        )


class RowMask:
    """The mask of the forward passes that come, and whether it fitted any of them."""

    def __init__(self) -> None:
        """Every row counts."""
        self.clear()

    def clear(self) -> None:
        """Every row counts from here on."""
        self.mask: Tensor | None = None
        self.spent = False
        self.fits = False
        self.other: tuple[str, torch.Size] | None = None
        self.misfit: Shapes | None = None

    def set(self, mask: Tensor | None) -> None:
        """Mask the forward passes that come, up to the next mask."""
        self.settle()
        self.mask = None if mask is None else mask.detach().to(torch.bool)
        self.fits, self.other, self.spent = False, None, False

    def spend(self) -> None:
        """End with the batch that is dropped, unless none has been masked yet."""
        self.spent = self.spent or self.fits or self.other is not None

    def over(self) -> bool:
        """Whether the mask is spent; a backward pass may still recompute layers under it."""
        again = not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
        return self.spent and not again

    def of(self, view: View, tensors: list[Tensor]) -> list[Tensor] | None:
        """Whether each row of a call's inputs counts, [n] an input; None if all of them do."""
        if self.mask is None or self.over():
            return None
        own = [view.row_mask(self.mask, tensor.shape) for tensor in tensors]
        if all(mask is None for mask in own):
            if not torch.compiler.is_compiling():
                self.other = view.name, tensors[0].shape
            return None
        self.fits = True
        return [
            every(view, tensor) if mask is None else mask.to(tensor.device)
            for mask, tensor in zip(own, tensors, strict=True)
        ]

    def settle(self) -> None:
        """Note a mask that fitted none of the calls it was meant for."""
        if self.mask is not None and not self.fits and self.other is not None:
            self.misfit = (self.mask.shape, *self.other)

    def check(self) -> None:
        """Raise ValueError if a mask of this step fitted no layer."""
        self.settle()
        if self.misfit is None:
            return
        mask, name, shape = self.misfit
        raise ValueError(
            f"the mask of shape {list(mask)} fits no layer: a mask has the leading dimensions of "
            f"a layer's input, and '{name}' has inputs of shape {list(shape)}. Nothing was "
            "changed; call zero_grad(), and set_mask(...) with another mask or None"
        )

    def forgive(self) -> None:
        """Forget masks that didn't fit, with the gradients of their batches."""
        self.fits, self.other, self.misfit = False, None, None


def every(view: View, tensor: Tensor) -> Tensor:
    """A mask under which all rows of an input count."""
    rows = view.samples(tensor.shape, "expand")
    return torch.ones(rows, dtype=torch.bool, device=tensor.device)


def counted(mask: Tensor, places: int, dtype: torch.dtype) -> Tensor:
    """How many of `places` rows count, a scalar; several may belong to one entry of the mask."""
    return mask.sum(dtype=dtype) * (places // max(mask.numel(), 1))


def counted_in_blocks(mask: Tensor, lengths: list[int], dtype: torch.dtype) -> Tensor:
    """How many rows of each contiguous block count, [r]."""
    return torch.stack([part.sum(dtype=dtype) for part in mask.split(lengths)])


def samples_mask(view: View, mask: Tensor, inputs: torch.Size, shared: str) -> Tensor:
    """Whether each sample counts, [n]: with "reduce", one that has a row that does."""
    if view.spatial or shared == "expand":
        return mask
    return by_sample(view, mask, inputs).any(dim=1)


def by_sample(view: View, mask: Tensor, inputs: torch.Size) -> Tensor:
    """A mask of rows [n · p] as [n, p] for the p places of each sample."""
    samples = view.samples(inputs, "reduce")
    return mask.view(samples, mask.numel() // max(samples, 1))


def mean_scale(view: View, mask: Tensor, inputs: torch.Size, dtype: torch.dtype) -> Tensor:
    """What turns a sample's mean over all of its rows into one over those that count, [n, 1]."""
    rows = by_sample(view, mask, inputs)
    return rows.shape[1] / rows.sum(dim=1, keepdim=True, dtype=dtype).clamp_min(1)


def masked_sums(view: View, tensors: list[Tensor], blocks: int, masks: list[Tensor]) -> Tensor:
    """Block sums of rows that count, [G, r, i + 1], the last column their number.

    Args:
        view: The layer.
        tensors: A call's inputs, zero where a row doesn't count.
        blocks: r.
        masks: Whether each row counts, [n] an input.
    """
    parts: list[Tensor] = []
    first: Tensor | None = None
    for tensor, mask in zip(tensors, masks, strict=True):
        sums, lengths = view.input_sums(tensor, blocks)  # [G, r, i]
        counts = counted_in_blocks(mask, lengths, wide(tensor.dtype))[:, None]
        first = counts if first is None else first
        # As many rows as the first source has, so that each keeps its own mean.
        sums = sums * (first / counts.clamp_min(1)) if len(tensors) > 1 else sums
        parts.append(torch.cat([sums, first.expand(len(sums), -1, -1).to(sums.dtype)], dim=-1))
    return torch.cat(parts)
