"""A side's moving covariance C ← γC + (1-γ)VVᵀ kept as its k leading eigenvectors.

With C ≈ Bᵀ D² B, the new average is EᵀE for E = [√γ·D B; √(1-γ)·Vᵀ] of k + r rows. Its nonzero
eigenvalues are those of the small Gram matrix EEᵀ = QΛQᵀ, and its eigenvectors are Λ^{-1/2} QᵀE,
of which the k largest are kept. What that discards is known, because the trace of the average
needs no eigenvectors: tr C ← γ·tr C + (1-γ)·‖V‖². The damping is relative to this whole trace.

The eigendecomposition is torch's own, which looks at its success on the host: an update waits for
the device once a side. Steps that only precondition never do.

Shapes as in `thin`, which says what is done with the rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mkor.factors import thin
from mkor.factors.covariance import decompose
from mkor.factors.thin import Parts


@dataclass(frozen=True)
class LowRank:
    """The k leading eigenvectors.

    Attributes:
        count: k; no side has more than its length.
        decay: γ.
        damping: μ, relative to the trace of C.
        power: p.
    """

    count: int
    decay: float
    damping: float
    power: float = 1.0

    def init(self, stack: int, side: int, dtype: torch.dtype, where: torch.device) -> Parts:
        """Nothing yet; "trace" is √tr(C), [G]."""
        parts = thin.init(stack, min(self.count, side), side, dtype, where)
        return parts | {"trace": torch.zeros_like(parts["sizes"][:, 0])}

    def absorb_(self, parts: Parts, vectors: thin.Vectors, use: Tensor) -> Tensor:
        """Take vectors in where `use` [G]; whether that was possible, [G].

        Args:
            parts: The eigenvectors, changed in place.
            vectors: Any number.
            use: Where to.
        """
        old, new = self.decay**0.5, (1 - self.decay) ** 0.5
        trace = torch.hypot(old * parts["trace"], new * thin.total(vectors.sizes))  # [G]
        sizes = torch.cat([old * parts["sizes"], new * vectors.sizes], dim=-1)
        weights = thin.relative_to(sizes, trace)  # of the rows of E, [G, k + r]
        rows, relative, sound = self._compress(parts, vectors.rows, weights)
        kept = rows.to(parts["rows"].dtype)
        exact = kept.to(rows.dtype)
        gram = exact @ exact.mT
        level = self.level(relative, rows.shape[-1])
        root, solved = thin.spectral_root(relative, gram, level, self.power)
        changed = {"rows": kept, "sizes": relative * trace[:, None], "gram": gram}
        sound = sound & solved
        thin.write_(parts, changed | {"root": root, "trace": trace}, use & sound)
        return sound

    def level(self, relative: Tensor, side: int) -> Tensor:
        """The damping in parts of tr(C), [G].

        Args:
            relative: Square roots of the eigenvalues that are kept, in parts of √tr(C), [G, k].
            side: d.
        """
        return torch.full_like(relative[:, 0], self.damping)

    def _compress(
        self, parts: Parts, vectors: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Unit rows [G, k, d], their relative sizes [G, k], and whether they are sound, [G]."""
        count = parts["gram"].shape[-1]
        rows = parts["rows"].to(vectors.dtype)
        crossed = rows @ vectors.mT  # [G, k, r]
        above = torch.cat([parts["gram"], crossed], dim=-1)
        below = torch.cat([crossed.mT, vectors @ vectors.mT], dim=-1)
        gram = torch.cat([above, below], dim=-2) * weights[:, :, None] * weights[:, None, :]
        values, turns = decompose(gram)  # ascending
        values, turns = values[:, -count:], turns[..., -count:]
        least = torch.finfo(gram.dtype).eps * gram.shape[-1]
        told = values > least  # what is below is rounding
        scale = torch.where(told, values, 1).rsqrt()
        mixed = weights[:, :, None] * turns * torch.where(told, scale, 0)[:, None, :]  # [G, k+r, k]
        out = mixed[:, :count].mT @ rows + mixed[:, count:].mT @ vectors
        sound = torch.isfinite(values).all(dim=-1)
        return out, torch.where(told, values, 0).sqrt(), sound
