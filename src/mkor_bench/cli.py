"""The command ``mkor``: reads options, and tells mistakes in one line.

What the commands do is in :mod:`mkor_bench.commands`, which is imported when one runs:
``mkor --help`` must not wait for torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from mkor_bench.errors import UserError
from mkor_bench.interrupt import INTERRUPTED, end_at_once, ignore
from mkor_bench.optimizers import OPTIMIZERS
from mkor_bench.tasks import GROUPS, TASKS

app = typer.Typer(
    name="mkor",
    help="Train networks and compare optimizers: SGD, AdamW, and MKOR on top of them.\n\n"
    "Begin with: mkor compare digits",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)

_OPTIMIZER_NAMES = ",".join(OPTIMIZERS)
_TASK_NAMES = ", ".join(TASKS)
_DATA = typer.Option(
    metavar="FOLDER", envvar="MKOR_DATA", help="Folder with data sets, for tasks that read any."
)
_THREADS = typer.Option(metavar="N", help="torch threads of a run.")

COMPARE_HELP = f"""
Compare optimizers on a task, under equal conditions.

Every optimizer runs at each learning rate of one common grid. The two rates with the
lowest final training loss then run with several seeds, and the better one is reported.
All of them see the same first models, the same batches and the same schedule (warm-up and
cosine). Independent runs go side by side on the machine's cores. The time of a step is
measured at the end, with the optimizers taking turns.

**Tasks:** {_TASK_NAMES}. **Groups:** {", ".join(GROUPS)} (both).

**Your own task:** path/to/file.py:function, where the function returns a
mkor_bench.tasks.task.Task: how to build the model, its batches, its loss and its test
metric. src/mkor_bench/tasks/digits_classifier.py is an example to copy.

**Examples:**

* mkor compare digits

* mkor compare digits-classifier --optimizers sgd,mkor-sgd --lrs 0.01,0.03,0.1 --seeds 5

* mkor compare my_task.py:task --steps 1000 --output runs/mine

**Written to the output folder:** results.json (each run's curve, the chosen learning rates,
the whole grid, the machine and the versions), curves.png (the loss by step and by second)
and tensorboard/ (the same curves as events).
"""

TRAIN_HELP = f"""
Train one model with one optimizer; stop and continue it at will.

A checkpoint is written every so many steps, at Ctrl-C and at the end. The same command
with --resume continues it, and ends with the same bits as if it had never stopped: model,
optimizer, schedule, position in the data and random numbers are restored. Without --resume,
a folder that holds a checkpoint is refused, whether its run is finished or not: choose
another --output, or remove checkpoint.pt.

**Tasks:** {_TASK_NAMES}, or path/to/file.py:function as for mkor compare.

**Optimizers:** {", ".join(OPTIMIZERS)}.

**Examples:**

* mkor train digits-classifier --optimizer mkor-sgd

* mkor train digits-classifier --optimizer mkor-sgd --resume

* mkor train digits-autoencoder --optimizer adamw --lr 0.003 --output runs/low

**Written to the output folder:** checkpoint.pt (torch.load reads it with weights_only=True),
results.json, curves.png and tensorboard/ (events while it trains).
"""


@app.command(help=COMPARE_HELP)
def compare(
    task: Annotated[str, typer.Argument(metavar="TASK", help="What to train.")],
    optimizers: Annotated[
        str, typer.Option(metavar="NAMES", help="Optimizers, separated by commas.")
    ] = _OPTIMIZER_NAMES,
    lrs: Annotated[
        str | None,
        typer.Option(
            metavar="NUMBERS",
            help="The common grid of learning rates, separated by commas.",
            show_default="each task's own",
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(metavar="N", help="Steps of a run.", show_default="each task's own"),
    ] = None,
    seeds: Annotated[int, typer.Option(metavar="N", help="How many seeds, from 0 on.")] = 3,
    threads: Annotated[int, _THREADS] = 1,
    output: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Output folder.", show_default="runs/TASK"),
    ] = None,
    data: Annotated[str | None, _DATA] = None,
) -> None:
    """Compares optimizers on a task."""
    with _mistakes_in_one_line():
        from mkor_bench.commands import run_compare

        run_compare(
            task,
            optimizers=optimizers,
            lrs=lrs,
            steps=steps,
            seeds=seeds,
            threads=threads,
            output=output,
            data=data,
        )


@app.command(help=TRAIN_HELP)
def train(
    task: Annotated[str, typer.Argument(metavar="TASK", help="What to train.")],
    optimizer: Annotated[str, typer.Option(metavar="NAME", help="The optimizer.")] = "mkor-sgd",
    lr: Annotated[
        float | None,
        typer.Option(
            metavar="NUMBER", help="Peak learning rate.", show_default="the task's own, or 0.01"
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(metavar="N", help="Steps.", show_default="the task's own"),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(metavar="N", help="Seed of the model and the data.", show_default="0"),
    ] = None,
    threads: Annotated[int, _THREADS] = 1,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Output folder.", show_default="runs/train/TASK-OPTIMIZER"
        ),
    ] = None,
    data: Annotated[str | None, _DATA] = None,
    checkpoint_every: Annotated[
        int, typer.Option(metavar="N", help="Steps between checkpoints; 0: only at the end.")
    ] = 100,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the checkpoint in the output folder.")
    ] = False,
) -> None:
    """Trains one model with one optimizer."""
    with _mistakes_in_one_line():
        from mkor_bench.commands import run_train

        code = run_train(
            task,
            optimizer=optimizer,
            lr=lr,
            steps=steps,
            seed=seed,
            threads=threads,
            output=output,
            data=data,
            checkpoint_every=checkpoint_every,
            resumes=resume,
        )
        raise typer.Exit(code)


@contextmanager
def _mistakes_in_one_line() -> Iterator[None]:
    try:
        yield
    except UserError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        typer.echo("Interrupted.", err=True)
        raise typer.Exit(INTERRUPTED) from None


def main() -> None:
    """Runs the command line."""
    end_at_once()
    try:
        app()
    except SystemExit as ended:
        if ended.code == INTERRUPTED:
            ignore()
        raise
