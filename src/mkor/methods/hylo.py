"""SNGD, and HyLo: the natural gradient from a layer's rows, all of them or a picked fraction.

SNGD solves with F + μI by the Sherman-Morrison-Woodbury identity (eq. 13 of the paper). A layer
keeps the rows of its last update, scaled so that F = Σ_j u_j u_jᵀ is the mean of the outer products
of the per-row gradients, and a step turns ∇W into (F + μI)⁻¹ ∇W.

HyLo picks a fraction of the rows within the backward pass, in one of two ways. KIS draws rows with
p_j ∝ ‖a_j‖²‖g_j‖² and weights them so that the estimate of F is unbiased. KID keeps the rows of an
interpolative decomposition and writes all others in them, F ≈ U_s(PᵀP)U_sᵀ. With all rows both are
SNGD. "auto" takes KID while the gradient's size changes fast.

| paper | here |
| ----- | ---- |
| A, G (of the picked rows) | `state["inputs"]`, `state["outputs"]`: u_j = outputs_j ⊗ inputs_j |
| AᵀA ⊙ GᵀG + μI, or K_ss + μ(PᵀP)⁻¹ (KID) | `state["kernel"]`, its Cholesky factor |
| ρ = r/n | `rank` |
| μ | `damping`; what was used stands in `state["damping"]` |
| b | N, the rows of all workers |
| f | the engine's schedule |

Shapes: G stack, o and i sides, m rows, w width of a band.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from mkor.blocks import Block, Blockwise
from mkor.factors import interpolative, rows
from mkor.messages import Exchange
from mkor.methods.base import EVENTS, LayerShape, Method, Rows, Seen, State, Update, wide
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

    def grows(self) -> bool:
        """Rows are as many as the batch has."""
        return True

    def bytes(self, shape: LayerShape, parameters: torch.dtype) -> int:
        """Bytes before the first update: a damping and the counters. The rows come with a batch."""
        return self.dtype(parameters).itemsize * shape.stack + 8 * len(EVENTS)

    def cost(self, shape: LayerShape) -> float:
        """What is kept of a row."""
        return shape.stack * (shape.outputs + shape.inputs)

    def update(self, state: State, seen: Seen) -> Update:
        """Gather the rows of all workers, in one scale, and factorise their kernel."""
        shown = {} if seen.shown is None else {"shown": seen.shown}
        told = yield Exchange(sum={"rows": seen.rows}, mean=shown)
        outputs = seen.grads * rows.unit(seen.rows, told["rows"]).to(seen.grads)
        if seen.shown is not None and seen.true is not None:
            outputs *= loss_scale(told["shown"], seen.true)
        rows_seen = {"inputs": seen.inputs, "outputs": outputs, **seen.kept}
        every = yield Exchange(gather=rows_seen, last=True)
        if not every["inputs"].shape[1]:
            return state
        prior = None
        if "prior" in every:  # of KID
            prior = interpolative.blocks(every["prior"], every["first"])
        shown_rows = every["inputs"], every["outputs"], told["rows"] > 0
        reset = self.on_nonfinite == "reset"
        new, happened = rows.renew(state, *shown_rows, prior, self.damping, reset)
        return new | {"events": state["events"] + rows.tally(EVENTS, happened)}

    def precondition(self, state: State, grad: Tensor) -> Tensor:
        """V = (∇ - U N Uᵀ∇)/μ with N the inverse of the damped kernel, [G, o, i]."""
        return rows.precondition(state, grad)

    @property
    def blockwise(self) -> bool:
        """Rows multiply blocks where they lie."""
        return True

    def precondition_block(self, state: State, grad: Tensor, block: Block) -> Blockwise:
        """The same of a block."""
        return rows.precondition_block(state, grad, block)


@dataclass(frozen=True)
class HyLoMethod(SNGDMethod):
    """Options of HyLo; see `mkor.HyLo` for their meaning.

    `sizes` are the gradient's in the last two periods, which `learn` sets.
    """

    rank: float = 0.1
    sampling: str = "auto"
    switch_steps: int = 100
    switch_change: float = 0.5
    sizes: tuple[float, ...] = ()
    name: str = "hylo"

    def wants(self, shape: LayerShape) -> tuple[Rows, Rows]:
        """A fraction of the rows of both sides, the same ones."""
        compress = None if self.rank == 1 else partial(COMPRESS[self.choice()], rank=self.rank)
        return Rows(compress), Rows(compress)

    def choice(self) -> str:
        """The sampling of this step: "kis" or "kid"."""
        if self.sampling != "auto":
            return self.sampling
        return "kid" if changes_fast(self.sizes, self.switch_change) else "kis"

    def listens(self) -> int:
        """Steps in a period of "auto"; else none."""
        return self.switch_steps if self.sampling == "auto" else 0

    def learn(self, sizes: tuple[float, ...]) -> HyLoMethod:
        """The method that knows the gradient's size in the last two periods."""
        return replace(self, sizes=sizes)


def changes_fast(sizes: tuple[float, ...], change: float) -> bool:
    """Whether |Δ - Δ'| ≥ ηΔ' for the sizes (Δ', Δ), η = `change`; true before both are known."""
    if len(sizes) < 2:
        return True
    before, now = sizes[-2:]
    return not abs(now - before) < change * before


COMPRESS: dict[str, Callable[..., dict[str, Tensor]]] = {
    "kis": rows.sample,
    "kid": interpolative.decompose,
}
"""How rows are picked, by the name of the option `sampling`."""
