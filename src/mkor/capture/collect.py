"""From a layer's leaves to what its method receives."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mkor.capture.blank import blank, folded
from mkor.capture.discover import Layer
from mkor.capture.folds import bias_tells
from mkor.capture.observe import Leaves, RowLeaf
from mkor.capture.views import View
from mkor.methods.base import Kind, Seen, wide


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
    fold = leaves.inputs.grad.detach()
    seen = folded(view.shape, kinds[0], fold, None)
    seen = replace(seen, fed=bool(leaves.fed) and all(leaves.fed))
    bias = view.bias_share() if bias_tells(view, kinds[1]) else None
    if bias is not None and layer.bias_shows_gradient:
        return replace(seen, grads=bias.detach().to(seen.inputs.dtype), grads_reduced=True)
    if leaves.outputs.grad is None:
        return None
    return replace(seen, grads=leaves.outputs.grad.detach())


def rows_seen(view: View, leaves: RowLeaf) -> Seen | None:
    """The rows of all calls, concatenated along their second dimension."""
    if not leaves.seen:
        return None
    kept = {key: torch.cat([call[key] for call in leaves.seen], dim=1) for key in leaves.seen[0]}
    inputs, grads = kept.pop("inputs"), kept.pop("grads")
    rows = inputs.new_zeros(1) + leaves.rows  # no scalar of a tensor, which would be waited for
    return Seen(inputs, grads, rows, None, False, kept=kept)


def nothing(layer: Layer, kinds: tuple[Kind, Kind], absolute: bool) -> Seen:
    """The statistic of a layer that this worker didn't use: no rows."""
    view = layer.view
    seen = blank(layer, kinds, absolute, view.weight.device)
    bias = view.bias_share() if seen.grads_reduced else None
    if seen.grads_reduced and bias is not None:
        seen = replace(seen, grads=bias.detach().to(seen.inputs.dtype))
    return replace(seen, true=true_sums(view)) if absolute else seen


def true_sums(view: View) -> Tensor:
    """Sums of the weight gradient as it is now, [G, o]; zero where there is none."""
    grad = view.weight.grad
    if grad is None or grad.layout != torch.strided:
        size, dtype = (view.shape.stack, view.shape.outputs), wide(view.weight.dtype)
        return torch.zeros(size, dtype=dtype, device=view.weight.device)
    return view.checksums(grad)
