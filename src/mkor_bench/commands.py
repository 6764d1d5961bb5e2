"""What the commands do, once their options are read: check, work, report.

Everything that can be wrong with what the user asked for is found before work begins.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import torch

from mkor_bench.checkpoint import (
    FILE_NAME,
    read_checkpoint,
    refuse_to_overwrite,
    resume,
    save_checkpoint,
    settings_to_resume,
)
from mkor_bench.compare import TUNING_SEED, Plan, compare
from mkor_bench.console import output_console, progress_display
from mkor_bench.errors import UserError
from mkor_bench.files import prepare_folder
from mkor_bench.interrupt import INTERRUPTED, interruptible, raises_interrupt
from mkor_bench.optimizers import optimizer_row
from mkor_bench.options import MAX_SEEDS, check_count, check_lr, parse_lrs, parse_optimizers
from mkor_bench.report.curves import FILE_NAME as CURVES_NAME
from mkor_bench.report.curves import write_curves
from mkor_bench.report.events import FOLDER_NAME, add_watched, open_writer, write_events
from mkor_bench.report.results import FILE_NAME as RESULTS_NAME
from mkor_bench.report.results import Conditions, write_results
from mkor_bench.report.table import number, task_table
from mkor_bench.report.watch import due, watched
from mkor_bench.summary import OptimizerResult, TaskResult, final_loss
from mkor_bench.tasks.check import check_task
from mkor_bench.tasks.source import TaskSource, resolve_tasks
from mkor_bench.train import Run, Settings, Training, clock, train
from mkor_bench.workers import Workers, cores, default_workers

_FILES = (RESULTS_NAME, CURVES_NAME)


def run_compare(
    task: str,
    *,
    optimizers: str,
    lrs: str | None,
    steps: int | None,
    seeds: int,
    threads: int,
    output: Path | None,
    data: str | None,
) -> None:
    """Does what ``mkor compare`` is asked to.

    Args:
        task: A task, a group of tasks, or ``path/to/file.py:function``.
        optimizers: Names, separated by commas.
        lrs: The common grid, separated by commas, or None for each task's own.
        steps: The steps of a run, or None for each task's own.
        seeds: How many seeds.
        threads: torch threads of a run.
        output: The output folder, or None for ``runs/TASK``.
        data: The folder with data sets, if any.
    """
    plan = Plan(
        optimizers=parse_optimizers(optimizers),
        lrs=None if lrs is None else parse_lrs(lrs),
        steps=None if steps is None else check_count(steps, "--steps"),
        seeds=check_count(seeds, "--seeds", most=MAX_SEEDS),
        sources=_checked_tasks(task, data),
    )
    workers = default_workers(check_count(threads, "--threads", most=cores()))
    torch.set_num_threads(threads)
    folder = output or Path("runs") / _folder_name(task, plan.sources)
    prepare_folder(folder, _FILES, (FOLDER_NAME,))
    conditions = Conditions(
        _command(), tuple(range(seeds)), threads, clock()[1], workers, TUNING_SEED
    )
    with raises_interrupt():
        results = _compare_with_progress(plan, workers, threads)
        write_results(folder, results, conditions)
        write_curves(folder, results)
        write_events(folder, results)
    console = output_console()
    for result in results:
        console.print(task_table(result, console.width), "")
    _tell_files(folder)


def run_train(
    task: str,
    *,
    optimizer: str,
    lr: float | None,
    steps: int | None,
    seed: int | None,
    threads: int,
    output: Path | None,
    data: str | None,
    checkpoint_every: int,
    resumes: bool,
) -> int:
    """Does what ``mkor train`` is asked to.

    Args:
        task: A task, or ``path/to/file.py:function``.
        optimizer: A name.
        lr: The learning rate, or None for the checkpoint's or a usual one.
        steps: The steps, or None for the checkpoint's or the task's own.
        seed: The seed, or None for the checkpoint's or 0.
        threads: torch threads.
        output: The output folder, or None for ``runs/train/TASK-OPTIMIZER``.
        data: The folder with data sets, if any.
        checkpoint_every: Steps between checkpoints; 0 for one at the end only.
        resumes: Whether to continue the checkpoint in the output folder.

    Returns:
        The exit code: 0, or 1 if the loss diverged, or 130 if it was interrupted.
    """
    optimizer_row(optimizer)
    given = {
        "lr": None if lr is None else check_lr(lr, "--lr"),
        "steps": None if steps is None else check_count(steps, "--steps"),
        "seed": None if seed is None else check_count(seed, "--seed", 0, 2**32 - 1),
    }
    check_count(checkpoint_every, "--checkpoint-every", 0)
    source = _single_task(task, data)
    folder = output or Path("runs/train") / f"{source.load().name}-{optimizer}"
    torch.set_num_threads(check_count(threads, "--threads", most=cores()))
    if folder.exists() or not resumes:
        prepare_folder(folder, (FILE_NAME, *_FILES), (FOLDER_NAME,))
    training = _begin_or_resume(source, folder, optimizer, given, resumes)
    complete = _train_with_progress(training, folder, checkpoint_every)
    if not complete:
        output_console().print(
            f"Stopped after step {training.run.step} of {training.settings.steps}. "
            f"The same command with --resume continues it.",
            soft_wrap=True,
        )
        return INTERRUPTED
    with raises_interrupt():
        _report_training(training, folder, threads)
    return 1 if training.run.diverged else 0


def _checked_tasks(text: str, data: str | None) -> tuple[TaskSource, ...]:
    sources = resolve_tasks(text, data)
    for source in sources:
        check_task(source)
    return tuple(sources)


def _single_task(text: str, data: str | None) -> TaskSource:
    sources = _checked_tasks(text, data)
    if len(sources) > 1:
        names = " or ".join(source.text for source in sources)
        raise UserError(f"task {text!r} is a group of tasks: train one of them, {names}.")
    return sources[0]


def _folder_name(text: str, sources: tuple[TaskSource, ...]) -> str:
    return sources[0].load().name if sources[0].is_users else text


def _command() -> str:
    return f"mkor {shlex.join(sys.argv[1:])}"


def _compare_with_progress(plan: Plan, workers: int, threads: int) -> list[TaskResult]:
    totals = [plan.total_steps(source) for source in plan.sources]
    done = [0] * len(totals)
    with progress_display() as display, Workers(workers, threads) as pool:
        for number, (source, total) in enumerate(zip(plan.sources, totals, strict=True)):
            stage = "waiting …" if number else "loading data …"
            display.add(source.load().name, total, stage)

        def on_progress(number: int, steps: int, stage: str) -> None:
            done[number] += steps
            display.advance(number, steps, stage)

        results = compare(plan, pool, on_progress)
        for number, total in enumerate(totals):
            if done[number] < total:  # no runs follow where every learning rate diverged
                display.advance(number, total - done[number], "done")
    return results


def _begin_or_resume(
    source: TaskSource, folder: Path, optimizer: str, given: dict[str, Any], resumes: bool
) -> Training:
    task = source.load()
    named = {name: value for name, value in given.items() if value is not None}
    if resumes:
        state = read_checkpoint(folder)
        named = {"optimizer": optimizer, **named}
        training = Training(task, settings_to_resume(state, task.name, named))
        resume(training, state)
        return training
    refuse_to_overwrite(folder)
    plain, _, _ = optimizer.partition(":")
    lr = float(task.default_lrs.get(plain, optimizer_row(optimizer).lr))
    defaults = {"lr": lr, "steps": task.steps, "seed": 0}
    return Training(task, Settings(optimizer=optimizer, **{**defaults, **named}))


def _train_with_progress(training: Training, folder: Path, checkpoint_every: int) -> bool:
    """Trains, and returns whether it came to its end rather than being interrupted."""
    steps, run = training.settings.steps, training.run
    name = f"{training.task.name}, {training.settings.optimizer}"
    with (
        interruptible() as stop_asked,
        open_writer(folder, run.step + 1) as writer,
        progress_display() as display,
    ):
        display.add(name, steps, done=run.step)

        def on_step(training: Training) -> bool:
            loss = run.losses[-1]
            writer.add_scalar("training loss", loss, run.step)
            if due(run.step, steps):
                add_watched(writer, watched(training.optimizer), run.step)
            display.advance(0, 1, "", f"loss {number(loss)}")
            if checkpoint_every and run.step % checkpoint_every == 0:
                save_checkpoint(folder, training)
            return stop_asked()

        train(training, on_step)
        save_checkpoint(folder, training)
        if run.metric is not None:
            writer.add_scalar(training.task.metric, run.metric, run.step)
    return run.finished


def _report_training(training: Training, folder: Path, threads: int) -> None:
    run, task = training.run, training.task
    result = OptimizerResult(
        run.settings.optimizer, {run.settings.lr: final_loss(run)}, {run.settings.lr: [run]}
    )
    of_task = TaskResult(task, run.settings.steps, [result])
    conditions = Conditions(_command(), (run.settings.seed,), threads, clock()[1], workers=1)
    write_results(folder, [of_task], conditions)
    write_curves(folder, [of_task])
    output_console().print(_told(run, task.metric), soft_wrap=True)
    _tell_files(folder, FILE_NAME)


def _told(run: Run, metric: str) -> str:
    if run.diverged or run.metric is None:
        return (
            f"The loss was no longer finite at step {run.step}: the run diverged; "
            f"try a lower --lr than {run.settings.lr:g}."
        )
    return (
        f"Final loss {number(final_loss(run))}, {metric} {number(run.metric)} "
        f"after {run.step} steps in {run.seconds[-1]:.2f} s."
    )


def _tell_files(folder: Path, *more: str) -> None:
    names = ", ".join([*more, "results.json", "curves.png"])
    output_console().print(
        f"Written to {folder}: {names}, "
        f"and for TensorBoard: tensorboard --logdir {folder / FOLDER_NAME}",
        soft_wrap=True,
        highlight=False,
    )
