"""MKOR: Kronecker factors kept inverted by low-rank updates (Algorithm 1 of the paper).

A layer with weight W [o, i] keeps two inverse factors, J_g [o, o] and J_a [i, i]. An update folds
a few vectors of each side into them, such as the mean output gradient g and the mean input a; a
step turns ∇W into J_g ∇W J_a. A factor is a matrix ("dense"), or the identity minus a few rows: the
last vectors ("window") or the leading eigenvectors of their moving covariance ("lowrank"). A layer
may have a matrix on a narrow side and rows on a wide one.

| paper | here |
| ----- | ---- |
| L⁻¹, R⁻¹ | `state["outputs"]`, `state["inputs"]`: matrices, their triangles, or rows |
| g, a (lines 2-3) | `gradient_vectors`, `input_vectors` |
| γ | `decay` |
| ε, ζ (lines 5-6) | `norm_limit`, `blend` |
| f | the engine's schedule |

Shapes: G stack, o and i sides, r vectors of an update.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from mkor import triangle
from mkor.blocks import Block, Blockwise
from mkor.factors import dense, thin
from mkor.factors.lowrank import LowRank
from mkor.factors.window import Window
from mkor.linalg import sandwich
from mkor.messages import Exchange, Stacked, Tensors
from mkor.methods.base import (
    EVENTS,
    Kind,
    LayerShape,
    Method,
    Seen,
    Sketch,
    State,
    Sums,
    Update,
    wide,
)
from mkor.methods.statistics import (
    gradient_messages,
    gradient_vectors,
    informative,
    input_vectors,
    loss_scale,
    sketch_messages,
    sketch_vectors,
)

SIDES = ("outputs", "inputs")


@dataclass(frozen=True)
class MKORMethod(Method):
    """Options of MKOR; see `mkor.MKOR` for their meaning. `count` is k, rows a side."""

    rule: str
    vectors: int
    decay: float
    damping: float | None
    norm_limit: float
    blend: float
    max_dim: int
    state_dtype: torch.dtype | None
    on_nonfinite: str
    statistic: str = "mean"
    representation: str = "dense"
    count: int = 0
    power: float = 1.0
    wide_sides: str | None = None
    packed: bool = False
    name: str = "mkor"

    @property
    def dense(self) -> bool:
        """Whether narrow sides have matrices."""
        return self.representation == "dense"

    @property
    def row_kind(self) -> str | None:
        """How sides without a matrix are kept: "window", "lowrank", or not at all."""
        return self.wide_sides if self.dense else self.representation

    @property
    def sketched(self) -> bool:
        """Whether the statistic is of the whole covariance, not of the mean."""
        return self.statistic == "sketch"

    def dtype(self, parameters: torch.dtype, key: str = "") -> torch.dtype:
        """Matrices and rows may be narrow; what is small is not."""
        dtype = super().dtype(parameters)
        return dtype if key in ("", "outputs", "inputs") else wide(dtype)

    def absolute(self) -> bool:
        """Without damping, and relative to each other in rows, the vectors count as they are."""
        return self.damping is None or self.row_kind is not None

    def weighs(self) -> bool:
        """A mean gradient that is rounding noise is told by its share of the whole."""
        return True

    def wants(self, shape: LayerShape) -> tuple[Kind, Kind]:
        """As many sums of blocks of rows, or with random signs, as an update has vectors."""
        kind = Sketch(self.vectors) if self.sketched else Sums(self.vectors)
        return kind, kind

    def sides(self, shape: LayerShape) -> tuple[bool, bool]:
        """Which sides (outputs, inputs) have a factor: a matrix, or rows if any side has them."""
        factors = self._factors(shape)
        return "outputs" in factors, "inputs" in factors

    def limit(self) -> str:
        """What sides without a factor are."""
        return f"wider than max_dim={self.max_dim}"

    def init(self, shape: LayerShape, where: torch.device, parameters: torch.dtype) -> State:
        """The identity on every side, and no events."""
        dtype = self.dtype(parameters)
        state = {"events": torch.zeros(len(EVENTS), dtype=torch.int64, device=where)}
        for side, length in self._factors(shape).items():
            if self._kept(length) == "dense":
                state[side] = self._pack(dense.identity(shape.stack, length, dtype, where))
                continue
            parts = self._thin(length).init(shape.stack, length, dtype, where)
            state |= {key_of(side, part): tensor for part, tensor in parts.items()}
        return state

    def bytes(self, shape: LayerShape, parameters: torch.dtype) -> int:
        """Bytes of the tensors that `init` makes, here without memory."""
        state = self.init(shape, torch.device("meta"), parameters)
        return sum(tensor.numel() * tensor.element_size() for tensor in state.values())

    def cost(self, shape: LayerShape) -> float:
        """Entries of the factors, which updates and steps go through."""
        lengths = self._factors(shape).values()
        rows = (d if self._kept(d) == "dense" else min(d, self.count) for d in lengths)
        return shape.stack * sum(d * k for d, k in zip(lengths, rows, strict=True))

    def update(self, state: State, seen: Seen) -> Update:
        """Algorithm 1, lines 2-8: average the vectors over workers, fold them into the inverses."""
        sums, means = self._messages(seen)
        shared = yield Exchange(sum=sums, mean=means, last=True)
        inputs, outputs = self._vectors(seen, shared)  # [G, i, r], [G, o, q]
        present = (shared["rows"].sum() > 0).expand(len(inputs))  # [G]
        if "inputs" in state:
            yield from self._absorb(state, "inputs", inputs, present)
        if "outputs" in state:
            if not self.sketched or seen.grads_reduced:
                present = present & informative(inputs, outputs, seen.gradient)  # [G]
            yield from self._absorb(state, "outputs", outputs, present)
        return state

    def precondition(self, state: State, grad: Tensor) -> Tensor:
        """Algorithm 1, line 9: J_g ∇W J_a, [G, o, i]."""
        rows = {side: parts_of(state, side) for side in SIDES if has_rows(state, side)}
        if len(rows) == len(SIDES):
            return thin.precondition(rows["outputs"], rows["inputs"], grad)
        for side, parts in rows.items():
            grad = thin.precondition_side(parts, grad, on_left=side == "outputs")
        matrices = {
            side: self._matrix(state[side], length)
            for side, length in zip(SIDES, grad.shape[1:], strict=True)
            if side in state and side not in rows
        }
        return sandwich(matrices.get("outputs"), grad, matrices.get("inputs"))

    def correction(self, state: State, pieces: Sequence[Tensor]) -> tuple[Tensor, Tensor] | None:
        """With rows on both sides, that of both as one product."""
        if not all(has_rows(state, side) for side in SIDES):
            return None
        outputs, inputs = (parts_of(state, side) for side in SIDES)
        dtype = torch.promote_types(pieces[0].dtype, outputs["root"].dtype)
        return thin.correction(outputs, inputs, pieces) if dtype == pieces[0].dtype else None

    @property
    def blockwise(self) -> bool:
        """Rows multiply blocks where they lie; a matrix needs the whole gradient."""
        return not self.dense

    def precondition_block(self, state: State, grad: Tensor, block: Block) -> Blockwise:
        """The same of a block."""
        outputs, inputs = (parts_of(state, side) for side in SIDES)
        return thin.precondition_block(outputs, inputs, grad, block)

    def _messages(self, seen: Seen) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """What workers add, and what they average."""
        if self.sketched:
            return sketch_messages(seen)
        return {"inputs": seen.inputs, "rows": seen.rows}, gradient_messages(seen)

    def _vectors(self, seen: Seen, shared: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The vectors of both sides, of the loss that is stepped on."""
        rows, grads = shared["rows"], shared.get("grads", seen.grads)
        if "shown" in shared and seen.true is not None:
            grads = grads * loss_scale(shared["shown"], seen.true)
        if not self.sketched:
            return input_vectors(shared["inputs"], rows), gradient_vectors(grads, rows)
        inputs = sketch_vectors(shared["inputs"], rows)
        if seen.grads_reduced:
            return inputs, grads.mT
        return inputs, sketch_vectors(grads, shared["samples"])

    def _factors(self, shape: LayerShape) -> dict[str, int]:
        """The lengths of the sides that have one."""
        sides = {"outputs": shape.outputs, "inputs": shape.inputs}
        return {side: length for side, length in sides.items() if self._kept(length) is not None}

    def _kept(self, length: int) -> str | None:
        """How a side is kept: "dense", "window", "lowrank", or None for the identity."""
        return "dense" if self.dense and length <= self.max_dim else self.row_kind

    def _thin(self, length: int) -> Window | LowRank:
        """What keeps the rows of a side: one no wider than the window keeps its whole average."""
        if self.row_kind == "window" and length > self.count:
            return Window(self.count, self.decay, cast(float, self.damping))
        return LowRank(self.count, self.decay, cast(float, self.damping), self.power)

    def _absorb(
        self, state: State, side: str, vectors: Tensor, present: Tensor
    ) -> Generator[Stacked, Tensors, None]:
        """Take the vectors [G, d, r] of a side in where `present`, and count what happened."""
        function, parts = self._absorb_dense, {"inverse": state[side]}
        if has_rows(state, side):
            function, parts = self._absorb_thin, parts_of(state, side)
        answer = yield Stacked(function, parts, {"vectors": vectors, "present": present})
        state["events"] += answer["events"].sum(dim=0)

    def _absorb_thin(self, parts: Tensors, given: Tensors) -> Tensors:
        """Take vectors into the parts of a side."""
        vectors, present = given["vectors"], given["present"]
        seen = thin.prepare(vectors.to(parts["sizes"].dtype))
        # Vectors that are all zero say nothing of directions: they would only age the others.
        use = present & seen.finite & (seen.sizes.amax(dim=-1) > 0)  # [G]
        sound = self._thin(vectors.shape[-2]).absorb_(parts, seen, use)
        reset = present & ~seen.finite & (self.on_nonfinite == "reset")
        thin.reset_(parts, reset)
        return events_of(skipped=~seen.finite, resets=reset, rejected=use & ~sound)

    def _absorb_dense(self, parts: Tensors, given: Tensors) -> Tensors:
        """Take vectors into an inverse [G, d, d]."""
        vectors, present = given["vectors"], given["present"]
        inverse = self._matrix(parts["inverse"], vectors.shape[-2])
        seen = dense.prepare(vectors.to(wide(inverse.dtype)), self.damping)
        rule = dense.RULES[self.rule]
        change = rule(inverse, seen, self.decay, self.norm_limit, self.blend)
        # A statistic that isn't finite makes an unsound update, which the guard turns into a reset.
        usable = present if self.on_nonfinite == "reset" else present & seen.finite  # [G]
        change, reset = dense.guard(change, usable, inverse.dtype)
        dense.write_(inverse, change)
        if self.packed:
            parts["inverse"].copy_(triangle.pack(inverse))
        return events_of(skipped=~seen.finite, resets=reset, blends=change.blended)

    def _pack(self, inverse: Tensor) -> Tensor:
        """What is kept of the matrix [G, d, d] of a side: all of it, or its triangle."""
        return triangle.pack(inverse) if self.packed else inverse

    def _matrix(self, kept: Tensor, length: int) -> Tensor:
        """The matrix again, [G, d, d]."""
        return triangle.unpack(kept, length) if self.packed else kept


def events_of(**happened: Tensor) -> Tensors:
    """What happened to each matrix of a stack, [G, events], in the order of `EVENTS`."""
    none = torch.zeros_like(next(iter(happened.values())))
    return {"events": torch.stack([happened.get(event, none) for event in EVENTS], dim=-1)}


def key_of(side: str, part: str) -> str:
    """The key of a part of a side in the state: the rows have the side's own."""
    return side if part == "rows" else f"{side}_{part}"


def has_rows(state: State, side: str) -> bool:
    """Whether a side is kept as rows."""
    return key_of(side, "root") in state


def parts_of(state: State, side: str) -> thin.Parts:
    """The parts of a side that is kept as rows, by their names without the side's."""
    own = {
        key.removeprefix(f"{side}_"): t for key, t in state.items() if key.startswith(f"{side}_")
    }
    return own | {"rows": state[side]}
