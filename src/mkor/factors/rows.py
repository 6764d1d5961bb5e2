"""A layer's curvature kept as rows: F = Σ_j u_j u_jᵀ with u_j = outputs_j ⊗ inputs_j.

F has o·i rows and columns and is never formed. By the Sherman-Morrison-Woodbury identity (eq. 13 of
the paper), with U the matrix of the u_j, the damping μ and the kernel K = UᵀU, which is the
elementwise product of two Gram matrices,

    (F + μI)⁻¹ ∇ = (∇ - U (K + μI)⁻¹ Uᵀ∇) / μ.

A layer is preconditioned with a state of four tensors: the two sides of the rows, the Cholesky
factor of K + μI, and the μ in it. Without rows and with μ = 1 the gradient comes out as it went in:
that is the state before the first update, and what is left where a statistic can't be used.

Shapes: G stack, m rows, o output side, i input side.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mkor.blocks import Block, Blockwise, Shares, columns_of, counted, rows_of

NARROW = ("inputs", "outputs")
"""The tensors of the state that may be kept in half precision; they are nearly all of it."""

ROUNDING = 4.0
"""Least damping, in units of the rounding of the kernel's trace."""


def empty(
    stack: int, outputs: int, inputs: int, dtype: torch.dtype, where: torch.device
) -> dict[str, Tensor]:
    """The state without rows, which leaves the gradient as it is; rows will be of this dtype."""
    wide = torch.promote_types(dtype, torch.float32)
    return {
        "inputs": torch.zeros(stack, 0, inputs, dtype=dtype, device=where),
        "outputs": torch.zeros(stack, 0, outputs, dtype=dtype, device=where),
        "kernel": torch.zeros(stack, 0, 0, dtype=wide, device=where),
        "damping": torch.ones(stack, dtype=wide, device=where),
    }


def precondition(state: dict[str, Tensor], grad: Tensor) -> Tensor:
    """(F + μI)⁻¹ ∇ for ∇ [G, o, i], in the dtype of the kernel."""
    root = state["kernel"]
    inputs, outputs, grad = (t.to(root.dtype) for t in (state["inputs"], state["outputs"], grad))
    along = ((outputs @ grad) * inputs).sum(dim=-1, keepdim=True)  # Uᵀ∇, [G, m, 1]
    weights = torch.cholesky_solve(along, root)  # [G, m, 1]
    return (grad - outputs.mT @ (weights * inputs)) / state["damping"][:, None, None]


def precondition_block(state: dict[str, Tensor], grad: Tensor, block: Block) -> Blockwise:
    """The same of a block [1, o', i'] of ∇; m numbers cross."""
    root = state["kernel"]
    inputs, outputs, grad = (t.to(root.dtype) for t in (state["inputs"], state["outputs"], grad))
    inputs, outputs = columns_of(inputs, block), rows_of(outputs, block)
    along = ((outputs @ grad) * counted(inputs, block)).sum(dim=-1, keepdim=True)
    along = (yield Shares(both={"along": along}))["along"]  # Uᵀ∇, [1, m, 1]
    weights = torch.cholesky_solve(along, root)
    return (grad - outputs.mT @ (weights * inputs)) / state["damping"][:, None, None]


def gram(inputs: Tensor, outputs: Tensor) -> Tensor:
    """The kernel K of rows [G, m, i] and [G, m, o]: all ⟨u_j, u_k⟩, [G, m, m]."""
    inputs, outputs = widened(inputs), widened(outputs)
    return (inputs @ inputs.mT).mul_(outputs @ outputs.mT)


