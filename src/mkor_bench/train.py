"""The training loop that every command shares.

Read :func:`train` first: it is the loop. :class:`Training` is a run in progress, with
everything that its next step depends on; :class:`Run` is what is left of it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from mkor_bench.errors import UserError
from mkor_bench.optimizers import optimizer_row
from mkor_bench.seeding import generator_states, restore_generators, seed_generators
from mkor_bench.tasks.guard import NUMERICAL
from mkor_bench.tasks.task import Task

WARMUP_SHARE = 0.1
"""The share of the steps in which the learning rate grows to its value."""

SCHEDULE = f"linear warm-up over {WARMUP_SHARE:.0%} of the steps, then cosine to 0"
"""The schedule in words, for reports."""


@dataclass(frozen=True)
class Settings:
    """What identifies a run of a task: the same settings give the same run.

    Attributes:
        optimizer: Its name in the registry.
        lr: The peak learning rate.
        seed: Seeds the model, the order of the data and everything else.
        steps: How many steps the run and its schedule take.
    """

    optimizer: str
    lr: float
    seed: int
    steps: int


@dataclass
class Run:
    """The record of a run.

    Attributes:
        settings: What was run.
        losses: The training loss of each step's batch, before the step's update.
        seconds: The training time up to and with each step by :func:`clock`; evaluation
            is not in it.
        metric: The test metric at the end, None if the run diverged or goes on.
        watched: What was seen of the optimizer after some of the steps, for TensorBoard.
    """

    settings: Settings
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    metric: float | None = None
    watched: dict[int, dict[str, float]] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """How many steps are done."""
        return len(self.losses)

    @property
    def diverged(self) -> bool:
        """Whether the loss stopped being finite, which ends a run."""
        return bool(self.losses) and not math.isfinite(self.losses[-1])

    @property
    def finished(self) -> bool:
        """Whether there is nothing left to do."""
        return self.step >= self.settings.steps or self.diverged

    def record(self, loss: float, seconds: float) -> None:
        """Adds one step's loss and duration."""
        self.losses.append(loss)
        self.seconds.append(seconds + (self.seconds[-1] if self.seconds else 0.0))


def warmup_cosine(steps: int) -> Callable[[int], float]:
    """The learning rate's schedule, the same for every optimizer.

    Args:
        steps: The number of steps of the run.

    Returns:
        The factor on the learning rate at each step, counted from 0.
    """
    warmup = max(1, round(WARMUP_SHARE * steps))

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        done = min(1.0, (step - warmup) / max(1, steps - warmup))
        return 0.5 * (1 + math.cos(math.pi * done))

    return factor


class Training:
    """A run in progress: everything that the next step depends on.

    Args:
        task: What to train.
        settings: With which optimizer, learning rate, seed and number of steps.
    """

    def __init__(self, task: Task, settings: Settings) -> None:
        seed_generators(settings.seed)
        self.task = task
        self.settings = settings
        self.run = Run(settings)
        self.model = task.build(settings.seed)
        self.optimizer = optimizer_row(settings.optimizer).build(self.model, settings.lr)
        self.scheduler = LambdaLR(self.optimizer, warmup_cosine(settings.steps))
        self.batches: Iterator[Any] = task.batches(settings.seed)

    def next_batch(self) -> Any:
        """Takes the next batch.

        Returns:
            The batch.

        Raises:
            UserError: The task has no more batches.
        """
        try:
            return next(self.batches)
        except StopIteration:
            raise UserError(
                f"task {self.task.name!r}: its batches ended after {self.run.step} of "
                f"{self.settings.steps} steps: make them endless, or give fewer --steps."
            ) from None

    def state_dict(self) -> dict[str, Any]:
        """Returns all that a checkpoint needs, as ``torch.load(weights_only=True)`` reads it."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "generators": generator_states(),
            "losses": list(self.run.losses),
            "seconds": list(self.run.seconds),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues, in a new object, where another one's :meth:`state_dict` was taken."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        for loss, until in zip(state["losses"], state["seconds"], strict=True):
            self.next_batch()  # the position in the data is the number of batches taken
            self.run.losses.append(loss)
            self.run.seconds.append(until)
        # Last, since building the model and taking the batches may have drawn numbers.
        restore_generators(state["generators"])


def train(training: Training, on_step: Callable[[Training], bool | None] | None = None) -> Run:
    """Trains to the end, or until the loss is no longer finite, and evaluates.

    Args:
        training: A new run, or one that continues a checkpoint.
        on_step: Called after each step, outside the measured time. If it returns True,
            training stops there, unfinished.

    Returns:
        The record of the whole run.
    """
    run, (now, _) = training.run, clock()
    while not run.finished:
        begin = now()
        try:
            loss = training_step(training)
        except NUMERICAL:
            loss = math.nan  # a matrix that has no inverse ends a run like an infinite loss
        run.record(loss, now() - begin)
        if on_step is not None and on_step(training):
            break
    if run.finished and not run.diverged:
        run.metric = evaluate(training)
    return run


def clock() -> tuple[Callable[[], float], str]:
    """Chooses the clock that times training.

    A thread that computes alone is timed by its own processor time: it is the wall time
    of an idle machine, and other programs on the same cores do not change it. Where
    several threads or a device compute, only the wall time tells.

    Returns:
        A function that returns seconds, and what they are in words.
    """
    if torch.get_num_threads() == 1 and not torch.cuda.is_available():
        return time.thread_time, "processor time"
    return time.perf_counter, "wall time"


def training_step(training: Training) -> float:
    """Takes one batch and makes one step.

    The optimizer gets the step as a closure, which every torch optimizer accepts and
    some need (L-BFGS and K-BFGS evaluate the loss more than once).

    Args:
        training: The run.

    Returns:
        The loss of the batch before the update.
    """
    batch = training.next_batch()

    def closure() -> Tensor:
        training.optimizer.zero_grad()
        loss = training.task.loss(training.model, batch)
        loss.backward()
        return loss

    step: Callable[..., Any] = training.optimizer.step  # torch declares the loss a float
    loss = step(closure)
    training.scheduler.step()
    return float(loss.detach())


def evaluate(training: Training) -> float:
    """Returns the test metric, with the model in evaluation mode for that time only."""
    training.model.eval()
    with torch.no_grad():
        metric = float(training.task.evaluate(training.model))
    training.model.train()
    return metric
