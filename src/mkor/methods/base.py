"""The contract between a curvature method and the rest of the library.

A method is a set of pure functions on tensors plus the options they need. It never sees a module,
a hook, a parameter or a process group. The engine drives it through these calls, in this order:

1. `wants` tells the capture what to reduce a layer's rows to *inside* the forward and backward
   pass: sums, second moments, or a few of the rows. Activations are never kept as they are.
2. `at` returns the method with every option that depends on the step replaced by its value.
3. `init` returns the state of a layer: a plain dict of tensors.
4. `update` is a generator. It receives what the layer showed (`Seen`), yields an `Exchange` each
   time tensors must cross workers, is resumed with the combined tensors, and returns the new
   state. The engine runs the generators of all layers to their yield, moves everything in one
   flat bucket, and resumes them: an update reads top to bottom, yet costs one collective a round.
   A worker that doesn't hold a layer runs its update up to the `last` exchange, on a state without
   memory. What is too dear to be computed everywhere is yielded as `Owned`.
5. `precondition` maps a gradient matrix to its preconditioned form and changes nothing.
6. `revisit`, for a method with `second_pass`, is a second update: the same batch is evaluated
   again after the base's step, and what it shows arrives here.

Every tensor carries a leading dimension G, a stack of independent matrices: the groups of a
grouped convolution, the three blocks of an attention's input projection, or 1.

Shapes: G stack, r vectors of one update, m rows, o output side, i input side (a bias adds one
column).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from mkor.blocks import Block, Blockwise
from mkor.messages import Exchange, Owned, Stacked

State = dict[str, Tensor]

EVENTS = ("skipped", "resets", "blends", "rejected", "damped", "bounded", "mismatched")
"""What `state["events"]` counts: statistics left out as not finite, factors reset to the identity,
times the stabiliser acted, inverses or pairs that could not be used so that the last stayed,
pairs that damping changed, statistics that entered an average by a part since they were far larger
than it, and second passes that saw another batch than the first."""


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute in: float64 stays, everything narrower becomes float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class Sums:
    """Sums of rows over `blocks` contiguous blocks of the batch, [G, r, d]."""

    blocks: int = 1


@dataclass(frozen=True)
class Moment:
    """The sum of the outer products of rows, [G, d, d].

    Attributes:
        shared: What a row is where a weight is used at several places of a sample (tokens,
            positions): "expand" takes every place as a row, "reduce" one row a sample, the mean
            of its inputs and the sum of its output gradients.
        matrix: Whether the matrix is wanted; without it, the counts and the sum of rows are kept.
    """

    shared: str = "expand"
    matrix: bool = True


@dataclass(frozen=True)
class Sketch:
    """Sums of rows with random signs, V = SX [G, r, d]: E[VᵀV]/r is the sum of outer products.

    Either an entry of S is ±√r for one of the r sums, in turn, and else 0, or all are ±1.

    Every place of a sample is a row, as in `Moment` with "expand". Sums of several calls or workers
    are sketches of all their rows, since no two share signs.

    Attributes:
        vectors: r.
    """

    vectors: int


Compress = Callable[[Tensor, Tensor, int], dict[str, Tensor]]
"""Makes a few rows of one call's rows, see `Rows`."""


@dataclass(frozen=True)
class Rows:
    """The rows themselves, or what `compress` makes of one call's rows.

    A convolution has one row a sample: its mean patch and the sum of its output gradients.

    Attributes:
        compress: Maps the rows a [G, n, i] and g [G, n, o] of one call and a seed to named tensors
            [G, m, …] with "inputs" and "grads" among them; those of several calls are concatenated
            along m. None keeps all rows.
    """

    compress: Compress | None = None


