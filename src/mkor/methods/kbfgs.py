"""K-BFGS: Kronecker factors kept inverted by BFGS (Goldfarb, Ren and Bahamou, NeurIPS 2020).

A layer with weight W [o, i] keeps H_a, which follows the inverse of the second moment of its
inputs, and H_g, which follows the inverse Hessian of the loss by its outputs; a step turns ∇W into
H_g ∇W H_a.

H_a sees no differences: A is known, so the action of A on a vector makes a pair ("Hessian action").
H_g needs two evaluations of the same batch, at the weights before and after a step. The first pass
(`update`) keeps the mean output h̄ = Wā and the mean output gradient ḡ of the batch; the second
(`revisit`) takes the difference of both as a pair.

| paper | here |
| ----- | ---- |
| A, its decay β | `state["moment"]` over `state["weight"]`, `decay` |
| H_a, H_g | `state["inputs"]`, `state["outputs"]` |
| K-BFGS(L): pairs (s, y) for H_g | `state["steps"]`, `state["changes"]` |
| h̄, ḡ of the first pass | `state["mean_outputs"]`, `state["mean_grads"]` |
| s, y of H_g, their decay | `state["s"]`, `state["y"]`, `pair_decay` |
| λ; √λ is added to A and is the least curvature of a pair | `damping` |

Shapes: G stack, o and i sides, k pairs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mkor.factors import bfgs, covariance, dense, pairs
from mkor.linalg import apply_factor, sandwich
from mkor.messages import Exchange
from mkor.methods.base import (
    EVENTS,
    Kind,
    LayerShape,
    Method,
    Moment,
    Seen,
    State,
    Sums,
    Update,
    wide,
)
from mkor.methods.statistics import (
    all_finite,
    count,
    gradient_messages,
    informative,
    input_sums,
    mean_gradient,
)

EXACT = ("weight", "mean_outputs", "mean_grads", "s", "y")
"""State that half precision can't hold: what is subtracted, and weights."""

MATRICES = ("inputs", "outputs")
INPUT_SIDE = ("moment", "weight", "inputs")
OUTPUT_SIDE = ("s", "y", "outputs", "steps", "changes")
"""Which state is the identity at the start, and which belongs to a side."""


