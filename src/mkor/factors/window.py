"""A side's covariance as a window of its last k vectors, C = Σ w_i v_i v_iᵀ with w_i ∝ γ^age.

A ring buffer: an update overwrites the oldest rows and computes only the products of the new ones,
O(r·k·d). The age counts updates. Rows of a stack's matrices may have been taken at different times,
since a statistic that can't be used is left out, so each matrix has a place of its own.

Shapes as in `thin`, which says what is done with the rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mkor.factors import thin
from mkor.factors.thin import Parts


@dataclass(frozen=True)
class Window:
    """A window of k vectors.

    Attributes:
        count: k.
        decay: γ.
        damping: μ, relative to the trace of C.
    """

    count: int
    decay: float
    damping: float

    def init(self, stack: int, side: int, dtype: torch.dtype, where: torch.device) -> Parts:
        """An empty window; "place" is the row that the next vector overwrites, [G]."""
        place = torch.zeros(stack, dtype=torch.int64, device=where)
        return thin.init(stack, self.count, side, dtype, where) | {"place": place}

    def absorb_(self, parts: Parts, vectors: thin.Vectors, use: Tensor) -> Tensor:
        """Take vectors in where `use` [G]; whether that was possible, [G].

        Args:
            parts: The window, changed in place.
            vectors: At most k of them.
            use: Where to.
        """
        rows, number = parts["rows"], vectors.rows.shape[1]
        ahead = torch.arange(number, device=rows.device)
        index = (parts["place"][:, None] + ahead) % self.count  # [G, r]
        stack = torch.arange(len(rows), device=rows.device)[:, None]
        taken = vectors.rows.to(rows.dtype)
        sizes = parts["sizes"] * self.decay**0.5
        sizes[stack, index] = vectors.sizes
        gram = self._gram(parts, taken, stack, index)
        root, sound = thin.solve_root(
            thin.relative_to(sizes, thin.total(sizes)), gram, self.damping
        )
        where = use & sound
        rows[stack, index] = torch.where(where[:, None, None], taken, rows[stack, index])
        place = (parts["place"] + number) % self.count
        new = {"sizes": sizes, "gram": gram, "root": root, "place": place}
        thin.write_(parts, new, where)
        return sound

    def _gram(self, parts: Parts, taken: Tensor, stack: Tensor, index: Tensor) -> Tensor:
        """BBᵀ with the new rows in place, [G, k, k]."""
        gram, rows = parts["gram"].clone(), parts["rows"]
        taken = taken.to(gram.dtype)
        crossed = taken @ rows.to(gram.dtype).mT  # [G, r, k], with rows that are going
        gram[stack, index] = crossed
        gram.mT[stack, index] = crossed
        gram[stack[..., None], index[:, :, None], index[:, None, :]] = taken @ taken.mT
        return gram
