"""Watches what layers see while a model trains: rows of inputs and of output gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import unfold

from mkor_bench.optimizers import settled_options
from mkor_bench.studies.piece import Piece
from mkor_bench.studies.runs import Place, source_of
from mkor_bench.train import Settings, Training, training_step

LAYERS = 6
"""How many layers of a model are watched, spread evenly from the first to the last."""

WIDEST = 1200
"""Layers with a wider side are not watched: their covariances are decomposed."""

ROWS = 1024
"""How many rows of a batch are kept at most, spread evenly."""

Seen = Mapping[str, tuple[Tensor, Tensor]]
"""By the name of a layer: its inputs [n, d] and its output gradients [n, e] in a step, float64."""


def watched_piece(place: Place, function: str, optimizer: str, **more: Any) -> Piece:
    """Returns a piece that watches a training.

    Args:
        place: The task.
        function: Does it, as ``module:function``; it calls :func:`follow`.
        optimizer: What trains, at the rate that the task names for SGD.
        more: Whatever else determines the result.
    """
    spec = {
        **place.spec(optimizer),
        **more,
        "options": settled_options(optimizer),
        "lr": place.source.load().default_lrs.get("sgd", 0.01),
        "watched": [LAYERS, WIDEST, ROWS],
    }
    return Piece(
        function, spec, f"{place.task} {optimizer} {function.rpartition(':')[2]}", place.steps
    )


def follow(
    spec: Mapping[str, Any],
    data: str | None,
    report: Callable[[int], None],
    see: Callable[[int, Seen], None],
) -> None:
    """Trains, and shows what the layers saw in each step.

    Args:
        spec: Of a piece that :func:`watched_piece` made.
        data: What --data named.
        report: Called after each step.
        see: Called after each step with its number, from 0, and the rows.
    """
    source = source_of(spec, data)
    settings = Settings(spec["optimizer"], spec["lr"], 0, spec["steps"])
    training = Training(source.load(), settings)
    watch = Watch(training.model)
    for step in range(spec["steps"]):
        training_step(training)
        see(step, watch.take())
        report(1)


class Watch:
    """Hooks on some of a model's layers.

    Args:
        model: The model; the hooks stay as long as it lives.
    """

    def __init__(self, model: nn.Module) -> None:
        self._inputs: dict[str, Tensor] = {}
        self._gradients: dict[str, Tensor] = {}
        for name, module in _layers(model).items():
            module.register_forward_hook(self._hook(name))

    def take(self) -> Seen:
        """Returns what the layers saw since the last call."""
        both = self._inputs.keys() & self._gradients.keys()
        seen = {n: (self._inputs[n], self._gradients[n]) for n in self._inputs if n in both}
        self._inputs, self._gradients = {}, {}
        return seen

    def _hook(self, name: str) -> Callable[[Any, Any, Tensor], None]:
        def hook(module: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            if not output.requires_grad:
                return
            self._inputs[name] = _some(input_rows(module, inputs[0].detach()))

            def keep(gradient: Tensor) -> None:
                self._gradients[name] = _some(output_rows(module, gradient))

            output.register_hook(keep)

        return hook


def input_rows(module: nn.Module, inputs: Tensor) -> Tensor:
    """Returns the rows that a layer multiplies by its weight, [n, d]."""
    if isinstance(module, nn.Conv2d):
        patches = unfold(
            inputs, module.kernel_size, module.dilation, _padding(module), module.stride
        )
        return patches.mT.flatten(0, 1)
    return inputs.flatten(0, -2)


def output_rows(module: nn.Module, gradient: Tensor) -> Tensor:
    """Returns the gradients of the rows that a layer puts out, [n, e]."""
    if isinstance(module, nn.Conv2d):
        return gradient.flatten(2).mT.flatten(0, 1)
    return gradient.flatten(0, -2)


def _padding(module: nn.Conv2d) -> Any:
    assert not isinstance(module.padding, str), "the package's own models give numbers"
    return module.padding


def _layers(model: nn.Module) -> dict[str, nn.Module]:
    kinds = (nn.Linear, nn.Conv2d)
    known = {name: m for name, m in model.named_modules() if isinstance(m, kinds)}
    fitting = [
        name
        for name, m in known.items()
        if getattr(m, "groups", 1) == 1 and max(m.weight.flatten(1).shape) <= WIDEST
    ]
    count = min(LAYERS, len(fitting))
    places = torch.linspace(0, len(fitting) - 1, count).round().int().tolist()
    return {fitting[place]: known[fitting[place]] for place in dict.fromkeys(places)}


def _some(rows: Tensor) -> Tensor:
    return rows[:: -(-len(rows) // ROWS)].double()
