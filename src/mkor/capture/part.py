"""What one worker of a team (see `distributed.team`) shows of a layer, as a share of the whole.

The statistics of all workers are added up, or averaged where each has the gradient of its own loss.
So what a team shows must count once: what every worker of it has whole is divided by their number,
or averaged, and what each has a part of is laid among zeros.

Shapes: G stack, r vectors, i inputs, o outputs, i' and o' those that this worker has.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mkor.distributed.sharded import Cut, local, splits_rows
from mkor.distributed.team import ALONE, Team
from mkor.methods.base import Kind, Sketch


@dataclass(frozen=True)
class Part:
    """The entries of a layer's rows that a worker of a team has.

    Attributes:
        name: The layer's.
        linear: Whether its rows are the leading dimensions of its inputs.
        team: The workers that have the other entries, or the same.
        inputs: Which inputs, or None for all.
        outputs: Which outputs, or None for all.
        sides: Numbers of all outputs and inputs, bias column aside.
    """

    name: str = ""
    linear: bool = False
    team: Team = ALONE
    inputs: Cut | None = None
    outputs: Cut | None = None
    sides: tuple[int, int] = (0, 0)

    @property
    def first(self) -> int:
        """The first input."""
        return 0 if self.inputs is None else self.inputs.start

    def own(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The input tensors of a call as plain ones.

        Raises:
            RuntimeError: The rows are divided, or their entries otherwise than the weight's.
        """
        here, *others = map(local, inputs)
        if self.team.size > 1 and self.linear:
            self.check(inputs[0], here)
        return here, *others

    def check(self, tensor: Tensor, here: Tensor) -> None:
        """Check the input of a linear layer, of which this worker has `here`."""
        width = self.sides[1] if self.inputs is None else self.inputs.stop - self.inputs.start
        if splits_rows(tensor) or here.shape[-1] != width:
            raise RuntimeError(
                f"layer '{self.name}' gets its input as {tuple(here.shape)} of "
                f"{tuple(tensor.shape)}, but tensor-parallel workers must have all rows, with "
                f"{width} entries each as the weight is split: gather the input before the layer, "
                "as ColwiseParallel and RowwiseParallel do, or skip the layer"
            )

    def input_share(self, kind: Kind, fold: Tensor) -> Tensor:
        """The share of an input fold (see `folds`), [G, r, i + 1] from [G, r, i' + 1]."""
        if self.team.size == 1:
            return fold
        share = fold / self.team.size
        if self.inputs is None:
            return share
        around = self.inputs.start, self.sides[1] - self.inputs.stop
        out = torch.cat([F.pad(fold[..., :-1], around), share[..., -1:]], dim=-1)
        if isinstance(kind, Sketch):  # whose last row has the counts in the end
            out[:, -1] = 0
            out[:, -1, -2:] = share[:, -1, -2:]
        return out

    def rows(self, grad: Tensor, shape: torch.Size) -> Tensor:
        """A call's output gradient with a row for every row of the input, zero where others' are.

        Args:
            grad: This worker's.
            shape: Of the input.

        Raises:
            RuntimeError: It is divided otherwise than in equal parts of one dimension.
        """
        lead, here = shape[:-1], grad.shape[:-1]
        if self.team.size == 1 or not self.linear or here == lead:
            return grad
        sizes = enumerate(zip(lead, here, strict=True))
        split = [dim for dim, (whole, own) in sizes if whole != own]
        length = lead[split[0]]
        each = -(-length // self.team.size)
        start = min(self.team.place * each, length)
        stop = min(start + each, length)
        if len(split) > 1 or here[split[0]] != stop - start:
            raise RuntimeError(
                f"layer '{self.name}' has output gradients of {tuple(here)} rows for inputs of "
                f"{tuple(lead)}: tensor-parallel workers must have all of them, or equal parts of "
                "one dimension, as with output_layouts=Shard(1)"
            )
        around = [0, 0] * (grad.dim() - 1 - split[0]) + [start, length - stop]
        return F.pad(grad, around)

    def output_share(self, fold: Tensor, divided: bool) -> Tensor:
        """The share of a fold of output gradients, [G, r, o] from [G, r, o'].

        Args:
            fold: The fold.
            divided: Whether each worker has other rows.
        """
        width = fold.shape[-1]
        if self.team.size == 1 or (width == self.sides[0] and not divided):
            return fold
        if width != self.sides[0]:
            assert self.outputs is not None
            fold = F.pad(fold, (self.outputs.start, self.sides[0] - self.outputs.stop))
        return fold * self.team.size
