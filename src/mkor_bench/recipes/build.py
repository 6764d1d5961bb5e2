"""The optimizer of a recipe for a model, and what moves its learning rate."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

import mkor
from mkor_bench.recipes.options import BASES, METHODS, refusals
from mkor_bench.recipes.recipe import Entrant
from mkor_bench.recipes.schedules import factor_of


def build_optimizer(model: nn.Module, entrant: Entrant) -> Optimizer:
    """Makes an optimizer.

    Args:
        model: The model, on any device.
        entrant: What to make.

    Returns:
        The optimizer.

    Raises:
        UserError: It refuses the value of an option, or the model.
    """
    options = method_options(entrant)
    if entrant.method == "auto":
        with refusals(f"{entrant.where}.options"):
            return mkor.auto(model, lr=entrant.lr, **options)
    with refusals(f"{entrant.where}.base_options"):
        groups = _groups(model, entrant)
        base: Optimizer = BASES[str(entrant.base)](groups, lr=entrant.lr, **entrant.base_options)
    if entrant.method is None:
        return base
    with refusals(f"{entrant.where}.options"):
        made: Optimizer = METHODS[entrant.method](model, base, **options)
    return made


def method_options(entrant: Entrant) -> dict[str, Any]:
    """The options of a method, the switch among them.

    Args:
        entrant: Whose.

    Raises:
        UserError: The switch refuses the value of an option.
    """
    if entrant.hybrid is None:
        return dict(entrant.options)
    with refusals(f"{entrant.where}.hybrid"):
        return {**entrant.options, "hybrid": mkor.HybridSwitch(**entrant.hybrid)}


class Rates:
    """Moves the learning rate after each step.

    Args:
        optimizer: Whose.
        entrant: How.

    Raises:
        UserError: The schedule refuses the value of an option.
    """

    def __init__(self, optimizer: Optimizer, entrant: Entrant) -> None:
        self._factors = LambdaLR(optimizer, factor_of(entrant.schedule, entrant.steps))
        self._knees = None
        if entrant.schedule.kind == "knee":
            with refusals(f"{entrant.where}.schedule"):
                self._knees = mkor.KneePointLR(
                    optimizer,
                    warmup=entrant.schedule.warmup,
                    beside=self._factors,
                    **entrant.schedule.options,
                )

    def step(self, loss: torch.Tensor) -> None:
        """Tells a step's loss, the same on all workers."""
        self._factors.step()
        if self._knees is not None:
            self._knees.step(loss)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs."""
        knees = None if self._knees is None else self._knees.state_dict()
        return {"factors": self._factors.state_dict(), "knees": knees}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where :meth:`state_dict` was taken."""
        self._factors.load_state_dict(state["factors"])
        if self._knees is not None:
            self._knees.load_state_dict(state["knees"])


def _groups(model: nn.Module, entrant: Entrant) -> list[dict[str, Any]]:
    """All parameters; biases and norms in a group without weight decay where matrices decay."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if entrant.decays == "all":
        return [{"params": parameters}]
    vectors = [p for p in parameters if p.dim() < 2]
    matrices = [p for p in parameters if p.dim() >= 2]
    return [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
