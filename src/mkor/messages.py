"""What an update yields: what must cross workers, or can be done for many layers at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Exchange:
    """Tensors that all workers combine, and get back combined.

    Attributes:
        sum: Tensors added over workers.
        mean: Tensors averaged over workers.
        gather: Tensors [G, m, …] concatenated along m over workers, whose m may differ.
        symmetric: Keys of `sum` whose tensors [G, d, d] are symmetric.
        last: Whether only workers that hold the layer need to go on after it.
    """

    sum: dict[str, Tensor] = field(default_factory=dict)
    mean: dict[str, Tensor] = field(default_factory=dict)
    gather: dict[str, Tensor] = field(default_factory=dict)
    symmetric: tuple[str, ...] = ()
    last: bool = False


@dataclass(frozen=True)
class Owned:
    """Tensors that one worker computes for all that hold a layer.

    Attributes:
        compute: Computes them, on that worker alone.
        like: Tensors in whose shapes, dtypes and places they come.
        symmetric: Keys whose tensors [G, d, d] are symmetric.
    """

    compute: Callable[[], dict[str, Tensor]]
    like: dict[str, Tensor]
    symmetric: tuple[str, ...] = ()


@dataclass(frozen=True)
class Stacked:
    """A function that may run for several layers at once.

    Attributes:
        function: Changes the first tensors in place by the second ones, and returns others. Each
            has the leading dimension G, along which it works independently.
        state: The tensors that it changes.
        given: What it needs besides.
    """

    function: Callable[[Tensors, Tensors], Tensors]
    state: Tensors
    given: Tensors
