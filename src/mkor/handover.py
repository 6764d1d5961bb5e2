"""Shows a hybrid switch the losses, and tells the optimizer when to change its phase."""

from __future__ import annotations

import logging
import warnings
from dataclasses import asdict
from typing import Any, SupportsFloat

import torch

from mkor.hybrid import Course, HybridSwitch
from mkor.meter import Meter

LOG = logging.getLogger("mkor")


class Handover:
    """The losses of the window that runs and the course so far, under one rule."""

    def __init__(self, rule: HybridSwitch) -> None:
        """Preconditioning, with no loss seen."""
        self.rule = rule
        self.warned = False
        self.meter = Meter("the loss")
        self.course = Course()

    def observe(self, loss: SupportsFloat) -> None:
        """See a loss, without waiting for it."""
        if self.rule.at_step is None and not self.rule.ended(self.course):
            self.meter.add(loss)

    def advance(self, steps: int, device: torch.device | None) -> bool:
        """End a step; whether the phase ended with it.

        Args:
            steps: Number of steps so far.
            device: Where workers exchange their losses.
        """
        before = self.course
        if self.rule.ended(before):
            return False
        if self.rule.at_step is not None:
            self.course = self.rule.arrive(before, steps)
        elif steps % self.rule.window == 0:
            self.look(steps, device)
        changed = self.course.preconditioning != before.preconditioning
        if changed:
            self.log(before)
        return changed

    def look(self, steps: int, device: torch.device | None) -> None:
        """Compare the window that ends with the one before."""
        silent = self.meter.calls == 0 and self.course.loss is None
        loss = self.meter.take(device)
        if loss is not None:
            self.course = self.rule.follow(self.course, steps, loss)
        elif silent and not self.warned:
            self.warned = True
            warnings.warn(
                f"the hybrid switch has seen no loss in {steps} steps, so that it can't hand over "
                "to the base optimizer: call observe_loss(loss) in every step, pass a closure to "
                "step(), or build HybridSwitch(at_step=...)",
                UserWarning,
                stacklevel=7,
            )

    def log(self, before: Course) -> None:
        """One line for the log of the run."""
        phase = "preconditioning" if self.course.preconditioning else "base optimizer alone"
        loss = "unseen" if self.course.loss is None else f"{self.course.loss:.6g}"
        LOG.info(
            "hybrid switch: phase=%s step=%d after=%d loss=%s",
            *(phase, self.course.since, self.course.since - before.since, loss),
        )

    def state_dict(self) -> dict[str, Any]:
        """The course and the window that runs, as plain numbers."""
        return {"course": asdict(self.course), "meter": self.meter.state_dict()}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Go on from what `state_dict` returned; from the start without."""
        self.course = Course(**state["course"]) if state else Course()
        self.meter.clear()
        if state:
            self.meter.load_state_dict(state["meter"])