Kind = Sums | Moment | Rows | Sketch
"""What the capture reduces the rows of one side to."""


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

    A row of output gradients is what autograd made of the worker's loss: for a mean loss over n
    samples it is 1/n of the sample's own gradient, and it carries the factor of a loss scale.

    Attributes:
        inputs: The input side by the kind that was wanted: sums or a sketch [G, r, i], the moment
            [G, i, i] (or [G, 0, 0] without its matrix), or rows [G, m, i].
        grads: The output side: sums or a sketch [G, q, o] where q is r, or 1 where only the bias
            gradient is visible; the moment [G, o, o]; or rows [G, m, o].
        rows: Number of rows behind each of the r input sums, [r]; the number of rows, [1], for
            the other kinds.
        gradient: Frobenius norm of each matrix of the weight's gradient, [G] or a scalar; None
            unless the method `weighs`.
        grads_reduced: Whether `grads` is already averaged over workers and unscaled, as a bias
            gradient is.
        samples: Number of samples, [1]; with moments and sketches only. Differs from `rows` where
            a row is a position of a convolution.
        input_sums: Sum of the input rows, [G, i]; with moments only.
        shown: A few sums of the weight gradient's entries as the backward pass made them, [G, o];
            None unless the method is `absolute`.
        true: The same sums of the gradient that is stepped on, averaged over workers.
        weight: The weight itself, [G, o, i]; None unless the method has a second pass.
        fed: Whether the inputs come from outside the trained part of the model, so that they are
            the same whatever its weights are; with moments only, and not in compiled calls.
        same: In a second pass, whether the batch is the one of the first, a scalar.
        kept: What `Rows.compress` returned besides inputs and grads, [G, m, …] each.
    """

    inputs: Tensor
    grads: Tensor
    rows: Tensor
    gradient: Tensor | None
    grads_reduced: bool
    samples: Tensor | None = None
    input_sums: Tensor | None = None
    shown: Tensor | None = None
    true: Tensor | None = None
    weight: Tensor | None = None
    fed: bool = False
    same: Tensor | None = None
    kept: dict[str, Tensor] = field(default_factory=dict)


Update = Generator[Exchange | Owned | Stacked, dict[str, Tensor], State]
Self = TypeVar("Self", bound="Method")


class Method(ABC):
    """One curvature method: options and pure functions, no tensors of its own.

    Subclasses are frozen dataclasses. A field may hold a function of the step in place of a
    number; `at` resolves it.

    Attributes:
        name: The name the registry knows it by.
        state_dtype: Dtype of the factors; None for float32, or float64 for float64 parameters.
        second_pass: Whether `revisit` must follow the base's step.
    """

    name: str
    state_dtype: torch.dtype | None
    second_pass: bool = False

    @property
    def blockwise(self) -> bool:
        """Whether `precondition_block` can be called, so that no gradient need be gathered."""
        return False

    def dtype(self, parameters: torch.dtype, key: str = "") -> torch.dtype:
        """Dtype of the state tensor `key` of a layer whose parameters have dtype `parameters`."""
        return self.state_dtype or wide(parameters)

    def at(self: Self, step: int) -> Self:
        """The method with options that are functions of the step replaced by their values."""
        changed: dict[str, Any] = {}
        for entry in fields(self):  # type: ignore[arg-type]
            value = getattr(self, entry.name)
            if callable(value):
                changed[entry.name] = value(step)
        return replace(self, **changed) if changed else self  # type: ignore[type-var]

    def absolute(self) -> bool:
        """Whether the size of the output gradients matters, so that a loss scale must come out."""
        return False

    def weighs(self) -> bool:
        """Whether an update weighs its vectors against the size of the whole gradient."""
        return False

    def first(self: Self) -> Self:
        """The method for the first update of a layer, as `at` returned it for later ones."""
        return self

    def listens(self) -> int:
        """Steps in a period, after each of which `learn` is called; 0 if never."""
        return 0

    def learn(self, sizes: tuple[float, ...]) -> Method:
        """The method that knows the root mean square of ‖∇‖ in the last two periods, if so many."""
        return self

    @abstractmethod
    def wants(self, shape: LayerShape) -> tuple[Kind, Kind]:
        """What the capture keeps of a layer's inputs and of its output gradients.

        Both are `Rows` for all shapes, or neither is for any.
        """

    def wants_again(self, shape: LayerShape) -> tuple[Kind, Kind]:
        """What the capture keeps in the second pass."""
        return self.wants(shape)

    @abstractmethod
    def sides(self, shape: LayerShape) -> tuple[bool, bool]:
        """Which sides of a layer (outputs, inputs) get a factor."""

    @abstractmethod
    def limit(self) -> str:
        """What a side without a factor is, such as "wider than" some option."""

    @abstractmethod
    def init(self, shape: LayerShape, where: torch.device, parameters: torch.dtype) -> State:
        """The state of a layer before its first update, on device `where`."""

    def misfit(self, state: State, shape: LayerShape, parameters: torch.dtype) -> str | None:
        """In what a loaded state differs from one of these options, a phrase; None if it fits."""
        own = self.init(shape, torch.device("meta"), parameters)
        if state.keys() != own.keys():
            there, here = sorted(state.keys() - own.keys()), sorted(own.keys() - state.keys())
            parts = (", ".join(keys) or "less" for keys in (there, here))
            return "keeps {} there and {} here, by other options".format(*parts)
        for key, tensor in own.items():
            if state[key].shape != tensor.shape and not self.grows():
                sizes = f"{list(state[key].shape)} there and {list(tensor.shape)} here"
                return f"has '{key}' of {sizes}, by other options"
        return None

    def grows(self) -> bool:
        """Whether the size of the state follows the batch."""
        return False

    @abstractmethod
    def bytes(self, shape: LayerShape, parameters: torch.dtype) -> int:
        """Bytes of the state `init` returns, known from the shape alone."""

    def cost(self, shape: LayerShape) -> float:
        """Work of a layer in proportion to others', by which layers are shared out to workers."""
        return shape.stack * (shape.outputs**2 + shape.inputs**2)

    @abstractmethod
    def update(self, state: State, seen: Seen) -> Update:
        """Fold `seen` into `state` (in place where that saves memory) and return it."""

    @abstractmethod
    def precondition(self, state: State, grad: Tensor) -> Tensor:
        """Return the preconditioned gradient of `grad` [G, o, i], in any float dtype."""

    def correction(self, state: State, pieces: Sequence[Tensor]) -> tuple[Tensor, Tensor] | None:
        """What `precondition` takes from a gradient in columns, if it is [G, o, k] · [G, k, i]."""
        return None

    def precondition_block(self, state: State, grad: Tensor, block: Block) -> Blockwise:
        """As `precondition` of a block [1, o', i'], yielding what must cross its workers."""
        raise NotImplementedError(f"{self.name} needs whole gradients")

    def revisit(self, state: State, seen: Seen) -> Update:
        """Fold what the same batch shows after the base's step; only with `second_pass`."""
        raise NotImplementedError(f"{self.name} has no second pass")
