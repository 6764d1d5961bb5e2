"""Pieces that train, and pieces that measure the time of a step."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mkor_bench.compare import RunJob, run_job
from mkor_bench.data.store import CHECKSUMS, HUB
from mkor_bench.optimizers import settled_options
from mkor_bench.studies.kept import Kept
from mkor_bench.studies.piece import Piece
from mkor_bench.studies.study import Request
from mkor_bench.tasks.source import TaskSource
from mkor_bench.timing import TimingJob, time_steps
from mkor_bench.train import SCHEDULE, Run, Settings, clock

_ROUNDS = 7
_DIGITS = 7


@dataclass(frozen=True)
class Place:
    """A task as a study runs it.

    Attributes:
        task: Its name.
        data: What --data named.
        quick: Whether it is made at its small size.
        autocast: Whether it is trained under bfloat16 autocast.
    """

    task: str
    data: str | None
    quick: bool
    autocast: bool = False

    @property
    def source(self) -> TaskSource:
        """Where to load the task from."""
        return TaskSource(self.task, self.data, self.quick, self.autocast)

    @property
    def steps(self) -> int:
        """The steps of a run."""
        return self.source.load().steps

    def spec(self, optimizer: str) -> dict[str, Any]:
        """Returns what determines any piece with an optimizer on this task."""
        return {
            "task": self.task,
            "quick": self.quick,
            "data": data_identity(self.data),
            "optimizer": optimizer,
            "options": settled_options(optimizer),
            "steps": self.steps,
            "threads": 1,
            **({"autocast": "bfloat16"} if self.autocast else {}),
        }


def places_of(asked: Request) -> list[Place]:
    """Returns a request's tasks as they are run."""
    return [Place(task, asked.data, asked.quick, asked.autocast) for task in asked.tasks]


def source_of(spec: Mapping[str, Any], data: str | None) -> TaskSource:
    """Tells where a piece's task is loaded from.

    Args:
        spec: Of the piece.
        data: What --data named.

    Returns:
        The source.
    """
    return TaskSource(spec["task"], data, spec["quick"], "autocast" in spec)


def run_piece(place: Place, optimizer: str, lr: float, seed: int) -> Piece:
    """Returns the piece that trains once.

    Args:
        place: The task.
        optimizer: Its name, which may carry options.
        lr: The peak learning rate.
        seed: The seed.

    Returns:
        The piece; :func:`run_of` reads its result.
    """
    spec = {**place.spec(optimizer), "lr": lr, "seed": seed, "schedule": SCHEDULE}
    label = f"{place.task} {optimizer} lr={lr:g} seed={seed}"
    return Piece("mkor_bench.studies.runs:train_once", spec, label, place.steps)


def timing_piece(place: Place, optimizer: str) -> Piece:
    """Returns the piece that measures the time of an optimizer's step beside SGD's."""
    spec = {**place.spec(optimizer), "rounds": _ROUNDS}
    job = TimingJob(place.source, (optimizer,), _ROUNDS)
    label = f"{place.task} {optimizer} step time"
    return Piece("mkor_bench.studies.runs:time_step", spec, label, job.steps, alone=True)


def train_once(
    spec: Mapping[str, Any], data: str | None, report: Callable[[int], None]
) -> dict[str, Any]:
    """Trains, in a worker; see :func:`run_piece`."""
    source = source_of(spec, data)
    settings = Settings(spec["optimizer"], spec["lr"], spec["seed"], spec["steps"])
    run = run_job(RunJob(source, settings), report)
    return {
        "losses": [float(f"{loss:.{_DIGITS}g}") for loss in run.losses],
        "seconds": [float(f"{second:.{_DIGITS}g}") for second in run.seconds],
        "clock": clock()[1],
        "metric": run.metric,
        "handed_over": handed_over(run),
    }


def handed_over(run: Run) -> int | None:
    """Returns the first step at which a method was seen to have left the base alone, if it did."""
    seen = {step: own.get("layers preconditioned") for step, own in sorted(run.watched.items())}
    begun = False
    for step, layers in seen.items():
        begun = begun or bool(layers)
        if begun and layers == 0:
            return step
    return None


def time_step(
    spec: Mapping[str, Any], data: str | None, report: Callable[[int], None]
) -> dict[str, Any]:
    """Measures, in a worker; see :func:`timing_piece`."""
    source = source_of(spec, data)
    name = spec["optimizer"]
    time = time_steps(TimingJob(source, (name,), spec["rounds"]), report)[name]
    return {"seconds": time.seconds, "ratio": time.ratio, "clock": clock()[1]}


def run_of(kept: Kept, place: Place, optimizer: str, lr: float, seed: int) -> Run | None:
    """Reads the record of a run.

    Args:
        kept: The results.
        place: The task.
        optimizer: Its name.
        lr: The peak learning rate.
        seed: The seed.

    Returns:
        The run, None if it has not been done.
    """
    result = kept.get(run_piece(place, optimizer, lr, seed))
    if result is None:
        return None
    # JSON has no infinity: the loss that ended a run is null there.
    losses = [math.inf if loss is None else loss for loss in result["losses"]]
    settings = Settings(optimizer, lr, seed, place.steps)
    return Run(settings, losses, list(result["seconds"]), result["metric"])


def data_identity(data: str | None) -> str | None:
    """Tells one collection of data from another, wherever it lies.

    Args:
        data: What --data named.

    Returns:
        "hub", None, or a hash of the folder's checksums, if it has any.
    """
    if data is None or data == HUB:
        return data
    sums = Path(data) / CHECKSUMS
    if not sums.is_file():
        return "folder without checksums"
    return hashlib.sha256(sums.read_bytes()).hexdigest()[:16]
