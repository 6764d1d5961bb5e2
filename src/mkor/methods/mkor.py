"""MKOR: Kronecker factors kept inverted by low-rank updates (Algorithm 1 of the paper).

A layer with weight W [o, i] keeps two inverse factors, J_g [o, o] and J_a [i, i]. An update folds
the mean output gradient g and the mean input a into them; a step turns ∇W into J_g ∇W J_a.

| paper | here |
| ----- | ---- |
| L⁻¹, R⁻¹ | `state["outputs"]`, `state["inputs"]` |
| g, a (lines 2-3) | `gradient_vectors`, `input_vectors` |
| γ | `decay` |
| ε, ζ (lines 5-6) | `norm_limit`, `blend` |
| f | the engine's schedule |

Shapes: G stack, o and i sides, r vectors of an update.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mkor.factors import dense
from mkor.linalg import sandwich
from mkor.methods.base import (
    EVENTS,
    Exchange,
    Kind,
    LayerShape,
    Method,
    Seen,
    State,
    Sums,
    Update,
    wide,
)
from mkor.methods.statistics import informative, loss_scale


@dataclass(frozen=True)
class MKORMethod(Method):
    """Options of MKOR in the dense representation; see `mkor.MKOR` for their meaning."""

    rule: str
    vectors: int
    decay: float
    damping: float | None
    norm_limit: float
    blend: float
    max_dim: int
    state_dtype: torch.dtype | None
    on_nonfinite: str
    name: str = "mkor"

    def absolute(self) -> bool:
        """Without damping the vectors are taken as they are."""
        return self.damping is None

    def wants(self, shape: LayerShape) -> tuple[Kind, Kind]:
        """Sums of as many blocks of rows as an update has vectors."""
        return Sums(self.vectors), Sums(self.vectors)

    def sides(self, shape: LayerShape) -> tuple[bool, bool]:
        """Which sides (outputs, inputs) are narrow enough for a dense factor."""
        return shape.outputs <= self.max_dim, shape.inputs <= self.max_dim

    def limit(self) -> str:
        """Why a layer without factors is left out."""
        return f"both sides are wider than max_dim={self.max_dim}"

    def init(self, shape: LayerShape, where: torch.device, parameters: torch.dtype) -> State:
        """Identity factors, as in the paper, and the counters of what went wrong."""
        dtype = self.dtype(parameters)
        state = {"events": torch.zeros(len(EVENTS), dtype=torch.int64, device=where)}
        for side, length in self._factors(shape).items():
            state[side] = dense.identity(shape.stack, length, dtype, where)
        return state

    def bytes(self, shape: LayerShape, parameters: torch.dtype) -> int:
        """Bytes of the factors: the squares of the sides that have one."""
        size = self.dtype(parameters).itemsize
        squares = sum(length**2 for length in self._factors(shape).values())
        return size * shape.stack * squares + 8 * len(EVENTS)

    def update(self, state: State, seen: Seen) -> Update:
        """Algorithm 1, lines 2-8: average the vectors over workers, fold them into the inverses."""
        own = {} if seen.grads_reduced else {"grads": seen.grads}
        if seen.shown is not None and not seen.grads_reduced:
            own["shown"] = seen.shown
        shared = yield Exchange(sum={"inputs": seen.inputs, "rows": seen.rows}, mean=own)
        rows = shared["rows"]
        grads = shared.get("grads", seen.grads)
        if "shown" in shared and seen.true is not None:
            grads = grads * loss_scale(shared["shown"], seen.true)
        inputs = input_vectors(shared["inputs"], rows)  # [G, i, r]
        outputs = gradient_vectors(grads, rows)  # [G, o, q]
        present = rows.sum() > 0
        if "inputs" in state:
            self._absorb(state, "inputs", inputs, present)
        if "outputs" in state:
            told = informative(inputs, outputs, seen.gradient)  # [G]
            self._absorb(state, "outputs", outputs, present & told)
        return state

    def precondition(self, state: State, grad: Tensor) -> Tensor:
        """Algorithm 1, line 9: J_g ∇W J_a, [G, o, i]."""
        return sandwich(state.get("outputs"), grad, state.get("inputs"))

    def _factors(self, shape: LayerShape) -> dict[str, int]:
        keep_outputs, keep_inputs = self.sides(shape)
        sides = {"outputs": (keep_outputs, shape.outputs), "inputs": (keep_inputs, shape.inputs)}
        return {name: length for name, (keep, length) in sides.items() if keep}

    def _absorb(self, state: State, side: str, vectors: Tensor, present: Tensor) -> None:
        inverse = state[side]  # [G, d, d]
        seen = dense.prepare(vectors.to(wide(inverse.dtype)), self.damping)
        rule = dense.RULES[self.rule]
        change = rule(inverse, seen, self.decay, self.norm_limit, self.blend)
        # A statistic that isn't finite makes an unsound update, which the guard turns into a reset.
        usable = present if self.on_nonfinite == "reset" else present & seen.finite  # [G]
        change, reset = dense.guard(change, usable, inverse.dtype)
        dense.write_(inverse, change)
        counts = torch.stack([~seen.finite, reset, change.blended]).sum(dim=-1)
        state["events"][: len(counts)] += counts


def input_vectors(sums: Tensor, rows: Tensor) -> Tensor:
    """The r input vectors of an update, as columns whose outer products average over rows.

    Block j of n_j rows (n in all) has the mean m_j; its vector is √(n_j/n)·m_j, so that VVᵀ is the
    second moment of the block means and r = 1 gives the paper's E[a].

    Args:
        sums: Sum of each block's rows, [G, r, i].
        rows: n_j, [r].

    Returns:
        [G, i, r].
    """
    weight = (rows * rows.sum()).rsqrt()  # 1/√(n_j·n), [r]
    weight = torch.where(rows > 0, weight, 0)
    return (sums * weight[:, None].to(sums.dtype)).mT


def gradient_vectors(sums: Tensor, rows: Tensor) -> Tensor:
    """The output-gradient vectors of an update, as columns.

    For a mean loss the sum over all rows is the mean per-row gradient E[g] (it is `bias.grad`), and
    n/n_j times block j's sum is that block's mean; its vector carries the weight √(n_j/n).

    Args:
        sums: Sum of each block's row gradients, [G, q, o], q = r or 1.
        rows: n_j, [r].

    Returns:
        [G, o, q].
    """
    if sums.shape[1] == 1:
        return sums.mT
    weight = (rows.sum() / rows).sqrt()  # [r]
    weight = torch.where(rows > 0, weight, 0)
    return (sums * weight[:, None].to(sums.dtype)).mT