@dataclass(frozen=True)
class KBFGSMethod(Method):
    """Options of K-BFGS; see `mkor.KBFGS` for their meaning.

    Attributes:
        start_steps: Steps at the start in which H_a is the inverse of A afresh.
        starting: Whether it is in this update; `at` and `first` decide.
    """

    damping: float
    decay: float
    pair_decay: float
    memory: int | None
    max_dim: int
    start_steps: int
    state_dtype: torch.dtype | None
    on_nonfinite: str
    starting: bool = True
    second_pass: bool = True
    name: str = "kbfgs"

    def at(self, step: int) -> KBFGSMethod:
        """Besides schedules: the first steps invert A afresh."""
        return replace(super().at(step), starting=step < self.start_steps)

    def first(self) -> KBFGSMethod:
        """A layer's first update inverts A, whenever it comes."""
        return replace(self, starting=True)

    def dtype(self, parameters: torch.dtype, key: str = "") -> torch.dtype:
        """Dtype of the state tensor `key`; differences are taken in full precision."""
        return wide(parameters) if key in EXACT else self.state_dtype or wide(parameters)

    def absolute(self) -> bool:
        """λ is absolute, and ḡ must not change its scale between the passes."""
        return True

    def weighs(self) -> bool:
        """A mean gradient that is rounding noise is told by its share of the whole."""
        return True

    def wants(self, shape: LayerShape) -> tuple[Kind, Kind]:
        """The second moment of inputs that get a factor; of the output gradients their sum."""
        return Moment(matrix=self.sides(shape)[1]), Sums(1)

    def wants_again(self, shape: LayerShape) -> tuple[Kind, Kind]:
        """Only means are compared."""
        return Moment(matrix=False), Sums(1)

    def sides(self, shape: LayerShape) -> tuple[bool, bool]:
        """Which sides get a factor: pairs fit every width, matrices don't."""
        outputs = self.memory is not None or shape.outputs <= self.max_dim
        return outputs, shape.inputs <= self.max_dim

    def limit(self) -> str:
        """What sides without a factor are."""
        return f"wider than max_dim={self.max_dim}"

    def init(self, shape: LayerShape, where: torch.device, parameters: torch.dtype) -> State:
        """Identity factors, nothing averaged yet, and the counters of what went wrong."""
        state = {
            key: torch.zeros(size, dtype=self.dtype(parameters, key), device=where)
            for key, size in self._sizes(shape).items()
        }
        for side in [key for key in MATRICES if key in state]:
            state[side].diagonal(dim1=-2, dim2=-1).fill_(1)
        if self.sides(shape)[0]:
            state["pending"] = torch.zeros(shape.stack, dtype=torch.bool, device=where)
        return state | {"events": torch.zeros(len(EVENTS), dtype=torch.int64, device=where)}

    def bytes(self, shape: LayerShape, parameters: torch.dtype) -> int:
        """Bytes of the state: twice the square of the inputs, H_g or its pairs, and four means."""
        total = shape.stack * self.sides(shape)[0] + 8 * len(EVENTS)
        for key, size in self._sizes(shape).items():
            total += self.dtype(parameters, key).itemsize * torch.Size(size).numel()
        return total

    def update(self, state: State, seen: Seen) -> Update:
        """The first pass: fold the inputs into A and H_a, and keep what the second compares."""
        sums = {"rows": seen.rows, "input_sums": input_sums(seen)}
        sums |= {"inputs": seen.inputs} if "moment" in state else {}
        squares = ("inputs",) if "moment" in state else ()
        messages = gradient_messages(seen)
        shared = yield Exchange(sum=sums, mean=messages, symmetric=squares, last=True)
        rows = shared["rows"].sum()
        means = shared["input_sums"] / rows  # ā, [G, i]
        if "moment" in state:
            self._absorb(state, shared["inputs"], means, rows)
        if "pending" in state:
            grads = mean_gradient(seen, shared)  # [G, o]
            told = informative(means[..., None], grads[..., None], seen.gradient)  # [G]
            self._remember(state, outputs_of(seen, means), grads, rows > 0, told)
        return state

    def revisit(self, state: State, seen: Seen) -> Update:
        """The second pass: what changed since the first is a pair for H_g."""
        if "pending" not in state:
            return state
        sums = {"rows": seen.rows, "input_sums": input_sums(seen)}
        same = torch.ones_like(seen.rows) if seen.same is None else seen.same.to(seen.rows)[None]
        sums["strayed"] = 1 - same
        shared = yield Exchange(sum=sums, mean=gradient_messages(seen), last=True)
        rows = shared["rows"].sum()
        outputs = outputs_of(seen, shared["input_sums"] / rows)
        s = outputs - state["mean_outputs"]  # [G, o]
        y = mean_gradient(seen, shared) - state["mean_grads"]  # [G, o]
        present = (rows > 0) & state["pending"]  # [G]
        state["pending"] = state["pending"] & (rows == 0)
        strayed = present & (shared["strayed"] > 0)
        count(state, mismatched=strayed)
        self._pair(state, s, y, present & ~strayed)
        return state

    def precondition(self, state: State, grad: Tensor) -> Tensor:
        """H_g ∇W H_a, [G, o, i]."""
        if "steps" in state:
            grad = apply_outputs(state, grad.to(wide(state["steps"].dtype)))
        return sandwich(state.get("outputs"), grad, state.get("inputs"))

    def _sizes(self, shape: LayerShape) -> dict[str, tuple[int, ...]]:
        stack, outputs, inputs = shape.stack, shape.outputs, shape.inputs
        keep_outputs, keep_inputs = self.sides(shape)
        sizes: dict[str, tuple[int, ...]] = {}
        if keep_inputs:
            square = (stack, inputs, inputs)
            sizes |= {"moment": square, "inputs": square, "weight": (stack,)}
        if keep_outputs:
            sizes |= dict.fromkeys(("mean_outputs", "mean_grads", "s", "y"), (stack, outputs))
            if self.memory is None:
                sizes["outputs"] = (stack, outputs, outputs)
            else:
                sizes |= dict.fromkeys(("steps", "changes"), (stack, self.memory, outputs))
        return sizes

    def _absorb(self, state: State, moment: Tensor, means: Tensor, rows: Tensor) -> None:
        """A ← γA + (1-γ)·E[aaᵀ], then H_a after it."""
        average, weight = state["moment"], state["weight"]
        gain = torch.where(rows > 0, 1 / rows, 0)
        gain, bounded = covariance.bounded(
            average, weight, moment, gain, self.decay, self.damping**0.5
        )
        new = self.decay * dense.diagonal_of(average, moment)
        new = new + (1 - self.decay) * gain[:, None] * moment.diagonal(dim1=-2, dim2=-1)  # [G, i]
        # A moment that isn't finite or leaves the dtype's range does so on its diagonal.
        finite = all_finite(new.to(average.dtype), means)
        usable = (rows > 0) & finite  # [G]
        self._leave_out(state, (rows > 0) & ~finite, INPUT_SIDE)
        count(state, bounded=usable & bounded)
        covariance.average_(average, weight, moment, gain, self.decay, usable)
        if self.starting:
            self._invert(state, usable)
        else:
            self._act(state, means, usable)

    def _invert(self, state: State, usable: Tensor) -> None:
        """H_a = (A + √λI)⁻¹; it stays where rounding leaves no inverse."""
        inverse, dtype = state["inputs"], wide(state["inputs"].dtype)
        moment, weight = state["moment"], state["weight"]
        new, sound = covariance.inverse(moment, weight, self.damping**0.5, dtype)
        covariance.replace_(inverse, new, usable & sound)
        count(state, rejected=usable & ~sound)

    def _act(self, state: State, means: Tensor, usable: Tensor) -> None:
        """BFGS of H_a with s = H_a ā and y = (A + √λI)s."""
        (unit,) = bfgs.in_range(means[..., None])  # [G, i, 1]
        (s,) = bfgs.in_range(apply_factor(state["inputs"], unit))
        weight = state["weight"].to(s.dtype)[:, None, None]
        y = apply_factor(state["moment"], s) / weight + self.damping**0.5 * s
        s, y = bfgs.in_range(s, y)
        told = bfgs.tells(s, y, torch.linalg.vector_norm(means, dim=-1))
        used, broken = bfgs.absorb_(state["inputs"], s, y, usable & told)
        count(state, resets=broken, rejected=usable & ~used & ~broken)

    def _remember(
        self, state: State, outputs: Tensor, grads: Tensor, present: Tensor, told: Tensor
    ) -> None:
        """Keep h̄ and ḡ [G, o] for the second pass; there is none where ḡ is rounding noise."""
        finite = all_finite(outputs, grads)  # [G]
        # Inputs that aren't finite have been counted where they have a factor.
        at_fault = all_finite(grads) if "moment" in state else finite
        self._leave_out(state, present & ~at_fault, OUTPUT_SIDE)
        usable = present & finite
        for key, value in (("mean_outputs", outputs), ("mean_grads", grads)):
            state[key] = torch.where(usable[:, None], value.to(state[key].dtype), state[key])
        state["pending"] = torch.where(present, finite & told, state["pending"])

    def _pair(self, state: State, s: Tensor, y: Tensor, present: Tensor) -> None:
        """Average the pair, damp it twice, and update H_g or its memory by it."""
        finite = all_finite(s, y)  # [G]
        usable = present & finite
        self._leave_out(state, present & ~finite, OUTPUT_SIDE)
        # A pair weighs 1 - pair_decay; ten times as much as the average where that is a tenth.
        limit = 1 / (1 - self.pair_decay) ** 2
        scale, bounded = bfgs.bounded((state["s"], state["y"]), (s, y), limit)
        for key, value in (("s", s), ("y", y)):
            moved = self.pair_decay * state[key] + (1 - self.pair_decay) * scale * value
            state[key] = torch.where(usable[:, None], moved.to(state[key].dtype), state[key])
        s, y = bfgs.in_range(state["s"][..., None], state["y"][..., None])  # [G, o, 1]
        s, lengthened = bfgs.damp_by_inverse(s, y, apply_outputs(state, y))
        y, raised = bfgs.damp_by_level(s, y, self.damping**0.5)
        s, y = bfgs.in_range(s, y)
        told = bfgs.tells(s, y, torch.linalg.vector_norm(state["mean_grads"], dim=-1))
        if "outputs" in state:
            used, broken = bfgs.absorb_(state["outputs"], s, y, usable & told)
        else:
            used, broken = pairs.absorb_(state["steps"], state["changes"], s, y, usable & told)
        count(state, damped=usable & (lengthened | raised), bounded=usable & bounded)
        count(state, resets=broken, rejected=usable & ~used & ~broken)

    def _leave_out(self, state: State, skipped: Tensor, keys: tuple[str, ...]) -> None:
        """Count statistics that are left out, and reset what they would have changed if asked."""
        count(state, skipped=skipped)
        if self.on_nonfinite != "reset":
            return
        for key in [key for key in keys if key in state]:
            if key in MATRICES:
                covariance.identity_(state[key], skipped)
            else:
                covariance.replace_(state[key], torch.zeros_like(state[key]), skipped)
        count(state, resets=skipped)


def outputs_of(seen: Seen, means: Tensor) -> Tensor:
    """The mean output h̄ = Wā of the layer, [G, o], from its mean input ā [G, i]."""
    if seen.weight is None:
        raise ValueError("K-BFGS needs the weight of a layer in seen.weight")
    return (seen.weight.to(means.dtype) @ means[..., None])[..., 0]


def apply_outputs(state: State, columns: Tensor) -> Tensor:
    """The product of H_g and columns [G, o, n], float32 or float64."""
    if "outputs" in state:
        return apply_factor(state["outputs"], columns)
    steps, changes = (state[key].to(columns.dtype) for key in ("steps", "changes"))
    return pairs.product(steps, changes, columns)