def renew(
    old: dict[str, Tensor],
    inputs: Tensor,
    outputs: Tensor,
    present: Tensor,
    prior: Tensor | None,
    damping: float,
    reset: bool,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The state of new rows; nothing of it synchronises with the host.

    Where no row counts, the rows are not finite or their kernel has no Cholesky factor, the old
    state stays if it has as many rows, or else none are left. μ is raised to the rounding of K
    where it is below, so that a kernel of rows that nearly repeat each other can be factorised.

    Args:
        old: The state so far, which tells the dtypes.
        inputs: [G, m, i], m > 0.
        outputs: [G, m, o].
        present: Whether any row counts, [1].
        prior: What stands for the identity in K + μI, positive definite [G, m, m]; None for I.
        damping: μ.
        reset: Whether rows that are not finite empty the state.

    Returns:
        The state, and what happened to each matrix of the stack, [G]: "skipped" where the rows
        were not finite, "rejected" where their kernel had no factor, "resets" where the state lost
        the rows it had.
    """
    inputs, outputs = inputs.to(old["inputs"]), outputs.to(old["outputs"])
    finite = torch.isfinite(inputs).all(dim=-1) & torch.isfinite(outputs).all(dim=-1)
    usable = finite.all(dim=-1)  # [G]
    each = usable[:, None, None]
    inputs, outputs = torch.where(each, inputs, 0), torch.where(each, outputs, 0)
    root, used, sound = factorise(gram(inputs, outputs), prior, damping)
    new = {"inputs": inputs, "outputs": outputs, "kernel": root, "damping": used}
    good = usable & sound & present
    fits = old["inputs"].shape == inputs.shape
    stays = ~good & (usable | (not reset)) & fits  # [G]
    state = choose(good, new, choose(stays, old, blank(new)) if fits else blank(new))
    lost = ~good & ~stays & (old["inputs"].shape[1] > 0)
    return state, {"skipped": ~usable, "rejected": usable & ~sound, "resets": lost}


def unit(own: Tensor, every: Tensor) -> Tensor:
    """What makes F the mean over all rows if g carries 1 over its worker's rows: n_p/√N, [1]."""
    return own * every.clamp_min(1).rsqrt()


def tally(names: tuple[str, ...], happened: dict[str, Tensor]) -> Tensor:
    """How often each of the named events happened in the matrices of a stack, [len(names)]."""
    none = torch.zeros_like(next(iter(happened.values())))
    return torch.stack([happened.get(name, none) for name in names]).sum(dim=-1)


def factorise(
    kernel: Tensor, prior: Tensor | None, damping: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Cholesky factor of K + μ·prior, the μ used [G], and whether there is one [G]; spoils K."""
    diagonal = kernel.diagonal(dim1=-2, dim2=-1)  # [G, m]
    least = ROUNDING * torch.finfo(kernel.dtype).eps * diagonal.sum(dim=-1)
    used = least.clamp_min(damping)  # μ, [G]
    if prior is None:
        diagonal.add_(used[:, None])
    else:
        kernel.add_(prior.to(kernel) * used[:, None, None])
    root, info = torch.linalg.cholesky_ex(kernel)
    ends = root.diagonal(dim1=-2, dim2=-1)
    return root.contiguous(), used, (info == 0) & torch.isfinite(ends).all(dim=-1)


def blank(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rows of zeros in the shapes of `state`: the gradient comes out as it went in."""
    out = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
    out["kernel"].diagonal(dim1=-2, dim2=-1).fill_(1)
    out["damping"].fill_(1)
    return out


def choose(first: Tensor, one: dict[str, Tensor], other: dict[str, Tensor]) -> dict[str, Tensor]:
    """State `one` for the matrices of the stack where `first` [G], else `other`."""
    return {
        key: torch.where(first.view(-1, *[1] * (tensor.dim() - 1)), one[key], tensor)
        for key, tensor in other.items()
    }


def share(rows: int, rank: float) -> int:
    """How many of `rows` a fraction `rank` keeps: at least one, unless there is none."""
    return min(rows, max(1, math.ceil(round(rank * rows, 9))))  # 0.7·10 is a little above 7


def sample(inputs: Tensor, grads: Tensor, seed: int, *, rank: float) -> dict[str, Tensor]:
    """Rows drawn with p_j ∝ ‖a_j‖²‖g_j‖², weighted so that the mean over draws is F.

    A row drawn with probability p_j in each of m draws carries the weight 1/(m·p_j), folded into g
    as its square root. The draws are stratified, one from each m-th of the distribution: as
    unbiased as independent ones, and never of more variance. If no fewer rows than there are would
    be drawn, all are kept as they are.

    Args:
        inputs: a, [G, n, i].
        grads: g, [G, n, o].
        seed: Of the draws; the global random state is left alone.
        rank: The fraction of rows to draw.

    Returns:
        "inputs" [G, m, i] and "grads" [G, m, o]; not finite where any of the n rows isn't.
    """
    inputs, grads = widened(inputs), widened(grads)
    stack, rows = inputs.shape[:2]
    count = share(rows, rank)
    if count == rows:
        return {"inputs": inputs, "grads": grads}
    sizes = relative_norms(inputs) * relative_norms(grads)
    sizes = sizes.square()  # [G, n]
    ends = sizes.cumsum(dim=-1)
    total = ends[:, -1:]
    # Shapes alone have no random state.
    source = None if inputs.is_meta else torch.Generator(inputs.device).manual_seed(seed)
    place = torch.rand(stack, count, generator=source, device=ends.device, dtype=ends.dtype)
    place = (place + torch.arange(count, device=ends.device)) / count * total
    index = torch.searchsorted(ends, place, right=True).clamp_max_(rows - 1)  # [G, m]
    drawn = sizes.gather(1, index)
    weight = torch.where(drawn > 0, (total / (count * drawn)).sqrt(), 0)
    # Sums over all rows carry a row that isn't finite to every row drawn, where it is noticed.
    weight = torch.where(torch.isfinite(total), weight, torch.nan)
    return {"inputs": pick(inputs, index), "grads": pick(grads, index) * weight[..., None]}


def widened(rows: Tensor) -> Tensor:
    """Rows in float32, or float64 if they are."""
    return rows.to(torch.promote_types(rows.dtype, torch.float32))


def relative_norms(rows: Tensor) -> Tensor:
    """Norms of rows [G, n, d] as parts of the longest, so that no product overflows, [G, n]."""
    norms: Tensor = torch.linalg.vector_norm(rows, dim=-1)
    return norms / norms.amax(dim=-1, keepdim=True).clamp_min(torch.finfo(norms.dtype).tiny)


def pick(rows: Tensor, index: Tensor) -> Tensor:
    """The rows [G, n, d] at `index` [G, m], [G, m, d]."""
    return rows.gather(1, index[..., None].expand(-1, -1, rows.shape[-1]))
