"""Tensor-parallel layers: which part of each a worker has, and what can't be preconditioned."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from mkor.capture.discover import Layer
from mkor.capture.part import Part
from mkor.capture.views import LinearView, View
from mkor.distributed.sharded import cuts
from mkor.distributed.team import Team, team_of
from mkor.methods.base import Method, Sketch, Sums


def share_layers(model: nn.Module, layers: Mapping[str, Layer], method: Method) -> Team:
    """Tell the views of layers which part this worker has of them.

    Args:
        model: The model that has the layers.
        layers: By name.
        method: As it is in this step.

    Returns:
        The workers that compute this one's batch.

    Raises:
        ValueError: The method, or a layer, can't be shared.
    """
    team = team_of(model)
    if team.size == 1:
        return team
    for layer in layers.values():
        if not all(isinstance(kind, (Sums, Sketch)) for kind in method.wants(layer.view.shape)):
            raise ValueError(
                f"the model has tensor-parallel layers, whose workers see parts of their rows, and "
                f"{type(method).__name__.removesuffix('Method')} compares whole rows with each "
                "other: use mkor.MKOR, mkor.auto or mkor.Eva, or shard the model by "
                "torch.distributed.fsdp.fully_shard alone"
            )
        for view in layer.calls:
            view.part = part_of(view, team)
    return team


def part_of(view: View, team: Team) -> Part:
    """The part of a layer that this worker of a team has.

    Raises:
        ValueError: The layer is split and no linear one, or not among all of the team.
    """
    own = cuts(view.weight, team.ranks)
    outputs, inputs = own.get(view.output_dim), own.get(1 - view.output_dim)
    linear = isinstance(view, LinearView) and view.hooked is view.owner
    if own and not linear:
        raise ValueError(
            f"layer '{view.name}' is a {view.kind} whose weight is split by tensor parallelism, "
            "which is supported for linear layers: leave it whole, or pass its name in skip"
        )
    sides = view.shape.outputs, view.shape.inputs - view.has_bias_column
    for side, cut, length in zip(("outputs", "inputs"), (outputs, inputs), sides, strict=True):
        if cut is not None and -(-length // team.size) * (team.size - 1) >= length:
            raise ValueError(
                f"layer '{view.name}' has {length} {side}, of which not every one of the "
                f"{team.size} tensor-parallel workers gets some: leave it whole, or pass its name "
                "in skip"
            )
    return Part(view.name, linear, team, inputs, outputs, sides)
