"""What TensorBoard shows of an optimizer beside the loss: its rate, its factors, its faults."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

POINTS = 50
"""How often a run is looked at; it takes a copy of every factor's norm."""

EVENTS = ("skipped", "resets", "rejected", "blends")
"""What the layers count."""


def watched(optimizer: Optimizer) -> dict[str, float]:
    """Looks at an optimizer, which waits for its device.

    Args:
        optimizer: Any.

    Returns:
        Numbers by their name in TensorBoard; those of layers only from a method of ``mkor``.
    """
    out = {"learning rate": float(optimizer.param_groups[0]["lr"])}
    layers = getattr(optimizer, "layers", None)
    if layers is None:
        return out
    infos = layers()
    out["layers preconditioned"] = float(sum(info.preconditioned for info in infos))
    for info in infos:
        if info.bytes:
            out |= {f"{event}/{info.name}": float(getattr(info, event)) for event in EVENTS}
    return out | factor_norms(optimizer.state_dict()["preconditioner"]["layers"])


def factor_norms(layers: dict[str, Any]) -> dict[str, float]:
    """Takes the Frobenius norm of every factor.

    Args:
        layers: The layers of a state dict of ``mkor``.

    Returns:
        Norms by layer and side.
    """
    return {
        f"factor norm/{name}/{key}": float(torch.linalg.vector_norm(tensor.float()))
        for name, layer in layers.items()
        for key, tensor in layer["state"].items()
        if tensor.is_floating_point()
    }


def due(step: int, steps: int) -> bool:
    """Tells whether a run is to be looked at.

    Args:
        step: The step that was made, from 1.
        steps: The steps of the run.

    Returns:
        Whether it is one of about :data:`POINTS`, the first and the last among them.
    """
    return step in {1, steps} or step % max(1, steps // POINTS) == 0
