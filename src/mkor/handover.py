"""Shows a hybrid switch the losses, and tells the optimizer when to change its phase."""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import Any, SupportsFloat

import torch

from mkor.hybrid import Course, HybridSwitch
from mkor.meter import Meter, Stopwatch
from mkor.warn import warn

LOG = logging.getLogger("mkor")


class Handover:
    """The losses of the window that runs and the course so far, under one rule.

    Attributes:
        meter: The losses of the window, those of steps that were taken.
        shown: The losses since the last step, which count once their step is taken: a loss scaler
            may skip it.
        stepped: Whether a step was taken since gradients were cleared last.
        settled: Whether the losses of the step that runs are known, which evaluates them again.
    """

    def __init__(self, rule: HybridSwitch) -> None:
        """Preconditioning, with no loss seen."""
        self.rule = rule
        self.warned = False
        self.meter, self.shown = (Meter("the loss", least=0.0) for _ in range(2))
        self.stepped = self.settled = False
        self.times = Meter("the time of a window")
        self.watch = Stopwatch(rule.clock)
        self.course = Course()

    @property
    def trying(self) -> bool:
        """Whether the base works alone on trial."""
        return self.course.pace is not None

    @property
    def idle(self) -> bool:
        """Whether no loss says anything any more."""
        return self.rule.at_step is not None or self.rule.ended(self.course)

    def observe(self, loss: SupportsFloat) -> None:
        """See a loss, without waiting for it."""
        if not self.idle and not self.settled:
            self.shown.add(loss)

    def settle(self, loss: SupportsFloat) -> None:
        """See the loss of a closure, unless losses were shown for the step that it is of."""
        if not self.idle and not self.shown.calls:
            self.shown.add(loss)
        self.meter.absorb(self.shown)
        self.settled = True

    def clear(self) -> None:
        """Gradients are cleared: losses that were shown without a step are those of a skipped one.

        After a step they stay, be they shown behind it or before the gradients that come.
        """
        if self.stepped:
            self.meter.absorb(self.shown)
        else:
            self.shown.clear()
        self.stepped = False

    def advance(self, steps: int, device: torch.device | None) -> bool:
        """End a step; whether the phase ended with it.

        Args:
            steps: Number of steps so far.
            device: Where workers exchange their losses.
        """
        before, self.stepped, self.settled = self.course, True, False
        if self.rule.ended(before):
            return False
        self.meter.absorb(self.shown)
        if self.rule.at_step is not None:
            self.course = self.rule.arrive(before, steps)
        elif steps % self.rule.window == 0:
            self.look(steps, device)
        changed = self.course.preconditioning != before.preconditioning
        if changed or self.trying != (before.pace is not None):
            self.log(before, steps)
        return changed

    def look(self, steps: int, device: torch.device | None) -> None:
        """Compare the window that ends with the one before."""
        shown = self.meter.calls
        loss = self.meter.take(device)
        seconds = self.time(device)
        if self.meter.left_out:
            LOG.warning("loss left out: step=%d losses=%d of=%d", steps, self.meter.left_out, shown)
        if loss is not None:
            self.course = self.rule.follow(self.course, steps, loss, seconds)
        elif self.course.loss is None and not self.course.trials and not self.warned:
            self.warned = True
            warn(missing(steps, shown))

    def time(self, device: torch.device | None) -> float:
        """The mean time of the window over all workers; 0 where no trial needs it.

        The losses of the window were read just before, so that the device has caught up.
        """
        if self.rule.trial is None:
            return 0.0
        self.times.add(self.watch.seconds())
        self.watch.start()
        return self.times.take(device) or 0.0

    def log(self, before: Course, steps: int) -> None:
        """One line for the log of the run."""
        phase = "preconditioning" if self.course.preconditioning else "base optimizer alone"
        phase = "base optimizer on trial" if self.trying else phase
        loss = "unseen" if self.course.loss is None else f"{self.course.loss:.6g}"
        LOG.info(
            "hybrid switch: phase=%s step=%d after=%d loss=%s",
            *(phase, steps, steps - before.since, loss),
        )

    def state_dict(self) -> dict[str, Any]:
        """The course and the window that runs, as plain numbers."""
        return {
            "course": {**asdict(self.course), "seconds": list(self.course.seconds)},
            "meter": self.meter.state_dict(),
            "shown": self.shown.state_dict(),
            "stepped": self.stepped,
            "seconds": self.watch.seconds() if self.rule.trial else 0.0,
        }

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Go on from what `state_dict` returned; from the start without."""
        known = state["course"] if state else {}
        self.course = Course(**{**known, "seconds": tuple(known.get("seconds", ()))})
        self.meter.clear()
        self.shown.clear()
        self.stepped = self.settled = False
        self.watch.start(state.get("seconds", 0.0) if state else 0.0)
        if state:
            self.meter.load_state_dict(state["meter"])
            self.shown.load_state_dict(state["shown"])
            self.stepped = state["stepped"]


def missing(steps: int, shown: int) -> str:
    """What to do about a first window without a loss to go by."""
    what = f"{shown} losses, none of them finite and at least 0," if shown else "no loss"
    return (
        f"the hybrid switch has seen {what} in {steps} steps, so that it can't hand over to the "
        "base optimizer: call observe_loss(loss) in every step, pass a closure to step(), or "
        "build HybridSwitch(at_step=...)"
    )
