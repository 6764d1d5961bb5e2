"""Error of HyLo's decompositions against the dense natural gradient, on small random problems.

python benchmarks/kid.py
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from record import save
from torch import Tensor

from mkor.factors.interpolative import pivots

DRAWS = 50
SIZES = ((6, 2), (6, 4), (64, 6), (64, 16), (64, 32))
"""Rows n and kept rows m."""
DAMPINGS = (1.0, 0.1, 0.01)
"""μ in units of the trace of F."""


def independent(rows: int, source: torch.Generator) -> tuple[Tensor, Tensor]:
    """Inputs and output gradients, all entries independent."""
    width = 4 if rows < 10 else 8
    a = torch.randn(rows, width + 1, generator=source, dtype=torch.float64)
    return a, torch.randn(rows, width, generator=source, dtype=torch.float64)


def uneven(rows: int, source: torch.Generator) -> tuple[Tensor, Tensor]:
    """Decaying spectra, a mean input, and rows of very different size, as networks show them."""
    a, g = independent(rows, source)
    size = torch.randn(rows, 1, generator=source, dtype=torch.float64).exp()
    return 0.5 + a / torch.arange(1, a.shape[1] + 1), size * g / torch.arange(1, g.shape[1] + 1)


PROBLEMS: dict[str, Callable[[int, torch.Generator], tuple[Tensor, Tensor]]] = {
    "independent": independent,
    "uneven": uneven,
}


def solve(u: Tensor, middle: Tensor, grad: Tensor, damping: float) -> Tensor:
    """(∇ - U_s N U_sᵀ∇)/μ for the rows u_j of `u` and N = `middle`."""
    return (grad - u.T @ (middle @ (u @ grad))) / damping


def eye(count: int) -> Tensor:
    """The identity in float64."""
    return torch.eye(count, dtype=torch.float64)


def decomposed(a: Tensor, g: Tensor, u: Tensor, kept: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pivots s, P and the residual E of K = P K_ss Pᵀ + E, rows of u scaled by 1/√n."""
    index, _ = pivots(a[None], g[None], kept)
    s = index[0]
    kernel = u @ u.T
    weights = torch.linalg.solve(kernel[s][:, s], kernel[s]).T  # P, [n, m]
    return s, weights, kernel - weights @ kernel[s][:, s] @ weights.T


def with_residual(u: Tensor, parts: tuple[Tensor, Tensor, Tensor], mu: float, which: str) -> tuple:
    """U_s and N = (R⁻¹ + K_ss)⁻¹, R = Pᵀ(E + μI)⁻¹P, with all of E, its diagonal or none."""
    s, weights, residual = parts
    kept = {"none": 0 * residual, "diagonal": residual.diagonal().diag(), "full": residual}[which]
    inner = weights.T @ torch.linalg.inv(kept + mu * eye(len(u))) @ weights
    return u[s], torch.linalg.inv(torch.linalg.inv(inner) + u[s] @ u[s].T)


def released_kid(u: Tensor, kept: int, mu: float) -> tuple[Tensor, Tensor]:
    """What the released code computes: unpivoted QR of the sorted kernel, two scales."""
    rows = u * len(u) ** 0.5
    rows = rows[rows.norm(dim=1).argsort(descending=True)]
    q, r = torch.linalg.qr(rows @ rows.T)
    weights = torch.cat([eye(kept), torch.linalg.solve(r[:kept, :kept], r[:kept, kept:])], dim=1)
    residual = torch.zeros_like(q)
    residual[:, kept:] = q[:, kept:] @ r[kept:, kept:]
    inner = weights @ torch.linalg.inv(residual + mu * eye(len(u))) @ weights.T
    picked = rows[:kept] / kept**0.5
    return picked, torch.linalg.inv(torch.linalg.inv(inner) + picked @ picked.T)


def drawn(u: Tensor, kept: int, mu: float, how: str, source: torch.Generator) -> tuple:
    """Rows drawn by their size: independently, stratified, or as released without weights."""
    sizes = u.norm(dim=1).square()
    sizes = sizes / sizes.sum()
    if how == "released":
        picked = u[torch.multinomial(sizes, kept, generator=source)] * (len(u) / kept) ** 0.5
    else:
        place = torch.rand(kept, generator=source, dtype=torch.float64)
        place = (place + torch.arange(kept)) / kept if how == "stratified" else place
        index = torch.searchsorted(sizes.cumsum(0), place, right=True).clamp_max(len(u) - 1)
        picked = u[index] / (kept * sizes[index]).sqrt()[:, None]
    return picked, torch.linalg.inv(picked @ picked.T + mu * eye(kept))


def errors(problem: str, rows: int, kept: int, relative: float) -> dict[str, float]:
    """Median over draws of the relative error of V for the mean gradient, by variant."""
    source = torch.Generator().manual_seed(0)
    found: dict[str, list[float]] = {}
    for _ in range(DRAWS):
        a, g = PROBLEMS[problem](rows, source)
        u = torch.einsum("no,ni->noi", g, a).flatten(1) / rows**0.5
        grad, mu = u.mean(dim=0), relative * float(u.square().sum())
        exact = solve(u, torch.linalg.inv(u @ u.T + mu * eye(rows)), grad, mu)
        parts = decomposed(a, g, u, kept)
        kid = {f"KID, E {w}": with_residual(u, parts, mu, w) for w in ("none", "diagonal", "full")}
        kis = {
            f"KIS {w}": drawn(u, kept, mu, w, source)
            for w in ("stratified", "independent", "released")
        }
        for name, (picked, middle) in {
            **kid,
            "KID released": released_kid(u, kept, mu),
            **kis,
        }.items():
            error = (solve(picked, middle, grad, mu) - exact).norm() / exact.norm()
            found.setdefault(name, []).append(float(error))
    return {name: round(float(torch.tensor(each).median()), 3) for name, each in found.items()}


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/kid.json"))
    arguments = parser.parse_args()
    results = {}
    for problem in PROBLEMS:
        for rows, kept in SIZES:
            for relative in DAMPINGS:
                key = f"{problem}, n={rows}, m={kept}, mu={relative}·trace"
                results[key] = errors(problem, rows, kept, relative)
                print(key, results[key])
    save(arguments.output, results)


if __name__ == "__main__":
    main()
