"""What the rows of a call are reduced to, by the kind that a method wants.

A fold of sums or moments is one tensor a side that adds up over calls, so it can be the gradient of
a leaf (see `observe`). Counts travel in the same tensor: a separate one would cost a leaf more.

| kind | input side | output side |
| ---- | ---------- | ----------- |
| sums | [G, r, i + 1], the last column counts rows | [G, r, o] |
| moment | [G, i + 2, i + 1], the moment of [a; 1], a row of the sample count | [G, o, o] |
| sketch | [G, r + 1, i + 1], signed sums of [a; 1], a row that ends with both counts | [G, r, o] |

Shapes: G stack, r blocks, n rows, i inputs without bias column, o outputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mkor.capture.attention import AttentionInputView
from mkor.capture.mask import counted, masked_sums, mean_scale, samples_mask
from mkor.capture.sketch import first_number, sketch_inputs, sketch_outputs
from mkor.capture.views import View
from mkor.linalg import add_gram_
from mkor.methods.base import Kind, Moment, Sketch, Sums, wide


def sources(view: View, inputs: tuple[Tensor, ...], operand: Tensor | None) -> list[Tensor]:
    """The tensors whose rows a call multiplies by the view's weight; none where not seen."""
    if isinstance(view, AttentionInputView):
        return [inputs[source].detach() for source in view.sources]
    if isinstance(view.hooked, nn.MultiheadAttention):
        return [] if operand is None else [operand]
    return [inputs[0].detach()]


def input_shape(kind: Kind, view: View) -> tuple[int, ...]:
    """Shape of the input fold of a layer."""
    side = view.shape.inputs + (not view.has_bias_column)  # i + 1
    if isinstance(kind, Sums):
        return view.shape.stack, kind.blocks, side
    if isinstance(kind, Sketch):
        return view.shape.stack, kind.vectors + 1, side
    matrix = isinstance(kind, Moment) and kind.matrix
    return view.shape.stack, side + 1 if matrix else 2, side


def output_shape(kind: Kind, view: View) -> tuple[int, ...]:
    """Shape of the output fold of a layer."""
    side = view.shape.outputs
    if isinstance(kind, Sketch):
        return view.shape.stack, kind.vectors, side
    rows = kind.blocks if isinstance(kind, Sums) else side
    return view.shape.stack, rows if not isinstance(kind, Moment) or kind.matrix else 0, side


def fold_call(
    kind: Kind, view: View, tensors: list[Tensor], seed: Tensor, masks: list[Tensor] | None
) -> tuple[Tensor, Tensor]:
    """What the signs of a call are made of, if the kind has signs, and its input fold.

    Args:
        kind: What the rows are reduced to.
        view: The layer.
        tensors: What `sources` found.
        seed: The hash of step, batch and layer.
        masks: Which rows of each source count, [n] each; None if all do.
    """
    if isinstance(kind, Sketch):
        seed = first_number(seed, tensors[0], None if masks is None else masks[0], view.part)
    return seed, view.part.input_share(kind, fold_inputs(kind, view, tensors, seed, masks))


def fold_inputs(
    kind: Kind,
    view: View,
    tensors: list[Tensor],
    start: Tensor,
    masks: list[Tensor] | None = None,
) -> Tensor:
    """The input fold of one call, from the tensors that `sources` found.

    Args:
        kind: What the rows are reduced to.
        view: The layer.
        tensors: The sources.
        start: See `fold_call`.
        masks: Which rows of each source count, [n] each; None if all do.
    """
    if masks is not None:
        tensors = [view.without(t, mask) for t, mask in zip(tensors, masks, strict=True)]
    if isinstance(kind, Sketch):
        return sketch_inputs(view, tensors, kind.vectors, start, masks)
    if isinstance(kind, Moment):
        each: Sequence[Tensor | None] = [None] * len(tensors) if masks is None else masks
        pairs = zip(tensors, each, strict=True)
        parts = [input_moment(view, tensor, kind, mask) for tensor, mask in pairs]
        scales = [parts[0][:, -1, -1] / part[:, -1, -1].clamp_min(1) for part in parts[1:]]
        # As many rows as the first source has, so that each keeps its own mean.
        parts[1:] = [part * scale for part, scale in zip(parts[1:], scales, strict=True)]
        return torch.cat(parts) if len(parts) > 1 else parts[0]
    assert isinstance(kind, Sums)
    if masks is not None:
        return masked_sums(view, tensors, kind.blocks, masks)
    if isinstance(view, AttentionInputView):
        return with_counts(*view.call_sums(tensors, kind.blocks))
    return with_counts(*view.input_sums(tensors[0], kind.blocks))


