"""Eva: the gradient preconditioned by one averaged vector a side (Zhang et al., ICLR 2023).

Where K-FAC keeps second moments, Eva keeps the mean input ā and the mean output gradient ḡ of a
layer. Its curvature λI + ḡḡᵀ ⊗ āāᵀ has one direction besides the damping, so that the inverse is
known in closed form:

    V = (∇W − (ḡᵀ∇W ā)/(‖ā‖²‖ḡ‖² + λ)·ḡāᵀ)/λ

| rule  | here |
| ----- | ---- |
| ā, ḡ  | `state["inputs"]`, `state["outputs"]`, over `state["weight"]` |
| γ     | `decay`, the weight of the old average |
| λ     | `damping` |

A mean gradient that is only rounding noise, as before a batch normalisation, needs no care here:
nothing is normalised, so a ḡ of that size leaves V = ∇W/λ.

Shapes: G stack, o and i sides, d either.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mkor.blocks import Block, Blockwise, Shares, columns_of, counted, rows_of
from mkor.messages import Exchange
from mkor.methods.base import (
    EVENTS,
    Kind,
    LayerShape,
    Method,
    Seen,
    State,
    Sums,
    Update,
    wide,
)
from mkor.methods.statistics import gradient_messages, mean_gradient

SIDES = ("outputs", "inputs")


@dataclass(frozen=True)
class EvaMethod(Method):
    """Options of Eva; see `mkor.Eva` for their meaning."""

    decay: float
    damping: float
    state_dtype: torch.dtype | None
    on_nonfinite: str
    name: str = "eva"

    def absolute(self) -> bool:
        """λ is absolute: the size of ḡ decides how much curvature there is."""
        return True

    def wants(self, shape: LayerShape) -> tuple[Kind, Kind]:
        """The sums of all rows, of both sides."""
        del shape
        return Sums(1), Sums(1)

    def sides(self, shape: LayerShape) -> tuple[bool, bool]:
        """Both sides of every layer: a vector is never too wide."""
        del shape
        return True, True

    def limit(self) -> str:
        """Never needed: no layer is left out."""
        return "Eva takes layers of any width"

    def init(self, shape: LayerShape, where: torch.device, parameters: torch.dtype) -> State:
        """Averages of nothing yet, and the counters of what went wrong."""
        dtype = self.dtype(parameters)
        zeros = {"inputs": (shape.inputs,), "outputs": (shape.outputs,), "weight": ()}
        state = {
            key: torch.zeros(shape.stack, *size, dtype=dtype, device=where)
            for key, size in zeros.items()
        }
        return state | {"events": torch.zeros(len(EVENTS), dtype=torch.int64, device=where)}

    def bytes(self, shape: LayerShape, parameters: torch.dtype) -> int:
        """Bytes of the state: a vector a side and a number."""
        numbers = shape.stack * (shape.inputs + shape.outputs + 1)
        return self.dtype(parameters).itemsize * numbers + 8 * len(EVENTS)

    def update(self, state: State, seen: Seen) -> Update:
        """Average ā and ḡ over workers and fold them into their moving averages."""
        sums = {"inputs": seen.inputs, "rows": seen.rows}
        shared = yield Exchange(sum=sums, mean=gradient_messages(seen), last=True)
        rows = shared["rows"].sum()
        inputs = shared["inputs"].sum(dim=1) / rows  # ā, [G, i]
        return self._fold(state, inputs, mean_gradient(seen, shared), rows > 0)

    def precondition(self, state: State, grad: Tensor) -> Tensor:
        """(λI + ḡḡᵀ ⊗ āāᵀ)⁻¹∇W, [G, o, i]."""
        dtype = wide(state["inputs"].dtype)
        weight = state["weight"].to(dtype)  # [G]
        left, right = (averaged(state[side].to(dtype), weight) for side in SIDES)
        return rank_one_inverse(grad.to(dtype), left, right, self.damping)

    @property
    def blockwise(self) -> bool:
        """Vectors multiply blocks where they lie."""
        return True

    def precondition_block(self, state: State, grad: Tensor, block: Block) -> Blockwise:
        """The same of a block; one number crosses."""
        dtype = wide(state["inputs"].dtype)
        weight, grad = state["weight"].to(dtype), grad.to(dtype)
        left, right = (averaged(state[side].to(dtype), weight) for side in SIDES)
        share = rank_one_share(left, right, self.damping)
        column = rows_of(left.units, block)[..., None]  # ĝ, [1, o', 1]
        row = columns_of(right.units[:, None], block)  # âᵀ, [1, 1, i']
        along = (column * (grad @ counted(row, block).mT)).sum(dim=1, keepdim=True)
        along = (yield Shares(both={"along": along}))["along"]  # ĝᵀ∇W â, [1, 1, 1]
        column = column * (along * share)
        return torch.baddbmm(grad, column, row, beta=1 / self.damping, alpha=-1 / self.damping)

    def _fold(self, state: State, inputs: Tensor, outputs: Tensor, present: Tensor) -> State:
        """Fold ā [G, i] and ḡ [G, o] in, both or neither, since they belong together."""
        new = {
            "inputs": self._moved(state["inputs"], inputs),
            "outputs": self._moved(state["outputs"], outputs),
            "weight": self._moved(state["weight"], torch.ones_like(inputs[:, 0])),
        }
        finite = torch.isfinite(new["inputs"]).all(dim=-1) & torch.isfinite(new["outputs"]).all(-1)
        usable, skipped = present & finite, present & ~finite  # [G]
        reset = skipped if self.on_nonfinite == "reset" else torch.zeros_like(skipped)
        for key, value in new.items():
            chosen = torch.where(like(usable, value), value, state[key])
            state[key] = chosen.masked_fill_(like(reset, value), 0)
        state["events"][: EVENTS.index("resets") + 1] += torch.stack([skipped, reset]).sum(dim=-1)
        return state

    def _moved(self, old: Tensor, new: Tensor) -> Tensor:
        """γ·old + (1-γ)·new in the dtype of the state."""
        moved = self.decay * old.to(new.dtype) + (1 - self.decay) * new
        return moved.to(old.dtype)


@dataclass(frozen=True)
class Direction:
    """A vector as its direction and its length, which may be beyond the range of its square."""

    units: Tensor  # of length 1, or zero, [G, d]
    length: Tensor  # [G]


def like(flags: Tensor, tensor: Tensor) -> Tensor:
    """Flags [G] shaped so that they broadcast over a tensor [G, ...]."""
    return flags.view(-1, *[1] * (tensor.dim() - 1))


def averaged(total: Tensor, weight: Tensor) -> Direction:
    """The moving average `total`/`weight`, whose weights add up to `weight`; zero before the first.

    Args:
        total: [G, d].
        weight: [G].
    """
    limits = torch.finfo(total.dtype)
    size = total.abs().amax(dim=-1)  # [G]
    units = total / size.clamp_min(limits.tiny)[:, None]  # no square of it overflows
    length = torch.linalg.vector_norm(units, dim=-1)
    units = units / length.clamp_min(1)[:, None]
    length = size * length / weight.clamp_min(limits.tiny)
    return Direction(units, length.clamp(limits.tiny, limits.max))


def rank_one_inverse(grad: Tensor, left: Direction, right: Direction, damping: float) -> Tensor:
    """(λI + ḡḡᵀ ⊗ āāᵀ)⁻¹∇W by the Sherman-Morrison identity, [G, o, i].

    With unit vectors ĝ and â it is (∇W − share·(ĝᵀ∇W â)·ĝâᵀ)/λ, where share is
    ‖ḡ‖²‖ā‖²/(‖ḡ‖²‖ā‖² + λ).

    Args:
        grad: ∇W, [G, o, i].
        left: ḡ.
        right: ā.
        damping: λ.
    """
    share = rank_one_share(left, right, damping)
    column = left.units[..., None]  # ĝ, [G, o, 1]
    row = right.units[:, None]  # âᵀ, [G, 1, i]
    along = (column * (grad @ row.mT)).sum(dim=1, keepdim=True)  # ĝᵀ∇W â, [G, 1, 1]
    column = column * (along * share)
    return torch.baddbmm(grad, column, row, beta=1 / damping, alpha=-1 / damping)


def rank_one_share(left: Direction, right: Direction, damping: float) -> Tensor:
    """‖ḡ‖²‖ā‖²/(‖ḡ‖²‖ā‖² + λ), [G, 1, 1]."""
    ratio = damping**0.5 / left.length / right.length  # [G]
    share: Tensor = 1 / (1 + ratio.square())
    return share[:, None, None]
