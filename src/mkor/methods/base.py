"""The contract between a curvature method and the rest of the library.

A method is a set of pure functions on tensors plus the options they need. It never sees a module,
a hook, a parameter or a process group. The engine drives it through four calls, in this order:

1. `vectors` tells the capture how many block sums to reduce a layer's rows to *inside* the forward
   and backward pass, so that no activation is kept.
2. `init` returns the state of a layer: a plain dict of tensors.
3. `update` is a generator. It receives what the layer showed (`Seen`), yields an `Exchange` each
   time tensors must cross workers, is resumed with the combined tensors, and returns the new
   state. The engine runs the generators of all layers to their yield, moves everything in one
   flat bucket, and resumes them: an update reads top to bottom, yet costs one collective a round.
4. `precondition` maps a gradient matrix to its preconditioned form and changes nothing.

Every tensor carries a leading dimension G, a stack of independent matrices: the groups of a
grouped convolution, the three blocks of an attention's input projection, or 1.

Shapes: G stack, r vectors of one update, o output side, i input side (a bias adds one column).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator
from dataclasses import dataclass, field

import torch
from torch import Tensor

State = dict[str, Tensor]

EVENTS = ("skipped", "resets", "blends")
"""What `state["events"]` counts: statistics left out as not finite, factors reset to the identity,
times the stabiliser acted."""


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute in: float64 stays, everything narrower becomes float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class LayerShape:
    """The matrix view of one weight: `stack` matrices of `outputs` rows and `inputs` columns.

    Attributes:
        stack: Number of independent matrices G.
        outputs: Rows o of each, the side of the gradient vectors g.
        inputs: Columns i of each, the side of the activation vectors a, bias column included.
    """

    stack: int
    outputs: int
    inputs: int


@dataclass(frozen=True)
class Seen:
    """What one layer showed on this worker since the last step.

    Attributes:
        inputs: Sums over rows of the input vectors, one per block of rows, [G, r, i].
        grads: Sums over rows of the output gradients, [G, q, o]; q is r, or 1 where only the
            bias gradient is visible.
        rows: Number of rows behind each of the r input sums, [r].
        gradient: Frobenius norm of each matrix of the weight's gradient, [G] or a scalar.
        grads_reduced: Whether `grads` is already averaged over workers (a bias gradient is).
    """

    inputs: Tensor  # [G, r, i]
    grads: Tensor  # [G, q, o]
    rows: Tensor  # [r]
    gradient: Tensor  # [G]
    grads_reduced: bool


@dataclass(frozen=True)
class Exchange:
    """Tensors that must cross workers before an update can go on.

    Attributes:
        sum: Tensors added over workers.
        mean: Tensors averaged over workers.
    """

    sum: dict[str, Tensor] = field(default_factory=dict)
    mean: dict[str, Tensor] = field(default_factory=dict)


Update = Generator[Exchange, dict[str, Tensor], State]


class Method(ABC):
    """One curvature method: options and pure functions, no tensors of its own.

    Attributes:
        name: The name the registry knows it by.
        vectors: Number r of row blocks whose sums the capture keeps for an update.
        state_dtype: Dtype of the factors; None for float32, or float64 for float64 parameters.
    """

    name: str
    vectors: int
    state_dtype: torch.dtype | None

    def dtype(self, parameters: torch.dtype) -> torch.dtype:
        """Dtype of the factors of a layer whose parameters have dtype `parameters`."""
        return self.state_dtype or wide(parameters)

    @abstractmethod
    def sides(self, shape: LayerShape) -> tuple[bool, bool]:
        """Which sides of a layer (outputs, inputs) get a factor."""

    @abstractmethod
    def limit(self) -> str:
        """Why a layer whose sides both lack a factor is left to the base optimizer."""

    @abstractmethod
    def init(self, shape: LayerShape, where: torch.device, parameters: torch.dtype) -> State:
        """The state of a layer before its first update, on device `where`."""

    @abstractmethod
    def bytes(self, shape: LayerShape, parameters: torch.dtype) -> int:
        """Bytes of the state `init` returns, known from the shape alone."""

    @abstractmethod
    def update(self, state: State, seen: Seen) -> Update:
        """Fold `seen` into `state` (in place where that saves memory) and return it."""

    @abstractmethod
    def precondition(self, state: State, grad: Tensor) -> Tensor:
        """Return the preconditioned gradient of `grad` [G, o, i], in any float dtype."""
