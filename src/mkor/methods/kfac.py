"""K-FAC as KAISA runs it: running covariances, decomposed every so often.

A layer with weight W [o, i] keeps moving averages of A = E[aaᵀ] [i, i] and G = E[ggᵀ] [o, o], where
a is an input row and g a sample's own gradient by the output row. A step solves with A⊗G + λI.

| literature | here |
| ---------- | ---- |
| A, G, their moving averages | `state["inputs"]`, `state["outputs"]`, each divided by its weight |
| Q_A, d_A; Q_G, d_G | `state["inputs_vectors"]`, `["inputs_values"]`; the same of `outputs` |
| (A + …)⁻¹, (G + …)⁻¹ | `state["inputs_inverse"]`, `state["outputs_inverse"]` |
| γ, λ, π | `decay`, `damping`, `covariance.split_damping` |

Shapes: G stack, o and i sides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch
from torch import Tensor

from mkor.factors import covariance
from mkor.factors.dense import identity
from mkor.linalg import sandwich
from mkor.messages import Exchange, Owned
from mkor.methods.base import (
    EVENTS,
    LayerShape,
    Method,
    Moment,
    Seen,
    State,
    Update,
    wide,
)
from mkor.methods.statistics import count, loss_scale

SOLVERS = {"eigen": ("vectors", "values"), "inverse": ("inverse",)}
"""The solvers, and what each keeps of a side besides its covariance."""

OUTLIER = 10.0
"""What one batch may add to the trace of a damped average, in parts of it."""

Number = float | Callable[[int], float]
Steps = int | Callable[[int], int]


@dataclass(frozen=True)
class KFACMethod(Method):
    """Options of K-FAC; see `mkor.KFAC` for their meaning.

    `refresh` is what `at` derives from the step: whether an update renews the decompositions.
    """

    solver: str
    decay: Number
    damping: Number
    damping_split: str
    weight_sharing: str
    factor_update_steps: Steps
    inverse_update_steps: Steps
    warmup_steps: int
    max_dim: int
    state_dtype: torch.dtype | None
    inverse_dtype: torch.dtype | None
    on_nonfinite: str
    refresh: bool = True
    name: str = "kfac"

    def at(self, step: int) -> KFACMethod:
        """Resolve the schedules, and whether an update in this step renews the decompositions."""
        now = super().at(step)
        every, between = cast(int, now.inverse_update_steps), cast(int, now.factor_update_steps)
        # The first update of the factors from a multiple of `every` on.
        return replace(now, refresh=step % every < between or step < self.warmup_steps)

    def absolute(self) -> bool:
        """A loss scale would multiply G by its square, against the same λ."""
        return True

    def first(self) -> KFACMethod:
        """A layer's first update decomposes what it has, due or not."""
        return replace(self, refresh=True)

    def wants(self, shape: LayerShape) -> tuple[Moment, Moment]:
        """Second moments of the sides that have a factor."""
        outputs, inputs = self.sides(shape)
        return Moment(self.weight_sharing, inputs), Moment(self.weight_sharing, outputs)

    def sides(self, shape: LayerShape) -> tuple[bool, bool]:
        """Which sides (outputs, inputs) are narrow enough for a covariance."""
        return shape.outputs <= self.max_dim, shape.inputs <= self.max_dim

    def limit(self) -> str:
        """What sides without a factor are."""
        return f"wider than max_dim={self.max_dim}"

    def init(self, shape: LayerShape, where: torch.device, parameters: torch.dtype) -> State:
        """Empty averages, and the decomposition of the identity until the first is computed."""
        dtype = self.dtype(parameters)
        state = {"events": torch.zeros(len(EVENTS), dtype=torch.int64, device=where)}
        for side, length in self._factors(shape).items():
            square = (shape.stack, length, length)
            state[side] = torch.zeros(square, dtype=dtype, device=where)
            state[f"{side}_weight"] = torch.zeros(shape.stack, dtype=dtype, device=where)
            if self.solver == "inverse":
                state[f"{side}_inverse"] = identity(shape.stack, length, dtype, where)
                continue
            state[f"{side}_vectors"] = identity(shape.stack, length, dtype, where)
            state[f"{side}_values"] = torch.ones(square[:2], dtype=dtype, device=where)
        return state

    def bytes(self, shape: LayerShape, parameters: torch.dtype) -> int:
        """Bytes of two square matrices a side, the weight of one, and eigenvalues."""
        numbers = sum(
            2 * length**2 + 1 + length * (self.solver == "eigen")
            for length in self._factors(shape).values()
        )
        return self.dtype(parameters).itemsize * shape.stack * numbers + 8 * len(EVENTS)

    def cost(self, shape: LayerShape) -> float:
        """Decompositions take the cube of a side."""
        return shape.stack * sum(length**3 for length in self._factors(shape).values())

    def update(self, state: State, seen: Seen) -> Update:
        """Average the covariances over workers and into the running ones; decompose where due.

        A worker's rows are 1/n_p of its samples' own gradients, so those have the moment n_p²·Σggᵀ.
        """
        samples = seen.rows if seen.samples is None else seen.samples  # n_p, [1]
        sums = {"rows": seen.rows, "samples": samples}
        if "outputs" in state:
            sums["outputs"] = seen.grads * samples.square()
        if "inputs" in state:
            sums["inputs"] = seen.inputs
        shown = {} if seen.shown is None else {"shown": seen.shown}
        squares = tuple(side for side in ("outputs", "inputs") if side in sums)
        shared = yield Exchange(sum=sums, mean=shown, symmetric=squares, last=True)
        gains = {
            "outputs": output_gain(shared, seen.true),
            "inputs": shared["rows"].clamp_min(1).reciprocal(),
        }
        present = shared["rows"] > 0  # [1]
        taken = {
            side: self._absorb(state, side, shared[side], gain, present)
            for side, gain in gains.items()
            if side in state
        }
        if self.refresh:
            found = yield self._decomposition(state)
            self._renew(state, found, taken)
        return state

    def precondition(self, state: State, grad: Tensor) -> Tensor:
        """Solve with A⊗G + λI, or multiply by the inverses of both factors, [G, o, i]."""
        if self.solver == "inverse":
            return sandwich(state.get("outputs_inverse"), grad, state.get("inputs_inverse"))
        left, right = state.get("outputs_vectors"), state.get("inputs_vectors")
        turned = sandwich(None if left is None else left.mT, grad, right)  # Q_Gᵀ∇Q_A
        turned.div_(self._curvature(state))
        return sandwich(left, turned, None if right is None else right.mT)

    def _factors(self, shape: LayerShape) -> dict[str, int]:
        keep_outputs, keep_inputs = self.sides(shape)
        sides = {"outputs": (keep_outputs, shape.outputs), "inputs": (keep_inputs, shape.inputs)}
        return {name: length for name, (keep, length) in sides.items() if keep}

    def _absorb(
        self, state: State, side: str, moment: Tensor, gain: Tensor, present: Tensor
    ) -> Tensor:
        """Fold one side's moment in, by a part where it is huge; where it was, [G]."""
        finite = covariance.usable(moment, gain)  # [G]
        taken, broken = present & finite, present & ~finite
        total, mass = state[side], state[f"{side}_weight"]
        decay, damping = cast(float, self.decay), cast(float, self.damping)
        gain, bounded = covariance.bounded(
            total, mass, moment, gain, decay, damping**0.5, room=OUTLIER
        )
        covariance.average_(total, mass, moment, gain, decay, taken)
        count(state, skipped=broken, bounded=taken & bounded)
        if self.on_nonfinite == "reset":
            self._reset(state, side, broken)
        return taken

    def _reset(self, state: State, side: str, where: Tensor) -> None:
        """Back to what `init` made, for the matrices named by `where`, [G]."""
        state[side].masked_fill_(where[:, None, None], 0)
        state[f"{side}_weight"].masked_fill_(where, 0)
        if self.solver == "inverse":
            covariance.identity_(state[f"{side}_inverse"], where)
        else:
            covariance.identity_(state[f"{side}_vectors"], where)
            state[f"{side}_values"].masked_fill_(where[:, None], 1)
        count(state, resets=where)

    def _decomposition(self, state: State) -> Owned:
        """The eigenpairs or inverses of both sides, for one worker to find."""
        parts = [f"{side}_{part}" for side in self._sides(state) for part in SOLVERS[self.solver]]
        like = {key: state[key] for key in parts}
        like |= {f"{side}_sound": state[f"{side}_weight"] for side in self._sides(state)}
        symmetric = tuple(key for key in parts if key.endswith("_inverse"))
        return Owned(partial(self._decompose, state), like, symmetric)

    def _decompose(self, state: State) -> dict[str, Tensor]:
        """The eigenpairs or inverses of both sides, and whether they are sound, as numbers."""
        damping = self._dampings(state) if self.solver == "inverse" else {}
        out: dict[str, Tensor] = {}
        for side in self._sides(state):
            total, mass = state[side], state[f"{side}_weight"]
            dtype = self.inverse_dtype or wide(total.dtype)
            if self.solver == "inverse":
                inverse, sound = covariance.inverse(total, mass, damping[side], dtype)
                found = {"inverse": inverse, "sound": sound}
            else:
                values, vectors, sound = covariance.eigen(total, mass, dtype)
                found = {"vectors": vectors, "values": values, "sound": sound}
            out |= {f"{side}_{part}": tensor.to(total.dtype) for part, tensor in found.items()}
        return out

    def _renew(self, state: State, found: dict[str, Tensor], taken: dict[str, Tensor]) -> None:
        """Take what was found for what was taken in; the last stay where nothing sound was."""
        for side, where in taken.items():
            sound = found[f"{side}_sound"] > 0
            for part in SOLVERS[self.solver]:
                key = f"{side}_{part}"
                covariance.replace_(state[key], found[key], where & sound)
            count(state, rejected=where & ~sound)

    def _sides(self, state: State) -> list[str]:
        """The sides that have a factor."""
        return [side for side in ("outputs", "inputs") if side in state]

    def _dampings(self, state: State) -> dict[str, Tensor | float]:
        """The damping of each side's inverse; λ itself for a side that is alone."""
        damping = cast(float, self.damping)
        sides = self._sides(state)
        if self.damping_split == "plain" or len(sides) == 1:
            return dict.fromkeys(sides, damping)
        means = [
            covariance.mean_eigenvalue(state[s], state[f"{s}_weight"], wide(state[s].dtype))
            for s in sides
        ]
        return dict(zip(sides, covariance.split_damping(damping, *means), strict=True))

    def _curvature(self, state: State) -> Tensor:
        """d_G d_Aᵀ + λ, [G, o, i], with 1 in place of a side that has no factor."""
        known = next(state[key] for key in ("outputs_values", "inputs_values") if key in state)
        one = known.new_ones((), dtype=wide(known.dtype))
        outputs, inputs = (
            state[key].to(one.dtype).unsqueeze(dim) if key in state else one
            for key, dim in (("outputs_values", -1), ("inputs_values", -2))
        )
        return (outputs * inputs).add_(cast(float, self.damping))


def output_gain(shared: dict[str, Tensor], true: Tensor | None) -> Tensor:
    """What makes G of the summed moments: c²/n, [1], with c the factor of the gradient since.

    Args:
        shared: What crossed workers: "samples" n, and "shown" if c can be known.
        true: Sums of the gradient that is stepped on, [G, o].
    """
    gain = shared["samples"].clamp_min(1).reciprocal()
    if true is None or "shown" not in shared:
        return gain
    return gain * loss_scale(shared["shown"], true).square().to(gain.dtype)
