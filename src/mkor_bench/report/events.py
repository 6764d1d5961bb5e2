"""TensorBoard events: the loss of each step, what the optimizer does, and the test metric."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mkor_bench.summary import TaskResult
from mkor_bench.train import Run

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

FOLDER_NAME = "tensorboard"


def write_events(folder: Path, results: Sequence[TaskResult]) -> None:
    """Writes the runs of a comparison, each as ``tensorboard/TASK/OPTIMIZER/seed-N``.

    Args:
        folder: The output folder. Events of an earlier comparison there are removed,
            since TensorBoard would mix them with the new ones.
        results: One result a task.
    """
    root = folder / FOLDER_NAME
    for old in root.glob("**/events.out.tfevents.*"):
        old.unlink()
    for result in results:
        for optimizer in result.optimizers:
            for run in optimizer.runs:
                name = f"{result.task.name}/{optimizer.optimizer}/seed-{run.settings.seed}"
                _write_run(root / name, result.task.metric, run)


def open_writer(folder: Path, next_step: int) -> SummaryWriter:
    """Opens the events of one training, to write while it goes on.

    Args:
        folder: The output folder.
        next_step: The step that comes next; what a killed run wrote from there on is
            hidden by TensorBoard.

    Returns:
        The writer; close it at the end.
    """
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder / FOLDER_NAME), purge_step=next_step)


def add_watched(
    writer: SummaryWriter, scalars: dict[str, float], step: int, walltime: float | None = None
) -> None:
    """Writes what was seen of an optimizer after a step.

    Args:
        writer: Where to.
        scalars: Numbers by their name.
        step: The step, from 1.
        walltime: When it was, in seconds since the epoch, or None for now.
    """
    for name, value in scalars.items():
        writer.add_scalar(name, value, step, walltime=walltime)


def _write_run(folder: Path, metric: str, run: Run) -> None:
    from torch.utils.tensorboard import SummaryWriter

    begin = time.time()
    with SummaryWriter(str(folder)) as writer:
        for step, (loss, seconds) in enumerate(zip(run.losses, run.seconds, strict=True), 1):
            # With these wall times, the axis "relative" is the training time.
            writer.add_scalar("training loss", loss, step, walltime=begin + seconds)
        for step, scalars in run.watched.items():
            add_watched(writer, scalars, step, begin + run.seconds[step - 1])
        if run.metric is not None:
            writer.add_scalar(metric, run.metric, run.step, walltime=begin + run.seconds[-1])
