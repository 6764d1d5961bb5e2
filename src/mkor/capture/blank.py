"""What a layer shows as far as its shape tells: zeros in place of statistics."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from mkor.capture.discover import Layer
from mkor.capture.folds import bias_tells, input_shape, output_shape
from mkor.capture.views import View
from mkor.methods.base import Kind, LayerShape, Moment, Rows, Seen, Sketch, wide


def blank(
    layer: Layer,
    kinds: tuple[Kind, Kind],
    absolute: bool,
    where: torch.device,
    rows: int = 0,
) -> Seen:
    """A statistic of zeros in the shapes and dtypes of a real one.

    Args:
        layer: The layer; only its shape and dtype are looked at.
        kinds: What is kept of the inputs and of the output gradients.
        absolute: Whether the size of the gradients matters.
        where: Device of the zeros.
        rows: How many a call had; they are there for a method of rows.
    """
    view, shape = layer.view, layer.view.shape
    zeros = partial(torch.zeros, dtype=wide(view.weight.dtype), device=where)
    norm = zeros(())
    if isinstance(kinds[0], Rows):
        seen = blank_rows(shape, kinds[0], norm, rows)
    else:
        by_bias = layer.bias_shows_gradient and bias_tells(view, kinds[1])
        grads = zeros((shape.stack, 1, shape.outputs) if by_bias else output_shape(kinds[1], view))
        seen = folded(shape, kinds[0], zeros(input_shape(kinds[0], view)), norm)
        seen = replace(seen, grads=grads, grads_reduced=by_bias)
    if not absolute:
        return seen
    sums = zeros((shape.stack, shape.outputs))
    return replace(seen, shown=sums, true=sums)


def blank_matrix(view: View) -> Tensor:
    """A gradient of zeros as `view.matrix` gives it, [G, o, i]."""
    shape, weight = view.shape, view.weight
    size = (shape.stack, shape.outputs, shape.inputs)
    return torch.zeros(size, dtype=wide(weight.dtype), device=weight.device)


def blank_rows(shape: LayerShape, kind: Rows, norm: Tensor, rows: int) -> Seen:
    """Rows of zeros, compressed as those of a call are."""
    inputs = norm.new_zeros(shape.stack, rows, shape.inputs)
    grads = norm.new_zeros(shape.stack, rows, shape.outputs)
    kept = {"inputs": inputs, "grads": grads}
    kept = kind.compress(inputs, grads, 0) if kind.compress else kept
    return Seen(
        kept.pop("inputs"), kept.pop("grads"), norm.new_full((1,), rows), norm, False, kept=kept
    )


def folded(shape: LayerShape, kind: Kind, fold: Tensor, norm: Tensor | None) -> Seen:
    """The input side of a fold (see `folds`), with no output gradient yet.

    Args:
        shape: The layer's.
        kind: What the fold is of.
        fold: The fold.
        norm: Norm of the weight's gradient, if it is wanted.
    """
    side, empty = shape.inputs, fold[:, :0]
    if isinstance(kind, Moment):
        above = side if kind.matrix else 0
        matrix, rows, samples = fold[:, :above, :above], fold[0, -2, -1:], fold[0, -1, -1:]
        sums = fold[:, -2, :side]
        return Seen(matrix, empty, rows, norm, False, samples=samples, input_sums=sums)
    if isinstance(kind, Sketch):
        rows, samples = fold[0, -1, -1:], fold[0, -1, -2:-1]
        return Seen(fold[:, :-1, :side], empty, rows, norm, False, samples=samples)
    return Seen(fold[..., :side], empty, fold[0, :, -1], norm, False)
