"""MKOR-H: when the base optimizer takes over, decided on plain numbers.

The paper (section 3.2) hands over by the rate at which the loss falls and gives no formula. Here
the mean losses L₀, L₁, … of windows of steps are compared: fₖ = (Lₖ₋₁ − Lₖ)/|Lₖ₋₁| is the relative
fall and aₖ its moving average. Second-order updates pay while aₖ is above a part of the largest a
since they began, which is that of the first windows unless the learning rate still warmed up.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

from mkor.checks import fraction, is_count, is_number, require


@dataclass(frozen=True)
class Course:
    """What is known of the phase that runs.

    Attributes:
        preconditioning: Whether gradients are preconditioned, else the base optimizer works alone.
        since: Number of steps before the phase.
        loss: Mean loss of the last window, None before the first.
        windows: Windows that were compared with the one before.
        sum: Moving sum of the relative falls, (1−s)·Σ sᵏ⁻ʲ·fⱼ.
        reference: Largest smoothed fall of the phase; of the base's, the loss at the hand-over.
        low: Number of windows in a row that speak for a switch.
    """

    preconditioning: bool = True
    since: int = 0
    loss: float | None = None
    windows: int = 0
    sum: float = 0.0
    reference: float = 0.0
    low: int = 0


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
        if self.at_step is not None and self.back is not None:
            raise ValueError("at_step and back exclude each other: a fixed step looks at no loss")

    def ended(self, course: Course) -> bool:
        """Whether no switch can follow, so that losses need not be seen."""
        return not course.preconditioning and self.back is None

    def arrive(self, course: Course, steps: int) -> Course:
        """The course after so many steps, by the fixed step alone."""
        if self.at_step is None or steps < self.at_step or not course.preconditioning:
            return course
        return replace(course, preconditioning=False, since=steps)

    def follow(self, course: Course, steps: int, loss: float) -> Course:
        """The course after a window with this mean loss, which ended after so many steps."""
        if course.loss is None:
            return replace(course, loss=loss)
        course = self.compare(course, course.loss, loss)
        if course.low < self.patience or steps - course.since < self.warmup:
            return course
        handing_over = course.preconditioning
        return Course(not handing_over, steps, loss, reference=loss if handing_over else 0.0)

    def compare(self, course: Course, before: float, loss: float) -> Course:
        """The course with one more window in it, before any switch."""
        fall = (before - loss) / max(abs(before), sys.float_info.min)
        total = self.smoothing * course.sum + (1 - self.smoothing) * fall
        windows = course.windows + 1
        if course.preconditioning:
            smooth = total / (1 - self.smoothing**windows)
            reference = max(course.reference, smooth)
            speaks = smooth <= self.threshold * reference
        else:
            reference = course.reference
            rise = loss - reference
            speaks = self.back is not None and rise > self.back * abs(reference)
        low = course.low + 1 if speaks else 0
        return replace(course, loss=loss, windows=windows, sum=total, reference=reference, low=low)
