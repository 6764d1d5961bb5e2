"""What layers showed since the last step, for a checkpoint between the micro-batches of a step."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mkor.capture.hooks import Capture
from mkor.capture.observe import Leaves, RowLeaf

SIDES = ("inputs", "outputs")


def pack(capture: Capture) -> dict[str, Any]:
    """Statistics by layer, as plain data; empty between steps."""
    out: dict[str, Any] = {}
    for name, own in capture.leaves.items():
        packed = rows(own) if isinstance(own, RowLeaf) else folds(own)
        if packed and name in capture.shown:
            packed["shown"] = capture.shown[name]
        if packed:
            out[name] = packed
    return out


def folds(own: Leaves) -> dict[str, Any]:
    """Sums, moments or sketches."""
    grads = {side: getattr(own, side).grad for side in SIDES}
    return {side: grad.detach() for side, grad in grads.items() if grad is not None}


def rows(own: RowLeaf) -> dict[str, Any]:
    """The rows of each call."""
    return {"rows": own.rows, "calls": [dict(call) for call in own.seen]} if own.seen else {}


def restore(capture: Capture, packed: dict[str, Any]) -> None:
    """Go on from what `pack` returned, in the layers that listen for the same."""
    for name, saved in packed.items() if capture.armed else ():
        own = capture.leaves[name]
        if not fits(own, saved):
            continue
        device, dtype = own.mark.device, own.mark.dtype
        if isinstance(own, RowLeaf):
            own.rows = saved["rows"]
            own.seen = [
                {key: moved(part, own.mark) for key, part in call.items()}
                for call in saved["calls"]
            ]
        else:
            for side in saved.keys() & set(SIDES):
                getattr(own, side).grad = saved[side].to(device, dtype)
        if "shown" in saved:
            capture.shown[name] = saved["shown"].to(device)


def fits(own: Leaves | RowLeaf, saved: dict[str, Any]) -> bool:
    """Whether the leaves take statistics of this kind and these shapes."""
    if isinstance(own, RowLeaf):
        return "calls" in saved
    sides = saved.keys() - {"shown"}
    return sides <= set(SIDES) and all(
        saved[side].shape == getattr(own, side).shape for side in sides
    )


def moved(part: Tensor, mark: Tensor) -> Tensor:
    """A tensor beside the token, in its dtype if it isn't of whole numbers."""
    return part.to(mark.device, mark.dtype) if part.is_floating_point() else part.to(mark.device)
