"""Momentum in place of the gradient: M ← βM + (1-β)∇, and Nesterov's step along βM + (1-β)∇.

It acts on `.grad` itself, before anything is preconditioned, so that a gradient that is sharded or
in half precision needs nothing of its own.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from mkor.capture.views import View

Buffers = dict[str, Tensor]
"""M of a layer's parameters, "weight" and, where it is a column of the matrix, "bias"."""


def parts(view: View) -> Buffers:
    """The parameters of a layer whose gradients make its matrix, where they have one."""
    found = {"weight": view.weight}
    if view.has_bias_column and view.bias is not None:
        found["bias"] = view.bias
    return {key: parameter for key, parameter in found.items() if parameter.grad is not None}


@torch.no_grad()
def accelerate(layers: Iterable[tuple[View, Buffers]], decay: float) -> None:
    """Take the gradients into the momentum and write Nesterov's step into them.

    Args:
        layers: With dense gradients; each with its buffers, which are made at their first use.
        decay: β.
    """
    for view, buffers in layers:
        for key, parameter in parts(view).items():
            grad = parameter.grad
            assert grad is not None
            if key not in buffers:
                buffers[key] = torch.zeros_like(grad)
            if buffers[key].device != grad.device or buffers[key].dtype != grad.dtype:
                buffers[key] = buffers[key].to(grad.device, grad.dtype)
            buffers[key].lerp_(grad, 1 - decay)
            grad.lerp_(buffers[key], decay)
