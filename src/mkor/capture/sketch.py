"""Sums of a call's rows with random signs, without a random state.

Rows are dealt to the r sums in turn, each with a random sign: then E[VᵀV] is the sum of their outer
products, as it is where every row is in every sum with r signs, and its variance is about the same
at an r-th of the operations. Up to r rows are each alone in a sum, which is exact.

The sign of a row is a bit of a hash of the row's number. A call numbers its rows from a
start that is a hash itself: of the step, the worker and the layer, and of a few entries of its
input. So a resumed run draws the same signs, the model's random numbers are left alone, and calls
on other inputs have other signs, which is what lets sums over calls be sketches of all rows. A
count of calls would do that as well, but forward passes that are discarded or repeated would move
it; as it is, they leave no trace. The entries enter coarsely, so that rounding rarely matters. The
hash of the step is a tensor, and a compiled graph holds no constant of it. The output side hashes
with a salt: the errors of both sides are independent, and so the expectation of their Kronecker
product is right as well.

Where a weight meets P positions of a sample, the sign is the product of the sample's and the
position's. Two such signs are as uncorrelated as independent ones, and the batch can be summed
before its patches are formed: r images in place of n. Samples are dealt there, and positions have
signs of their own in each sum; of fewer samples than sums each is in all.

Shapes: n rows or samples, P positions, G stack, r vectors, d side.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from mkor.capture.convs import ConvView
from mkor.capture.mask import counted
from mkor.capture.part import Part
from mkor.capture.signs import number, signs, signs_at
from mkor.capture.views import View
from mkor.methods.base import wide

PIECE = 2**16
"""Rows whose signs are made at a time."""

ENTRIES = 2**23
"""Entries of narrow rows that are made wide at a time."""

PROBES = (64, 64, 8, 4)
"""Most places along each leading dimension that a start is made of, by the number of dimensions."""

COARSE = 16
"""Bits of an entry that are left out."""

WHOLE = Part()
"""The part of a worker that has all entries."""

OUTPUTS, POSITIONS = 0x2545F491, 0x5851F42D
"""Salts of the sides' and the positions' signs."""


def first_number(
    seed: Tensor, tensor: Tensor, mask: Tensor | None = None, part: Part = WHOLE
) -> Tensor:
    """The number of a call's first row, by the seed and a few entries of its input.

    Args:
        seed: The hash of step, batch and layer.
        tensor: The input.
        mask: Which rows count, [n]; what the others hold doesn't change the number, and nor does
            how many of them there are, unless the probes leave out other rows for them.
        part: Which entries this worker has.
    """
    leading = tensor.shape[:-1]
    most = PROBES[min(len(leading), len(PROBES) - 1)]
    probes = tuple(slice(None, None, -(-max(size, 1) // most)) for size in leading)
    counts = None
    if mask is not None:  # an entry of the mask goes for all that follows in its row
        places = leading if mask.numel() == leading.numel() else leading[:1]
        counts = mask.view(*places, *[1] * (len(leading) - len(places))).expand(leading)[probes]
    # Of half of the entries: the sum over all may be zero but for rounding.
    entries = tensor[(*probes, slice(part.first % 2, None, 2))].sum(dim=-1, dtype=torch.float32)
    if part.inputs is not None:  # workers that have the others must make the same signs
        entries = part.team.total(entries)
    bits = entries.reshape(-1).view(torch.int32).to(torch.int64) >> COARSE
    return number(bits, seed, None if counts is None else counts.reshape(-1))


def signed_sum(
    rows: Tensor,
    start: Tensor,
    vectors: int,
    salt: int,
    mask: Tensor | None = None,
    share_few: bool = False,
) -> tuple[Tensor, Tensor]:
    """Sums of rows [G, n, d] with signs, [G, r, d], and of the signs, [r]; float32 or wider.

    Row i is in sum i mod r, times √r. Rows that a mask [n] leaves out must be zero. The others have
    the signs and the sums that they would have without them.

    Args:
        rows: X.
        start: Number of the first row.
        vectors: r.
        salt: Makes the signs others.
        mask: Which rows count.
        share_few: Whether of fewer rows than sums each is in all, with r signs.
    """
    dtype = wide(rows.dtype)
    sums: Tensor | None = None
    ones = rows.new_zeros(vectors, dtype=dtype)
    most = PIECE
    if rows.dtype != dtype:
        most = min(PIECE, max(1, ENTRIES // max(rows.shape[-1], 1)))
    most = -(-most // vectors) * vectors  # pieces begin with the first sum
    places = None if mask is None else mask.cumsum(dim=0) - 1
    few = share_few and (rows.shape[1] if mask is None else mask.sum()) < vectors
    for first in range(0, rows.shape[1], most):
        part = rows[:, first : first + most].to(dtype)
        count = part.shape[1]
        if places is None and not few:
            own = signs(start, first, count, 1, salt)[0].to(dtype) * vectors**0.5
            found = dealt_sums(part, own, vectors)
            counts = F.pad(own, (0, -count % vectors)).view(-1, vectors).sum(dim=0)
        else:
            at = first + torch.arange(count, device=rows.device)
            at = at if places is None else places[first : first + count]
            table = sign_table(start, at, vectors, salt, few, dtype)
            table = table if mask is None else table * mask[first : first + count]
            found, counts = table @ part, table.sum(dim=-1)
        sums = found if sums is None else sums + found
        ones = ones + counts
    if sums is None:
        sums = rows.new_zeros(rows.shape[0], vectors, rows.shape[-1], dtype=dtype)
    return sums, ones


def sign_table(
    start: Tensor,
    places: Tensor,
    vectors: int,
    salt: int,
    few: bool | Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """What rows at places [n] count in each sum, [r, n]."""
    if few is True:
        return signs_at(start, places, vectors, salt).to(dtype)
    own: Tensor = signs_at(start, places, 1, salt).to(dtype) * vectors**0.5  # [1, n]
    dealt = places % vectors == torch.arange(vectors, device=places.device)[:, None]  # [r, n]
    table = own.where(dealt, 0)
    if few is False:
        return table
    return torch.where(few, signs_at(start, places, vectors, salt).to(dtype), table)


def dealt_sums(rows: Tensor, weights: Tensor, count: int) -> Tensor:
    """Sums [G, r, d] of rows [G, n, d] with weights [n], row i in sum i mod r."""
    whole = len(weights) - len(weights) % count
    dealt = weights[:whole].view(-1, count).mT.contiguous()[:, None]  # [r, 1, n/r]
    parts = (own[:whole].unflatten(0, (-1, count)).transpose(0, 1) for own in rows)  # [r, n/r, d]
    sums = torch.stack([(dealt @ part)[:, 0] for part in parts])
    sums[:, : len(weights) - whole] += rows[:, whole:] * weights[whole:, None]
    return sums


def sketch_inputs(
    view: View,
    tensors: list[Tensor],
    vectors: int,
    start: Tensor,
    masks: list[Tensor] | None = None,
) -> Tensor:
    """The fold of a call's inputs, [G, r + 1, i + 1], see `folds`."""
    parts: list[Tensor] = []
    counts: list[int | Tensor] = []
    each: Sequence[Tensor | None] = [None] * len(tensors) if masks is None else masks
    for tensor, mask in zip(tensors, each, strict=True):
        sums, ones, count = sketched(view, tensor, tensor.shape, vectors, start, 0, mask)
        counts.append(count)
        # As many rows as the first source has, so that each keeps its own mean.
        own = count.clamp_min(1) if isinstance(count, Tensor) else max(count, 1)
        scale = (counts[0] / own) ** 0.5
        column = ones[:, None].expand(len(sums), -1, -1)
        parts.append(torch.cat([sums, column], dim=-1) * scale)
    out = F.pad(torch.cat(parts), (0, 0, 0, 1))
    samples: int | Tensor = view.samples(tensors[0].shape, "expand")
    if masks is not None:
        samples = counted(masks[0], int(samples), out.dtype)
    out[:, -1, -1].fill_(counts[0])
    out[:, -1, -2].fill_(samples)
    return out


