"""From a layer's leaves to what its method receives."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mkor.capture.discover import Layer
from mkor.capture.folds import bias_tells, input_shape, output_shape
from mkor.capture.observe import Leaves, RowLeaf
from mkor.capture.views import View
from mkor.methods.base import Kind, Moment, Rows, Seen, Sketch, wide


def collected(
    layer: Layer, leaves: Leaves | RowLeaf, kinds: tuple[Kind, Kind], shown: Tensor | None
) -> Seen | None:
    """What a layer showed in the calls that were back-propagated, or None.

    Args:
        layer: The layer.
        leaves: Its leaves.
        kinds: What is kept of the inputs and of the output gradients.
        shown: Sums of its weight gradient as it arrived, if they were noted.
    """
    if isinstance(leaves, RowLeaf):
        seen = rows_seen(layer.view, leaves)
    else:
        seen = folds_seen(layer, leaves, kinds)
    if seen is None or shown is None:
        return seen
    return replace(seen, shown=shown, true=true_sums(layer.view))


def folds_seen(layer: Layer, leaves: Leaves, kinds: tuple[Kind, Kind]) -> Seen | None:
    """Sums, moments and sketches as they stand in the leaves' gradients."""
    view = layer.view
    if leaves.inputs.grad is None:
        return None
    seen = inputs_seen(view, kinds[0], leaves.inputs.grad.detach())
    bias = view.bias_gradient() if bias_tells(view, kinds[1]) else None
    if bias is not None and layer.bias_shows_gradient:
        return replace(seen, grads=bias.detach().to(seen.inputs.dtype), grads_reduced=True)
    if leaves.outputs.grad is None:
        return None
    return replace(seen, grads=leaves.outputs.grad.detach())


def inputs_seen(view: View, kind: Kind, fold: Tensor) -> Seen:
    """The input side of a fold (see `folds`), with no output gradient yet."""
    side = view.shape.inputs
    empty, norm = fold[:, :0], view.gradient_norm()
    if isinstance(kind, Moment):
        above = side if kind.matrix else 0
        matrix, rows, samples = fold[:, :above, :above], fold[0, -2, -1:], fold[0, -1, -1:]
        sums = fold[:, -2, :side]
        return Seen(matrix, empty, rows, norm, False, samples=samples, input_sums=sums)
    if isinstance(kind, Sketch):
        rows, samples = fold[0, -1, -1:], fold[0, -1, -2:-1]
        return Seen(fold[:, :-1, :side], empty, rows, norm, False, samples=samples)
    return Seen(fold[..., :side], empty, fold[0, :, -1], norm, False)


def rows_seen(view: View, leaves: RowLeaf) -> Seen | None:
    """The rows of all calls, concatenated along their second dimension."""
    if not leaves.seen:
        return None
    kept = {key: torch.cat([call[key] for call in leaves.seen], dim=1) for key in leaves.seen[0]}
    inputs, grads = kept.pop("inputs"), kept.pop("grads")
    rows = inputs.new_full((1,), leaves.rows)
    return Seen(inputs, grads, rows, view.gradient_norm(), False, kept=kept)


def nothing(layer: Layer, kinds: tuple[Kind, Kind], absolute: bool) -> Seen:
    """The statistic of a layer that this worker didn't use: no rows."""
    view = layer.view
    weight, dtype = view.weight, wide(view.weight.dtype)
    shape, kind = view.shape, kinds[0]
    if isinstance(kind, Rows):
        inputs = weight.new_zeros(shape.stack, 0, shape.inputs, dtype=dtype)
        grads = weight.new_zeros(shape.stack, 0, shape.outputs, dtype=dtype)
        kept = {"inputs": inputs, "grads": grads}
        kept = kind.compress(inputs, grads, 0) if kind.compress else kept
        inputs, grads = kept.pop("inputs"), kept.pop("grads")
        norm = view.gradient_norm()
        seen = Seen(inputs, grads, weight.new_zeros(1, dtype=dtype), norm, False, kept=kept)
    else:
        seen = inputs_seen(view, kind, weight.new_zeros(input_shape(kind, view), dtype=dtype))
        bias = view.bias_gradient() if bias_tells(view, kinds[1]) else None
        if bias is not None and layer.bias_shows_gradient:
            seen = replace(seen, grads=bias.detach().to(dtype), grads_reduced=True)
        else:
            grads = weight.new_zeros(output_shape(kinds[1], view), dtype=dtype)
            seen = replace(seen, grads=grads)
    if not absolute:
        return seen
    shown = weight.new_zeros(shape.stack, shape.outputs, dtype=dtype)
    return replace(seen, shown=shown, true=true_sums(view))


def true_sums(view: View) -> Tensor:
    """Sums of the weight gradient as it is now, [G, o]; zero where there is none."""
    grad = view.weight.grad
    if grad is None or grad.layout != torch.strided:
        dtype = wide(view.weight.dtype)
        return view.weight.new_zeros(view.shape.stack, view.shape.outputs, dtype=dtype)
    return view.checksums(grad)
