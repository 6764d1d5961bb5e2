"""Optimizers on a task under equal conditions: the protocol of ``mkor compare``.

For each task:

1. Every optimizer runs once at each learning rate of one common grid, with a seed that
   is used for nothing else. The two rates with the lowest final loss are its finalists:
   a single seed too often prefers a rate that fails on the next one.
2. Every optimizer runs at its finalists with several seeds, and the one with the lower
   mean final loss is reported. A seed fixes the first model and the order of the
   batches, so all optimizers begin and continue on the same data.
3. The time of a step is measured in interleaved turns, while nothing else runs.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from mkor_bench.report.watch import due, watched
from mkor_bench.summary import OptimizerResult, TaskResult, final_loss
from mkor_bench.tasks.source import TaskSource
from mkor_bench.timing import TimingJob, rounds_for, time_steps
from mkor_bench.train import Run, Settings, Training, train
from mkor_bench.workers import Workers

TUNING_SEED = 1000
"""The seed of the runs on the grid; the finalists have the seeds from 0 on."""

FINALISTS = 2
"""How many learning rates of the grid run with several seeds."""

_REPORT_EVERY = 10

OnProgress = Callable[[int, int, str], None]
"""Called with the number of a task, the steps made for it, and the stage in words."""


@dataclass(frozen=True)
class Plan:
    """What to compare.

    Attributes:
        sources: The tasks.
        optimizers: Names of optimizers.
        seeds: How many seeds, from 0 on.
        lrs: The common grid, or None for each task's own.
        steps: The steps of a run, or None for each task's own.
    """

    sources: tuple[TaskSource, ...]
    optimizers: tuple[str, ...]
    seeds: int
    lrs: tuple[float, ...] | None = None
    steps: int | None = None

    def lrs_of(self, source: TaskSource) -> tuple[float, ...]:
        """Returns the grid of learning rates for a task."""
        return self.lrs or source.load().lrs

    def steps_of(self, source: TaskSource) -> int:
        """Returns the steps of a run of a task."""
        return self.steps or source.load().steps

    def total_steps(self, source: TaskSource) -> int:
        """Returns the steps of all runs of a task and of the measurement of time."""
        grid = len(self.lrs_of(source))
        runs = grid + min(FINALISTS, grid) * self.seeds
        return len(self.optimizers) * runs * self.steps_of(source) + self.timing_job(source).steps

    def timing_job(self, source: TaskSource) -> TimingJob:
        """Returns the measurement of the time of a step of a task."""
        return TimingJob(source, self.optimizers, rounds_for(self.steps_of(source)))


@dataclass(frozen=True)
class RunJob:
    """One run of one task."""

    source: TaskSource
    settings: Settings


def compare(plan: Plan, workers: Workers, on_progress: OnProgress) -> list[TaskResult]:
    """Compares the optimizers on every task of the plan.

    Args:
        plan: What to compare.
        workers: Where the runs run.
        on_progress: Told about the progress of each task.

    Returns:
        One result a task.
    """

    def progress_in(stage: str) -> Callable[[RunJob | TimingJob, int], None]:
        return lambda job, steps: on_progress(plan.sources.index(job.source), steps, stage)

    results = _run_grid(plan, workers, progress_in("learning rates"))
    _run_seeds(plan, results, workers, progress_in("seeds"))
    for source, result in zip(plan.sources, results, strict=True):
        _time(plan, source, result, workers, progress_in("step time"))
    return results


def run_job(job: RunJob, report: Callable[[int], None]) -> Run:
    """Trains, in a worker.

    Args:
        job: What to train.
        report: Called with the number of steps made since the last call.

    Returns:
        The record of the run.
    """
    reported = 0

    def on_step(training: Training) -> None:
        nonlocal reported
        if due(training.run.step, job.settings.steps):
            training.run.watched[training.run.step] = watched(training.optimizer)
        if training.run.step - reported >= _REPORT_EVERY:
            report(training.run.step - reported)
            reported = training.run.step

    with _without_fault_lines():
        run = train(Training(job.source.load(), job.settings), on_step)
    report(job.settings.steps - reported)  # a run that diverged is done as well
    return run


@contextmanager
def _without_fault_lines() -> Iterator[None]:
    """Keeps back what the library logs of faults, hundreds at the rates that are too high."""
    log = logging.getLogger("mkor")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def _run_grid(
    plan: Plan, workers: Workers, on_progress: Callable[[RunJob, int], None]
) -> list[TaskResult]:
    jobs = [
        RunJob(source, Settings(optimizer, lr, TUNING_SEED, plan.steps_of(source)))
        for source in plan.sources
        for lr in plan.lrs_of(source)
        for optimizer in plan.optimizers
    ]
    grids: dict[tuple[TaskSource, str], dict[float, float]] = defaultdict(dict)
    for job, run in zip(jobs, workers.map(run_job, jobs, on_progress), strict=True):
        grids[job.source, run.settings.optimizer][run.settings.lr] = final_loss(run)
    return [
        TaskResult(
            source.load(),
            plan.steps_of(source),
            [OptimizerResult(name, grids[source, name]) for name in plan.optimizers],
        )
        for source in plan.sources
    ]


def _run_seeds(
    plan: Plan,
    results: list[TaskResult],
    workers: Workers,
    on_progress: Callable[[RunJob, int], None],
) -> None:
    # Seeds outermost: the optimizers alternate, so that a busy spell meets all of them.
    todo = [
        (result, RunJob(source, Settings(result.optimizer, lr, seed, of_task.steps)))
        for source, of_task in zip(plan.sources, results, strict=True)
        for seed in range(plan.seeds)
        for result in of_task.optimizers
        for lr in result.best_of_grid(FINALISTS)
    ]
    runs = workers.map(run_job, [job for _, job in todo], on_progress)
    for (result, job), run in zip(todo, runs, strict=True):
        result.finalists.setdefault(job.settings.lr, []).append(run)


def _time(
    plan: Plan,
    source: TaskSource,
    result: TaskResult,
    workers: Workers,
    on_progress: Callable[[TimingJob, int], None],
) -> None:
    times = workers.map(time_steps, [plan.timing_job(source)], on_progress)[0]
    for optimizer in result.optimizers:
        optimizer.step_seconds = times[optimizer.optimizer].seconds
        optimizer.step_time_ratio = times[optimizer.optimizer].ratio