def sketch_outputs(
    view: View,
    grad: Tensor,
    inputs: torch.Size,
    vectors: int,
    start: Tensor,
    mask: Tensor | None = None,
) -> Tensor:
    """The fold of a call's output gradients, [G, r, o]."""
    return sketched(view, grad, inputs, vectors, start, OUTPUTS, mask)[0]


def sketched(
    view: View,
    tensor: Tensor,
    inputs: torch.Size,
    vectors: int,
    start: Tensor,
    salt: int,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor, int | Tensor]:
    """Signed sums of rows [G, r, d], of a constant 1 beside each [r], and their number.

    Args:
        view: The layer.
        tensor: A call's input, or its output gradient.
        inputs: Shape of the call's input.
        vectors: r.
        start: Number of the first row.
        salt: 0 for an input, `OUTPUTS` for an output gradient.
        mask: Which rows count, [n]; None if all do.
    """
    if isinstance(view, ConvView):
        sums, ones, count = over_positions(view, tensor, inputs, vectors, start, salt, mask)
    else:
        rows = (
            view.output_rows(tensor, inputs, "expand")
            if salt
            else view.input_rows(tensor, "expand")
        )
        sums, ones = signed_sum(rows, start, vectors, salt, mask)  # of [1, n, d]
        count = rows.shape[1]
    return sums, ones, count if mask is None else counted(mask, count, sums.dtype)


def over_positions(
    view: ConvView,
    tensor: Tensor,
    inputs: torch.Size,
    vectors: int,
    start: Tensor,
    salt: int,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor, int]:
    """The same where samples have positions: the signed sum of the batch, then of its patches."""
    batch = view.batch(tensor, inputs)  # [n, C, *S]
    flat = batch.flatten(1)[None]  # [1, n, C·S]
    sums, ones = signed_sum(flat, start, vectors, salt, mask, share_few=True)
    images = sums.view(vectors, *batch.shape[1:])
    places = signs(start, 0, view.positions(inputs), vectors, salt ^ POSITIONS).to(sums.dtype)
    weighted = view.weighted_outputs if salt else view.weighted_inputs
    rows = weighted(images, inputs, places)  # [G, r, d]
    return rows, ones * places.sum(dim=-1), len(batch) * places.shape[1]
