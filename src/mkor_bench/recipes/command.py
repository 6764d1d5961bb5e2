"""What ``mkor recipe`` does: tells what a recipe needs, or trains it."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from mkor.texts import bytes_text
from mkor_bench.console import output_console, progress_display
from mkor_bench.errors import UserError
from mkor_bench.files import prepare_folder, write_atomically
from mkor_bench.interrupt import raises_interrupt
from mkor_bench.launch import launched
from mkor_bench.options import check_count
from mkor_bench.recipes.check import Checked, check_recipe, load_task
from mkor_bench.recipes.checkpoint import CHECKPOINT_NAME
from mkor_bench.recipes.recipe import Entrant, Recipe, read_recipe
from mkor_bench.recipes.run import Training, joined, train
from mkor_bench.report.machine import describe_machine, versions
from mkor_bench.report.results import to_json
from mkor_bench.report.table import number

RESULT_NAME = "recipe.json"


def run_recipe(
    path: Path,
    *,
    check: bool,
    optimizer: str | None,
    steps: int | None,
    checkpoint_every: int,
    output: Path | None,
    data: str | None,
    resumes: bool,
) -> None:
    """Does what ``mkor recipe`` is asked to.

    Args:
        path: The recipe.
        check: Whether to try it without data and train nothing.
        optimizer: One of its optimizers, or None for the first.
        steps: Steps to do at most, or None for all.
        checkpoint_every: Steps between checkpoints; 0 for one at the end only.
        output: The output folder, or None for ``runs/recipe/NAME-OPTIMIZER``.
        data: What --data named.
        resumes: Whether to continue the checkpoint in the output folder.
    """
    recipe = read_recipe(path)
    entrant = recipe.entrant(optimizer or next(iter(recipe.entrants)))
    if check:
        if data not in (None, os.environ.get("MKOR_DATA")):  # which stands for all commands
            raise UserError(
                f"--check reads no data, but got --data {data!r}: leave one of them out."
            )
        tell(recipe, check_recipe(recipe))
        return
    if recipe.workers > 1 and not launched():
        raise UserError(
            f"recipe {str(path)!r} is for {recipe.workers} workers: start it on each machine with "
            f"{command(recipe, entrant)}"
        )
    most = entrant.steps if steps is None else check_count(steps, "--steps", most=entrant.steps)
    check_count(checkpoint_every, "--checkpoint-every", 0)
    folder = output or Path("runs/recipe") / f"{path.stem}-{entrant.name}"
    task = load_task(recipe, data)
    prepare_folder(folder, (CHECKPOINT_NAME, RESULT_NAME))
    with joined(recipe) as worker, raises_interrupt():
        training = Training(recipe, entrant, task, worker)
        _begin(training, folder, resumes)
        _train_with_progress(training, most, checkpoint_every, folder)
        del training  # before the workers part


def _begin(training: Training, folder: Path, resumes: bool) -> None:
    if resumes:
        training.resume(folder)
    elif (folder / CHECKPOINT_NAME).exists():
        raise UserError(
            f"{str(folder)!r} holds a checkpoint: continue it with --resume, or choose "
            "another --output."
        )


def command(recipe: Recipe, entrant: Entrant) -> str:
    """The command line that trains a recipe by one of its optimizers."""
    words = [str(recipe.path), "--optimizer", entrant.name]
    if recipe.workers == 1:
        return f"mkor recipe {shlex.join(words)} --data FOLDER"
    nodes = recipe.workers // recipe.per_node
    launch = f"torchrun --nnodes {nodes} --nproc-per-node {recipe.per_node}"
    meet = " --rdzv-backend c10d --rdzv-endpoint HOST:29500" if nodes > 1 else " --standalone"
    return f"{launch}{meet} -m mkor_bench recipe {shlex.join(words)} --data FOLDER"


def tell(recipe: Recipe, found: Checked) -> None:
    """Prints what a dry run found."""
    console = output_console()
    for line in told(recipe, found):
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    console.print(memory_table(found))
    for entrant in recipe.entrants.values():
        console.print(command(recipe, entrant), soft_wrap=True, highlight=False, markup=False)


def told(recipe: Recipe, found: Checked) -> list[str]:
    """What a dry run found, in lines."""
    shapes = ", ".join("×".join(map(str, shape)) or "1" for shape in found.shapes)
    kept = bytes_text(found.activations)
    half = ", about half of it in bfloat16" if recipe.dtype == "bfloat16" else ""
    return [
        f"{recipe.title} ({recipe.paper})",
        f"numbers: {recipe.source}",
        f"task: {recipe.task}, {found.parameters:,} parameters",
        f"batch: {found.micro_batch} samples × {found.accumulated} accumulated × "
        f"{recipe.workers} workers = {recipe.batch}; tensors of {shapes}",
        f"memory of a worker: weights and gradients {bytes_text(8 * found.parameters)}, "
        f"what the backward pass keeps {kept}{half}, and by optimizer:",
    ]


def memory_table(found: Checked) -> Table:
    """The memory and the traffic of each optimizer."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("optimizer", "its base", "its method", "in all", "sent a step"):
        table.add_column(heading, justify="left" if heading == "optimizer" else "right")
    fixed = 8 * found.parameters + found.activations
    for name, memory in found.memory.items():
        sizes = (memory.base, memory.method, fixed + memory.base + memory.method)
        cells = [name, *map(bytes_text, sizes), bytes_text(round(memory.wire))]
        table.add_row(*map(Text, cells))
    return table


def _train_with_progress(training: Training, steps: int, every: int, folder: Path) -> None:
    progress, first = training.progress, training.worker.rank == 0
    with progress_display() as display:
        name = f"{training.recipe.path.stem}, {training.entrant.name}"
        if first:
            display.add(name, steps, done=len(progress.losses))

        def told() -> None:
            if first:
                display.advance(0, 1, "", f"loss {number(progress.losses[-1])}")

        train(training, steps, every, folder, told)
    if first:
        text = to_json(_result(training))
        target = folder / RESULT_NAME
        write_atomically(target, lambda path: path.write_text(text, encoding="utf-8"))
        output_console().print(_end(training, folder), soft_wrap=True, highlight=False)


def _result(training: Training) -> dict[str, Any]:
    recipe, progress = training.recipe, training.progress
    return {
        "format": 1,
        "recipe": recipe.path.name,
        "optimizer": training.entrant.name,
        "workers": recipe.workers,
        "batch": recipe.batch,
        "dtype": recipe.dtype,
        "seed": recipe.seed,
        "machine": describe_machine(),
        "versions": versions(),
        "steps": len(progress.losses),
        "of_steps": training.entrant.steps,
        "seconds": round(progress.seconds, 3),
        "metric": {training.task.metric: progress.metric},
        "losses": progress.losses,
    }


def _end(training: Training, folder: Path) -> str:
    progress, steps = training.progress, training.entrant.steps
    done = len(progress.losses)
    loss = f"loss {number(progress.losses[-1])} after {done} of {steps} steps"
    metric = (
        "" if progress.metric is None else f", {training.task.metric} {number(progress.metric)}"
    )
    go_on = "" if done == steps else " The same command with --resume continues it."
    return f"{loss}{metric}. Written to {folder}: {RESULT_NAME}, {CHECKPOINT_NAME}.{go_on}"
