"""Lists of tensors that one foreach operation works on: alike, and not too many at once."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

BATCH_ELEMENTS = 2**22
"""Elements of a batch, unless one tensor has more: scratch memory is 16 MiB, not a whole model."""

WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
"""Dtype of the moments and of the arithmetic, where it isn't the parameter's own."""


class Batch(NamedTuple):
    """Parameters of one device and dtype, and what belongs to them, in the same order.

    Attributes:
        params: Parameters; complex ones as real tensors with a last dimension of 2.
        grads: Their gradients, in the dtype of the arithmetic.
        exp_avgs: Averages of the gradients.
        exp_avg_sqs: Averages of the squared gradients.
        steps: Number of steps of each.
    """

    params: list[Tensor]
    grads: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    steps: list[Tensor]

    @classmethod
    def of(cls, params: list[Tensor], states: dict[Tensor, dict[str, Tensor]]) -> Batch:
        """The batch of some parameters; makes the state of those that have none."""
        dtype = WIDE.get(params[0].dtype, params[0].dtype)
        for p in params:
            if not states[p]:
                states[p]["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
                states[p]["exp_avg"] = torch.zeros_like(p, dtype=dtype)
                states[p]["exp_avg_sq"] = torch.zeros_like(p, dtype=dtype)
        return cls(
            [real(p) for p in params],
            [real(p.grad.to(dtype)) for p in params if p.grad is not None],
            [real(states[p]["exp_avg"]) for p in params],
            [real(states[p]["exp_avg_sq"]) for p in params],
            [states[p]["step"] for p in params],
        )


def joint_norm(tensors: list[Tensor]) -> Tensor | None:
    """Norm of all tensors as one vector, on the device of the first; None for no tensors."""
    norms: list[Tensor] = []
    for alike in by_kind(tensors):
        dtype = WIDE.get(alike[0].dtype, real(alike[0]).dtype)
        norms += torch._foreach_norm([real(t) for t in alike], 2, dtype)
    if not norms:
        return None
    home, dtype = norms[0].device, reduce(torch.promote_types, (n.dtype for n in norms))
    gathered = torch.stack([n.to(home, dtype, non_blocking=True) for n in norms])
    total: Tensor = torch.linalg.vector_norm(gathered)
    return total


def batches(params: list[Tensor]) -> list[list[Tensor]]:
    """Parts of one device and dtype with at most `BATCH_ELEMENTS`, or a single tensor."""
    out: list[list[Tensor]] = []
    for alike in by_kind(params):
        out.append([])
        size = 0
        for p in alike:
            if out[-1] and size + p.numel() > BATCH_ELEMENTS:
                out.append([])
                size = 0
            out[-1].append(p)
            size += p.numel()
    return out


def by_kind(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """The tensors by device and dtype, and by the mesh of workers that they are spread over."""
    kinds: dict[tuple[torch.device, torch.dtype, Any], list[Tensor]] = {}
    for tensor in tensors:
        mesh = getattr(tensor, "device_mesh", None)
        kinds.setdefault((tensor.device, tensor.dtype, mesh), []).append(tensor)
    return list(kinds.values())


def real(tensor: Tensor) -> Tensor:
    """The tensor itself, or a view of a complex one as pairs of real numbers."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
