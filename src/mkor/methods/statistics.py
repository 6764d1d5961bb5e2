"""What several methods make of the statistics that a layer showed: pure functions.

Shapes: G stack, r and q vectors, o output side, i input side.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mkor.methods.base import EVENTS, Seen, State


def count(state: State, **events: Tensor) -> None:
    """Add up where in the stack something happened, flags [G] by the name of the event."""
    for name, where in events.items():
        state["events"][EVENTS.index(name)] += where.sum()


def all_finite(*vectors: Tensor) -> Tensor:
    """Where all entries of vectors [G, d] are finite, [G]."""
    return torch.stack([torch.isfinite(v).all(dim=-1) for v in vectors]).all(dim=0)


def input_sums(seen: Seen) -> Tensor:
    """The sum of the input rows, [G, i], which comes with moments."""
    if seen.input_sums is None:
        raise ValueError("the sum of the input rows is needed in seen.input_sums")
    return seen.input_sums


def loss_scale(shown: Tensor, true: Tensor) -> Tensor:
    """What the gradient was multiplied by since the backward pass, a scalar; 1 where all is zero.

    A loss scaler divides the gradients, and clipping shrinks them, after the rows were seen. Sums
    of the weight gradient before and after tell by how much.

    Args:
        shown: Sums of the gradient's entries as the backward pass made them, [G, o], averaged over
            workers.
        true: The same sums of the gradient that is stepped on, [G, o].
    """
    size = shown.abs().amax().clamp_min(torch.finfo(shown.dtype).tiny)
    units = shown / size  # squares of scaled gradients overflow
    length = units.square().sum()
    ratio = (units * (true / size)).sum() / length
    return torch.where((length > 0) & torch.isfinite(ratio), ratio, 1.0)


def gradient_messages(seen: Seen) -> dict[str, Tensor]:
    """What workers must average before `mean_gradient` can be told; nothing of a bias gradient."""
    if seen.grads_reduced:
        return {}
    return {"grads": seen.grads} | ({} if seen.shown is None else {"shown": seen.shown})


def mean_gradient(seen: Seen, shared: dict[str, Tensor]) -> Tensor:
    """The mean output gradient ḡ of the loss that is stepped on, [G, o].

    For a mean loss it is the sum of what rows carry, averaged over workers and freed of what the
    gradient was multiplied by since.

    Args:
        seen: What this worker saw, its output gradients as sums.
        shared: `gradient_messages` averaged over workers.
    """
    total = shared.get("grads", seen.grads).sum(dim=1)  # [G, o]
    if "shown" not in shared or seen.true is None:
        return total
    return total * loss_scale(shared["shown"], seen.true)


NOISE = 1e-4
"""Size of the mean gradient's part of a weight gradient below which it is rounding noise."""


def informative(inputs: Tensor, outputs: Tensor, gradient: Tensor | None) -> Tensor:
    """Whether the output vectors say anything about the gradient, [G].

    Their part of ∇W has the norm ‖g‖‖a‖. Before a batch normalisation, and for the keys of an
    attention, the mean gradient is exactly zero in theory; what arrives is rounding noise a million
    times smaller than the gradient, and normalising it would fill the factor with noise.

    Args:
        inputs: [G, i, r].
        outputs: [G, o, q].
        gradient: ‖∇W‖, [G] or a scalar; there for a method that `weighs`.

    Raises:
        ValueError: There is no gradient to compare with.
    """
    if gradient is None:
        raise ValueError("the norm of the weight's gradient is needed in seen.gradient")
    norms = [torch.linalg.vector_norm(v, dim=(-2, -1)) for v in (inputs, outputs)]  # [G] each
    told: Tensor = ~(norms[0] * norms[1] <= NOISE * gradient)  # true where not a number
    return told


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


def sketch_messages(seen: Seen) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What workers must add, and what they must average, of a sketch of both sides.

    A worker's rows are 1/n_p of its n_p samples' own gradients.
    """
    samples = seen.rows if seen.samples is None else seen.samples
    sums = {"inputs": seen.inputs, "rows": seen.rows, "samples": samples}
    if seen.grads_reduced:
        return sums, {}
    shown = {} if seen.shown is None else {"shown": seen.shown}
    return sums | {"grads": seen.grads * samples}, shown


def sketch_vectors(sums: Tensor, rows: Tensor) -> Tensor:
    """Vectors V [G, d, r] with E[VVᵀ] the mean outer product of rows, from a sketch [G, r, d].

    Args:
        sums: Sums of all workers' rows with random signs.
        rows: How many there were, [1].
    """
    scale = (rows * sums.shape[1]).clamp_min(1).rsqrt()
    return (sums * scale.to(sums.dtype)).mT
