"""Counts the arithmetic of tensor code, on tensors without memory as well.

A product of matrices counts two operations per number that it multiplies, a decomposition what
LAPACK's algorithm takes, and any other pointwise operation one per entry of its result. Reductions
and copies count nothing: their time is that of memory, which no count of operations tells.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mkor.methods.base import Kind, Moment, Rows, Sketch


class FlopCounter(TorchDispatchMode):
    """Adds up the operations of what runs inside it, in `total`."""

    def __init__(self) -> None:
        """Nothing yet."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation and count it."""
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__.rstrip("_")
        if name in FORMULAS:
            self.total += FORMULAS[name](*[a for a in args if isinstance(a, Tensor)])
        elif torch.Tag.pointwise in func.tags and name != "clone":
            self.total += out.numel()
        return out


def product(left: Tensor, right: Tensor) -> int:
    """`left @ right`."""
    columns = right.shape[-1] if right.dim() > 1 else 1
    return 2 * left.numel() * columns


def added_product(total: Tensor, left: Tensor, right: Tensor) -> int:
    """`total + left @ right`."""
    del total
    return product(left, right)


def cubic(share: float) -> Callable[..., int]:
    """A decomposition of matrices [..., d, d] that takes `share`·d³."""

    def count(matrix: Tensor) -> int:
        return round(share * matrix.numel() * matrix.shape[-1])

    return count


def triangular(root: Tensor, right: Tensor) -> int:
    """A triangular solve of the columns, or from the right of the rows, of `right`."""
    return right.numel() * root.shape[-1]


def solved(right: Tensor, root: Tensor) -> int:
    """Two triangular solves."""
    return 2 * triangular(root, right)


FORMULAS: dict[str, Callable[..., int]] = {
    "mm": product,
    "bmm": product,
    "mv": product,
    "dot": product,
    "addmm": added_product,
    "baddbmm": added_product,
    "linalg_cholesky_ex": cubic(1 / 3),
    "cholesky_inverse": cubic(2 / 3),
    "cholesky_solve": solved,
    "linalg_solve_triangular": triangular,
    "_linalg_eigh": cubic(9),  # Golub and Van Loan, section 8.3: vectors as well
}
"""Operations by aten's name for them."""


def fold_flops(kind: Kind, stack: int, rows: int, side: int) -> int:
    """Operations of what a hook makes of `rows` rows of a side; rows count where they are picked.

    Sums take an addition per entry, sketches two operations, and moments two per entry and column.
    """
    if isinstance(kind, Rows):
        return 0
    if isinstance(kind, Sketch):
        return 2 * stack * rows * side
    if isinstance(kind, Moment):
        return stack * rows * side * (1 + 2 * side * kind.matrix)
    return stack * rows * side
