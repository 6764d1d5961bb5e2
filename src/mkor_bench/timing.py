"""The time of a step relative to SGD, measured so that a busy machine does not decide.

The optimizers take turns of ten steps in one process. A disturbance then meets all of
them, and the median over the rounds of the *ratio* within a round drops the rounds in
which it met only one. A turn is ten steps, since a method that updates its factors
every tenth step has to pay for that within its turn. The learning rate is tiny: it does
not change the work of a step, and no optimizer can diverge.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from mkor_bench.tasks.source import TaskSource
from mkor_bench.train import Settings, Training, clock, training_step

REFERENCE = "sgd"
TURN = 10
_MAX_ROUNDS = 25
_LR = 1e-6


@dataclass(frozen=True)
class TimingJob:
    """What to measure.

    Attributes:
        source: The task.
        optimizers: Their names.
        rounds: How many turns each of them gets.
    """

    source: TaskSource
    optimizers: tuple[str, ...]
    rounds: int

    @property
    def steps(self) -> int:
        """All steps of the measurement, those of the reference and of the warm-up too."""
        return TURN * (self.rounds + 1) * len({REFERENCE, *self.optimizers})


@dataclass(frozen=True)
class StepTime:
    """The time of a step.

    Attributes:
        seconds: Its median.
        ratio: The median of its ratio to SGD's in the same round.
    """

    seconds: float
    ratio: float


def rounds_for(steps: int) -> int:
    """Returns enough rounds for a stable median, few beside runs of so many steps."""
    return max(3, min(_MAX_ROUNDS, steps // 20))


def time_steps(job: TimingJob, report: Callable[[int], None]) -> dict[str, StepTime]:
    """Measures every optimizer of the job.

    Args:
        job: What to measure.
        report: Called with the number of steps made since the last call.

    Returns:
        The time of a step of each optimizer by its name.
    """
    task = job.source.load()
    steps = TURN * (job.rounds + 1)
    trainings = {
        name: Training(task, Settings(name, _LR, seed=0, steps=steps))
        for name in dict.fromkeys((REFERENCE, *job.optimizers))
    }
    rounds: list[dict[str, float]] = []
    for _ in range(job.rounds + 1):
        rounds.append({name: _take_turn(training) for name, training in trainings.items()})
        report(TURN * len(trainings))
    del rounds[0]  # state is allocated in the first one
    return {
        name: StepTime(
            seconds=statistics.median(turn[name] for turn in rounds) / TURN,
            ratio=statistics.median(turn[name] / turn[REFERENCE] for turn in rounds),
        )
        for name in job.optimizers
    }


def _take_turn(training: Training) -> float:
    now, _ = clock()
    begin = now()
    for _ in range(TURN):
        training_step(training)
    return now() - begin
