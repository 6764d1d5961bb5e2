"""The command ``mkor``: reads options, and tells mistakes in one line.

What the commands do is in :mod:`mkor_bench.commands`, which is imported when one runs:
``mkor --help`` must not wait for torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mkor_bench.arguments import (
    AUTOCAST,
    DATA,
    EVERY,
    GRID,
    LR,
    RESUME,
    SEED,
    THREADS,
    count,
    mistakes_in_one_line,
    names,
    whole,
)
from mkor_bench.help import (
    COMPARE_HELP,
    ESTIMATE_HELP,
    RECIPE_HELP,
    REPORT_HELP,
    STUDY_HELP,
    TRAIN_HELP,
)
from mkor_bench.interrupt import INTERRUPTED, end_at_once, ignore
from mkor_bench.launch import leaves_at_once
from mkor_bench.optimizers import OPTIMIZERS
from mkor_bench.report.machine import version

app = typer.Typer(
    name="mkor",
    help="Train networks and compare optimizers: SGD, AdamW, LAMB, and MKOR on top of them.\n\n"
    "Begin with: mkor compare digits",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)


def _tell_version(asked: bool) -> None:
    if asked:
        typer.echo(f"mkor {version()}")
        raise typer.Exit


_OPTIMIZER_NAMES = ",".join(row.name for row in OPTIMIZERS.values() if row.compared)


@app.callback()
def mkor(
    tell_version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_tell_version, is_eager=True, help="Tell the version and end."
        ),
    ] = False,
) -> None:
    """Options of the command as a whole."""


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
    steps: Annotated[int | None, count("--steps", "Steps of a run.", "each task's own")] = None,
    seeds: Annotated[
        int, typer.Option(metavar="N", parser=whole("--seeds"), help="How many seeds, from 0 on.")
    ] = 3,
    threads: Annotated[int, THREADS] = 1,
    output: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Output folder.", show_default="runs/TASK"),
    ] = None,
    data: Annotated[str | None, DATA] = None,
) -> None:
    """Compares optimizers on a task."""
    with mistakes_in_one_line():
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
    optimizer: Annotated[str, typer.Option(metavar="NAME", help="The optimizer.")] = "mkor",
    lr: Annotated[float | None, LR] = None,
    steps: Annotated[int | None, count("--steps", "Steps.", "the task's own")] = None,
    seed: Annotated[int | None, SEED] = None,
    threads: Annotated[int, THREADS] = 1,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Output folder.", show_default="runs/train/TASK-OPTIMIZER"
        ),
    ] = None,
    data: Annotated[str | None, DATA] = None,
    checkpoint_every: Annotated[int, EVERY] = 100,
    resume: Annotated[bool, RESUME] = False,
) -> None:
    """Trains one model with one optimizer."""
    with mistakes_in_one_line():
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


@app.command(help=STUDY_HELP)
def study(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Which study.")],
    quick: Annotated[
        bool, typer.Option("--quick", help="A small part at a small size, in minutes.")
    ] = False,
    tasks: Annotated[str | None, names("Tasks or groups")] = None,
    optimizers: Annotated[str | None, names("Optimizers")] = None,
    seeds: Annotated[
        int | None, count("--seeds", "How many seeds, from 0 on.", "the study's own")
    ] = None,
    lrs: Annotated[str | None, GRID] = None,
    autocast: Annotated[bool, AUTOCAST] = False,
    workers: Annotated[
        int | None, count("--workers", "Processes side by side, one thread each.", "one a core")
    ] = None,
    report: Annotated[
        bool, typer.Option("--report", help="Report on what is there; run nothing.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Output folder.", show_default="runs/study/NAME"),
    ] = None,
    data: Annotated[str | None, DATA] = None,
) -> None:
    """Does a study, in as many pieces as it takes."""
    with mistakes_in_one_line():
        from mkor_bench.studies.command import run_study

        run_study(
            name,
            quick=quick,
            tasks=tasks,
            optimizers=optimizers,
            seeds=seeds,
            lrs=lrs,
            autocast=autocast,
            workers=workers,
            output=output,
            data=data,
            report_only=report,
        )


@app.command(help=REPORT_HELP)
def report(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Where studies wrote to.", show_default=False)
    ],
) -> None:
    """Puts the findings of studies on one page."""
    with mistakes_in_one_line():
        from mkor_bench.report.command import run_report

        run_report(folder)


@app.command(help=RECIPE_HELP)
def recipe(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="A recipe, such as recipes/bert-large-reviews-4.toml."),
    ],
    check: Annotated[
        bool, typer.Option("--check", help="Try it without data and a GPU; train nothing.")
    ] = False,
    optimizer: Annotated[
        str | None, typer.Option(metavar="NAME", help="Of the recipe.", show_default="its first")
    ] = None,
    steps: Annotated[int | None, count("--steps", "Steps to do at most.", "all of them")] = None,
    checkpoint_every: Annotated[int, EVERY] = 100,
    resume: Annotated[bool, RESUME] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Output folder.", show_default="runs/recipe/FILE-OPTIMIZER"
        ),
    ] = None,
    data: Annotated[str | None, DATA] = None,
) -> None:
    """Trains at full size, as a file says."""
    with mistakes_in_one_line():
        from mkor_bench.recipes.command import run_recipe

        run_recipe(
            file,
            check=check,
            optimizer=optimizer,
            steps=steps,
            checkpoint_every=checkpoint_every,
            output=output,
            data=data,
            resumes=resume,
        )


@app.command(help=ESTIMATE_HELP)
def estimate(
    model: Annotated[str, typer.Option(metavar="NAME", help="The model.")] = "bert-large",
    methods: Annotated[
        str, typer.Option(metavar="NAMES", help="Methods beside LAMB, separated by commas.")
    ] = "mkor,mkor-window,eva,kfac",
    workers: Annotated[
        str, typer.Option(metavar="NUMBERS", help="Numbers of workers, separated by commas.")
    ] = "1,2,4,8,16,32,64,128,256,512,1024",
    bandwidth: Annotated[float, typer.Option(help="Of a worker, GB/s.")] = 25.0,
    latency: Annotated[float, typer.Option(help="Of a message, microseconds.")] = 5.0,
    flops: Annotated[float, typer.Option(help="Of a worker, TFLOP/s.")] = 50.0,
    batch: Annotated[int, typer.Option(help="Sequences of a step, of all workers.")] = 8192,
    sequence: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 128,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw a figure, such as scaling.png.")
    ] = None,
) -> None:
    """Predicts the time of a step on many workers."""
    with mistakes_in_one_line():
        from mkor_bench.scale.command import run_estimate

        run_estimate(
            model=model,
            methods=methods,
            workers=workers,
            bandwidth=bandwidth,
            latency=latency,
            rate=flops,
            batch=batch,
            sequence=sequence,
            output=output,
        )


def main() -> None:
    """Runs the command line."""
    end_at_once()
    with leaves_at_once():
        try:
            app()
        except SystemExit as ended:
            if ended.code == INTERRUPTED:
                ignore()
            raise
