"""The dry run of a recipe: everything that can be told without data, a GPU or the network.

The task gets made-up data and its model is on the meta device, where tensors have shapes and no
memory. The loss of a batch there shows that shapes fit and what the backward pass keeps; a step of
the optimizer shows its state. What a method adds is told by :func:`mkor.estimate`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

import mkor
from mkor_bench.data.store import BLANK
from mkor_bench.errors import UserError
from mkor_bench.recipes.build import Rates, build_optimizer, method_options
from mkor_bench.recipes.options import METHODS, refusals
from mkor_bench.recipes.recipe import Entrant, Recipe
from mkor_bench.tasks import TASKS
from mkor_bench.tasks.source import TaskSource
from mkor_bench.tasks.task import Task


@dataclass(frozen=True)
class Memory:
    """Bytes of a worker.

    Attributes:
        base: State of the base optimizer.
        method: Factors of the method, and the momentum of its matrices where it has one.
        wire: What the method sends a step, on average.
    """

    base: int
    method: int
    wire: float


@dataclass(frozen=True)
class Checked:
    """What a dry run found.

    Attributes:
        parameters: How many numbers the model has.
        shapes: Of the tensors of a worker's batch.
        micro_batch: Samples of a worker's batch.
        accumulated: Batches of a worker in a step.
        activations: Bytes that the backward pass keeps of a batch, in float32.
        memory: By the names of the optimizers.
    """

    parameters: int
    shapes: tuple[tuple[int, ...], ...]
    micro_batch: int
    accumulated: int
    activations: int
    memory: dict[str, Memory]


def check_recipe(recipe: Recipe) -> Checked:
    """Does a dry run.

    Args:
        recipe: What to try.

    Returns:
        Shapes and sizes.

    Raises:
        UserError: The task is unknown or cannot be made without data, the batch is not a whole
            number of workers' batches, or an optimizer or a schedule refuses its options.
    """
    task = load_task(recipe, BLANK)
    model = meta_model(task, recipe.seed)
    batch = next(task.batches(recipe.seed))
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    micro = len(tensors[0])
    accumulated = batches_a_step(recipe, micro)
    activations, rows = _pass(task, model, batch)
    return Checked(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        shapes=tuple(tuple(tensor.shape) for tensor in tensors),
        micro_batch=micro,
        accumulated=accumulated,
        activations=activations,
        memory={
            name: _memory(meta_model(task, recipe.seed), entrant, rows * accumulated, recipe)
            for name, entrant in recipe.entrants.items()
        },
    )


def load_task(recipe: Recipe, data: str | None) -> Task:
    """Makes the task of a recipe.

    Args:
        recipe: The recipe.
        data: The folder with data sets, "hub", or made-up data.

    Returns:
        The task.

    Raises:
        UserError: It is unknown, or its data are missing.
    """
    if recipe.task not in TASKS:
        raise UserError(
            f"recipe {str(recipe.path)!r}: unknown task {recipe.task!r}: "
            f"choose from {', '.join(TASKS)}."
        )
    return TaskSource(recipe.task, data).load()


def meta_model(task: Task, seed: int) -> nn.Module:
    """Makes a task's model without memory."""
    with torch.device("meta"):
        return task.build(seed)


def batches_a_step(recipe: Recipe, micro_batch: int) -> int:
    """Tells how many batches each worker accumulates in a step.

    Args:
        recipe: The recipe.
        micro_batch: Samples of a batch of the task.

    Returns:
        The number.

    Raises:
        UserError: The step's batch is no multiple of what the workers take at once.
    """
    at_once = micro_batch * recipe.workers
    if recipe.batch % at_once:
        raise UserError(
            f"recipe {str(recipe.path)!r}: batch must be a multiple of {at_once}, the task's "
            f"{micro_batch} samples times {recipe.workers} workers, got {recipe.batch}."
        )
    return recipe.batch // at_once


def _pass(task: Task, model: nn.Module, batch: Any) -> tuple[int, int]:
    """Returns the bytes that a backward pass needs of a batch, and the most rows of a layer."""
    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            kept[storage._cdata] = storage.nbytes()
        return tensor

    on_meta = tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf, batch)
    with _counted_rows(model) as rows, torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        loss = task.loss(model, on_meta)
    if loss.dim():
        raise UserError(
            f"task {task.name!r}: its loss is no number but has shape {tuple(loss.shape)}."
        )
    return sum(kept.values()), max(rows, default=1)


@contextmanager
def _counted_rows(model: nn.Module) -> Iterator[list[int]]:
    """Notes how many rows each linear layer sees; samples, where there is none."""
    rows: list[int] = []

    def note(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        linear = isinstance(module, nn.Linear)
        rows.append(inputs[0].shape[:-1].numel() if linear else len(inputs[0]))

    layers = [m for m in model.modules() if isinstance(m, (nn.Linear, nn.Conv2d))]
    handles = [layer.register_forward_pre_hook(note) for layer in layers]
    try:
        yield rows
    finally:
        for handle in handles:
            handle.remove()


def _memory(model: nn.Module, entrant: Entrant, rows: int, recipe: Recipe) -> Memory:
    # Without memory there are no fused kernels; their state is the same.
    plain = {key: value for key, value in entrant.base_options.items() if key != "fused"}
    optimizer = build_optimizer(model, replace(entrant, base_options=plain))
    Rates(optimizer, entrant)
    with refusals(f"{entrant.where}.base_options"):
        base = _stepped(optimizer if entrant.method is None else optimizer.base)
    if entrant.method is None:
        return Memory(base, 0, 0.0)
    method, options = METHODS[str(entrant.method)], method_options(entrant)
    options.pop("hybrid", None)
    with refusals(f"{entrant.where}.options"):
        found = mkor.estimate(model, method, rows=rows, workers=recipe.workers, **options)
    defaults = {key: p.default for key, p in inspect.signature(method).parameters.items()}
    moves = {**defaults, **options}.get("momentum")
    kept = [layer for layer in found.layers if layer.reason is None]
    momentum = sum(4 * prod(layer.shape) for layer in kept) if moves else 0
    return Memory(base, found.bytes + momentum, found.mean_wire)


def _stepped(optimizer: torch.optim.Optimizer) -> int:
    """Returns the bytes of state after a step; where there is no memory, it costs nothing."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    tensors = [t for state in optimizer.state.values() for t in state.values()]
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))