def fold_outputs(
    kind: Kind,
    view: View,
    grad: Tensor,
    inputs: torch.Size,
    start: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """The output fold of one call, from its output gradient and the shape of its input.

    `mask` says which rows count, [n]; None if all do.
    """
    if mask is not None:
        grad = view.without(grad, mask)
    if isinstance(kind, Sketch):
        assert start is not None
        return sketch_outputs(view, grad, inputs, kind.vectors, start, mask)
    if isinstance(kind, Sums):
        return view.output_sums(grad, inputs, kind.blocks)
    assert isinstance(kind, Moment)
    shape = output_shape(kind, view)
    out = grad.new_zeros(shape, dtype=wide(grad.dtype))
    for piece in view.pieces(grad, inputs) if kind.matrix else ():
        own = inputs if piece is grad else (piece.shape[0], *inputs[1 - piece.dim() :])
        add_gram_(out, view.output_rows(piece, torch.Size(own), kind.shared).to(out.dtype))
    return out


def input_moment(view: View, tensor: Tensor, kind: Moment, mask: Tensor | None = None) -> Tensor:
    """Σ[a; 1][a; 1]ᵀ over the rows of one tensor, with a last row of the number of samples.

    `mask` says which rows count, [n]; the tensor is zero in the others.
    """
    side, dtype = view.shape.inputs - view.has_bias_column, wide(tensor.dtype)
    stack = 1 if isinstance(view, AttentionInputView) else view.shape.stack
    above = side if kind.matrix else 0  # rows of the fold above the one of sums
    out = tensor.new_zeros(stack, above + 2, side + 1, dtype=dtype)
    rows: int | Tensor = 0
    means = mask is not None and kind.shared == "reduce" and not view.spatial
    for piece in view.pieces(tensor, tensor.shape):
        part = view.input_rows(piece, kind.shared).to(dtype)  # [G, n, i]
        if means:
            assert mask is not None
            part = part * mean_scale(view, mask, tensor.shape, dtype)
        if kind.matrix:
            add_gram_(out[:, :side, :side], part)
        out[:, above, :side] += part.sum(dim=1)
        rows += part.shape[1]
    samples: int | Tensor = view.samples(tensor.shape, kind.shared)
    if mask is not None:
        count = samples_mask(view, mask, tensor.shape, kind.shared)
        rows, samples = (counted(count, number, dtype) for number in (int(rows), int(samples)))
    out[:, :above, side] = out[:, above, :above]
    out[:, above, side].fill_(rows)
    out[:, above + 1].fill_(samples)
    return out


def with_counts(sums: Tensor, counts: list[int]) -> Tensor:
    """Block sums [G, r, i] with the number of rows of each block as one more column."""
    # Filled on the device: a copy from the host would wait for it.
    parts = [
        F.pad(block, (0, 1), value=count)
        for block, count in zip(sums.split(1, dim=1), counts, strict=True)
    ]
    return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]


def bias_tells(view: View, kind: Kind) -> bool:
    """Whether a bias gradient, where it shows the sum of output gradients, is all that is taken.

    The input projection of an attention has nothing else to show: its sketch is one-sided.
    """
    return isinstance(kind, Sums) or (
        isinstance(kind, Sketch) and isinstance(view, AttentionInputView)
    )


def observable(view: View, outputs: Kind) -> str | None:
    """Why a view can't show its output gradients in the way that is wanted, or None."""
    summed = isinstance(outputs, (Sums, Sketch))
    if isinstance(view, AttentionInputView) and not summed:
        return "its output gradient is inside the attention and can't be observed row by row"
    return None
