"""What `mkor.estimate` is asked about: a model's layers, and a method with its options, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mkor import validate
from mkor.capture.discover import Layer, LeftOut, find_layers
from mkor.capture.folds import observable
from mkor.capture.views import View
from mkor.checks import is_count, require
from mkor.methods.base import Method
from mkor.optimizer import Preconditioner
from mkor.optimizers.auto import Auto, auto

MOST_ROWS = 2**40


@dataclass(frozen=True)
class Subject:
    """A model and the method that is to train it.

    Attributes:
        model: The model.
        method: The method.
        common: The options that all methods have.
        optimized: The `id` of each parameter that the method may update.
        skip: Patterns of names that are left to the base.
    """

    model: nn.Module
    method: Method
    common: dict[str, Any]
    optimized: set[int]
    skip: tuple[str, ...]

    @classmethod
    def of(cls, model: nn.Module, method: object, options: Mapping[str, Any]) -> Subject:
        """Check a model, the class of an optimizer or `mkor.auto`, and options, as they do."""
        validate.check_model(model)
        options = dict(options)
        skip = options.pop("skip", ())
        validate.patterns("skip", skip)
        optimized = {id(parameter) for parameter in model.parameters()}
        built: Preconditioner
        if method is auto or method is Auto:
            built = auto(model, **options)
            optimized = built._optimized()
        elif isinstance(method, type) and issubclass(method, Preconditioner):
            stand_in = nn.Linear(1, 1)
            built = method(stand_in, torch.optim.SGD(stand_in.parameters(), lr=1.0), **options)
        else:
            raise TypeError(
                "method must be the class of an optimizer such as mkor.MKOR, or mkor.auto, got "
                f"{method!r}"
            )
        built.close()
        return cls(model, built._method, built._common, optimized, tuple(skip))

    def layers(self, first: Method) -> tuple[dict[str, Layer], list[LeftOut]]:
        """The layers that a method takes, and those left out with the reason."""
        layers, left = find_layers(
            self.model, self.optimized, self.skip, lambda view: refusal(first, view)
        )
        frozen = [name for name, layer in layers.items() if not layer.view.weight.requires_grad]
        views = [layers.pop(name).view for name in frozen]
        shapes = [(view, tuple(view.weight.shape)) for view in views]
        return layers, [*left, *(LeftOut(v.name, v.kind, shape, "frozen") for v, shape in shapes)]


def refusal(method: Method, view: View) -> str | None:
    """Why a method can't take a layer, or None."""
    reason = observable(view, method.wants(view.shape)[1])
    has_factor = any(method.sides(view.shape))
    return reason or (None if has_factor else f"both sides are {method.limit()}")


def check_count(name: str, value: Any, most: int) -> None:
    """Check a number of things."""
    require(name, value, is_count(value, 1), "an integer of at least 1")
    require(name, value, int(value) <= most, f"at most {most}")


def rows_of(rows: int | Mapping[str, int], layers: dict[str, Layer]) -> dict[str, int]:
    """The rows of every layer."""
    if not isinstance(rows, Mapping):
        rows = dict.fromkeys(layers, rows)
    lacking = [name for name in layers if name not in rows]
    if lacking:
        raise ValueError(f"rows has no number for layer '{lacking[0]}': name every layer")
    for name in layers:
        check_count("rows", rows[name], MOST_ROWS)
    return {name: int(rows[name]) for name in layers}
