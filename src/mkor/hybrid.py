"""MKOR-H: when the base optimizer takes over, decided on plain numbers.

The paper (section 3.2) hands over by the rate at which the loss falls and gives no formula. Here
the mean losses L₀, L₁, … of windows of steps are compared: fₖ = (Lₖ₋₁ − Lₖ)/|Lₖ₋₁| is the relative
fall and aₖ its moving average. Second-order updates pay while aₖ is above a part of the largest a
since they began, which is that of the first windows unless the learning rate still warmed up.

The rate alone can't tell what the base would have bought. With a trial the base works alone for a
few windows before it takes over, and does so only if its loss falls as much a second.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from mkor.checks import fraction, is_count, is_number, require

LATEST = 5
"""Windows whose times are kept; of an odd number a pause for validation is never the median."""


@dataclass(frozen=True)
class Course:
    """What is known of the phase that runs.

    Attributes:
        preconditioning: Whether gradients are preconditioned, else the base optimizer works alone.
        since: Number of steps before the phase.
        loss: Mean loss of the last window, None before the first.
        windows: Windows that were compared with the one before.
        sum: Moving sum of the relative falls, (1−s)·Σ sᵏ⁻ʲ·fⱼ; in a trial their plain sum.
        reference: Largest smoothed fall of the phase; of the base's, the loss at the hand-over.
        low: Number of windows in a row that speak for a switch.
        seconds: Time of the latest windows of the phase or trial.
        pace: Relative fall of the loss a second that the base has to reach in the trial that runs;
            None where none does.
        trials: Number of trials that the base has lost in this phase.
    """

    preconditioning: bool = True
    since: int = 0
    loss: float | None = None
    windows: int = 0
    sum: float = 0.0
    reference: float = 0.0
    low: int = 0
    seconds: tuple[float, ...] = ()
    pace: float | None = None
    trials: int = 0


@dataclass(frozen=True, kw_only=True)
class HybridSwitch:
    """Hands over to the base optimizer when second-order updates stop paying (MKOR-H).

    Passed as `hybrid=` to any method. The losses come from `optimizer.observe_loss(loss)` or from
    the closure of `step(closure)`. After the hand-over there are no hooks and no factors.

    Attributes:
        window: Steps whose losses are averaged; the device is waited for once a window.
        threshold: Part of the phase's largest smoothed relative fall of the loss, below which a
            window speaks for the switch.
        patience: Number of such windows in a row.
        smoothing: Weight of the old value in the moving average of the relative fall.
        warmup: Least number of steps in a phase.
        back: Relative rise of the loss above that at the hand-over, at which preconditioning
            starts again with new factors; None never goes back.
        at_step: Hands over after this number of steps, whatever the loss.
        trial: Windows in which the base works alone, the factors kept, before it takes over. It
            does so if the loss then falls at least as much a second as it did before; if not, the
            method goes on, and twice as many windows must speak for the next trial. None hands
            over without.
        clock: Returns seconds; read once a window, after its losses.

    Example:
        >>> optimizer = mkor.MKOR(model, base, hybrid=mkor.HybridSwitch(window=100))
        >>> loss.backward(); optimizer.observe_loss(loss); optimizer.step()
    """

    window: int = 50
    threshold: float = 0.1
    patience: int = 2
    smoothing: float = 0.5
    warmup: int = 0
    back: float | None = None
    at_step: int | None = None
    trial: int | None = None
    clock: Callable[[], float] = time.perf_counter

    def __post_init__(self) -> None:
        for name in ("window", "patience"):
            value = getattr(self, name)
            require(name, value, is_count(value, 1), "an integer of at least 1")
        require("warmup", self.warmup, is_count(self.warmup, 0), "an integer of at least 0")
        part = is_number(self.threshold) and fraction(self.threshold)
        require("threshold", self.threshold, part, "between 0 and 1, both excluded")
        smooth = is_number(self.smoothing) and 0 <= self.smoothing < 1
        require("smoothing", self.smoothing, smooth, "at least 0 and below 1")
        rises = self.back is None or (is_number(self.back) and self.back >= 0)
        require("back", self.back, rises, "at least 0 and finite, or None")
        fixed = self.at_step is None or is_count(self.at_step, 1)
        require("at_step", self.at_step, fixed, "an integer of at least 1, or None")
        tried = self.trial is None or is_count(self.trial, 2)
        require("trial", self.trial, tried, "an integer of at least 2, or None")
        for name in ("back", "trial"):
            if self.at_step is not None and getattr(self, name) is not None:
                raise ValueError(
                    f"at_step and {name} exclude each other: a fixed step looks at no loss"
                )
        if not callable(self.clock):
            raise TypeError(f"clock must be a function that returns seconds, got {self.clock!r}")

    def ended(self, course: Course) -> bool:
        """Whether no switch can follow, so that losses need not be seen."""
        return not course.preconditioning and self.back is None

    def arrive(self, course: Course, steps: int) -> Course:
        """The course after so many steps, by the fixed step alone."""
        if self.at_step is None or steps < self.at_step or not course.preconditioning:
            return course
        return replace(course, preconditioning=False, since=steps)

    def follow(self, course: Course, steps: int, loss: float, seconds: float = 0.0) -> Course:
        """The course after a window, which ended after `steps`, with its mean loss and time."""
        if course.pace is not None:
            return self.judge(course, course.pace, steps, loss, seconds)
        if course.loss is None:
            return replace(course, loss=loss)
        course = timed(self.compare(course, course.loss, loss), seconds)
        patience = self.patience * 2**course.trials
        if course.low < patience or steps - course.since < self.warmup:
            return course
        pace = self.smoothed(course) / statistics.median(course.seconds) if self.trial else 0.0
        if course.preconditioning and pace > 0:
            return replace(course, pace=pace, windows=0, sum=0.0, seconds=())
        return switched(course, steps, loss)

    def judge(self, course: Course, pace: float, steps: int, loss: float, seconds: float) -> Course:
        """The course after one more window of a trial.

        The fall to the trial's first window is half the method's: those from there on count.
        """
        before = loss if course.loss is None else course.loss
        fall = relative_fall(before, loss) if course.windows else 0.0
        course = replace(course, loss=loss, windows=course.windows + 1, sum=course.sum + fall)
        course = timed(course, seconds)
        if course.windows < (self.trial or 0):
            return course
        own = course.sum / (course.windows - 1) / statistics.median(course.seconds)
        if own >= pace:
            return switched(course, steps, loss)
        return Course(since=course.since, reference=course.reference, trials=course.trials + 1)

    def smoothed(self, course: Course) -> float:
        """The moving average of the relative falls."""
        return course.sum / (1 - self.smoothing**course.windows)

    def compare(self, course: Course, before: float, loss: float) -> Course:
        """The course with one more window in it, before any switch."""
        total = self.smoothing * course.sum
        total += (1 - self.smoothing) * relative_fall(before, loss)
        course = replace(course, loss=loss, windows=course.windows + 1, sum=total)
        if course.preconditioning:
            smooth = self.smoothed(course)
            reference = max(course.reference, smooth)
            speaks = smooth <= self.threshold * reference
        else:
            reference = course.reference
            rise = loss - reference
            speaks = self.back is not None and rise > self.back * abs(reference)
        low = course.low + 1 if speaks else 0
        return replace(course, reference=reference, low=low)


def relative_fall(before: float, loss: float) -> float:
    """(before − loss)/|before|."""
    return (before - loss) / max(abs(before), sys.float_info.min)


def timed(course: Course, seconds: float) -> Course:
    """The course with the time of one more window; one below the clock's steps counts as one."""
    latest = (*course.seconds, max(seconds, sys.float_info.min))[-LATEST:]
    return replace(course, seconds=latest)


def switched(course: Course, steps: int, loss: float) -> Course:
    """The other phase, which begins now."""
    handing_over = course.preconditioning
    return Course(not handing_over, steps, loss, reference=loss if handing_over else 0.0)
