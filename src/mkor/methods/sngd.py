"""SNGD: the natural gradient by the Sherman-Morrison-Woodbury identity (eq. 13 of the paper).

A layer keeps the rows of its last update, scaled so that F = Σ_j u_j u_jᵀ is the mean of the outer
products of the per-row gradients, and a step turns ∇W into (F + μI)⁻¹ ∇W.

| paper | here |
| ----- | ---- |
| A, G | `state["inputs"]`, `state["outputs"]`: u_j = outputs_j ⊗ inputs_j |
| AᵀA ⊙ GᵀG + μI | `state["kernel"]`, its Cholesky factor |
| μ | `damping`; what was used stands in `state["damping"]` |
| b | N, the rows of all workers |
| f | the engine's schedule |

Shapes: G stack, o and i sides, m rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mkor.factors import rows
from mkor.methods.base import EVENTS, Exchange, LayerShape, Method, Rows, Seen, State, Update, wide
from mkor.methods.statistics import loss_scale


@dataclass(frozen=True)
class SNGDMethod(Method):
    """Options of SNGD; see `mkor.SNGD` for their meaning."""

    damping: float
    state_dtype: torch.dtype | None
    on_nonfinite: str
    name: str = "sngd"

    def dtype(self, parameters: torch.dtype, key: str = "") -> torch.dtype:
        """Dtype of the rows, and at least float32 for their kernel."""
        kept = super().dtype(parameters)
        return kept if key in rows.NARROW else wide(kept)

    def absolute(self) -> bool:
        """Damping is added to the curvature as it is, so its scale matters."""
        return True

    def wants(self, shape: LayerShape) -> tuple[Rows, Rows]:
        """All rows of both sides."""
        return Rows(), Rows()

    def sides(self, shape: LayerShape) -> tuple[bool, bool]:
        """Both: rows have no side that could be too wide."""
        return True, True

    def limit(self) -> str:
        """Why a layer is left out; none is."""
        return "rows have no limit of width"

    def init(self, shape: LayerShape, where: torch.device, parameters: torch.dtype) -> State:
        """No rows yet, so that a gradient stays as it is, and the counters of what went wrong."""
        dtype = self.dtype(parameters, "inputs")
        state = {"events": torch.zeros(len(EVENTS), dtype=torch.int64, device=where)}
        return state | rows.empty(shape.stack, shape.outputs, shape.inputs, dtype, where)

    def bytes(self, shape: LayerShape, parameters: torch.dtype) -> int:
        """Bytes before the first update: a damping and the counters. The rows come with a batch."""
        return self.dtype(parameters).itemsize * shape.stack + 8 * len(EVENTS)

    def update(self, state: State, seen: Seen) -> Update:
        """Gather the rows of all workers, in one scale, and factorise their kernel."""
        shown = {} if seen.shown is None else {"shown": seen.shown}
        told = yield Exchange(sum={"rows": seen.rows}, mean=shown)
        outputs = seen.grads * rows.unit(seen.rows, told["rows"]).to(seen.grads)
        if seen.shown is not None and seen.true is not None:
            outputs *= loss_scale(told["shown"], seen.true)
        every = yield Exchange(gather={"inputs": seen.inputs, "outputs": outputs})
        if not every["inputs"].shape[1]:
            return state
        reset = self.on_nonfinite == "reset"
        new, happened = rows.renew(
            state, every["inputs"], every["outputs"], None, self.damping, reset
        )
        return new | {"events": state["events"] + rows.tally(EVENTS, happened)}

    def precondition(self, state: State, grad: Tensor) -> Tensor:
        """V = (∇ - U(K + μI)⁻¹Uᵀ∇)/μ, [G, o, i]."""
        return rows.precondition(state, grad)
