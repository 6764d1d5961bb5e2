"""Measures a step: its time by stage, the numbers that it sends, its peak memory.

The stages of a step are those of the paper's figure 3:

| stage | what |
| ----- | ---- |
| passes | forward and backward, with what hooks add to them in steps that update factors |
| update | factors and their inversion |
| precondition | the gradient by the factors, and its rescaling |
| weights | everything else of the step: the base optimizer |
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mkor.messages import Owned
from mkor.schedule import UpdateSchedule
from mkor_bench.memory import held_bytes, peak_bytes
from mkor_bench.optimizers import optimizer_row, settled_options
from mkor_bench.studies.workloads import Workload
from mkor_bench.train import clock

STAGES = ("passes", "update", "precondition", "weights")
NUMBER = 1000
"""Of the step that is measured: after every warm-up, where intervals that divide it are over."""

ALWAYS, NEVER = UpdateSchedule(1, 0), UpdateSchedule(NUMBER + 1, 0)

_LR = 1e-6
"""Does not change the work of a step, and nothing diverges."""


class Trainee:
    """A model that trains on one batch, its optimizer watched by stage.

    It is the only part of the command that looks behind the public face of ``mkor``: stages have
    no other clock.

    Args:
        make: Makes the model and its loss.
        optimizer: Its name, which may carry options.
    """

    def __init__(self, make: Workload, optimizer: str) -> None:
        torch.manual_seed(0)
        self.model, self.loss = make()
        self.optimizer: Any = optimizer_row(optimizer).build(self.model, _LR)
        self.spent = dict.fromkeys(STAGES, 0.0)
        self.sent = 0
        self._now, _ = clock()
        self.engine = engine = getattr(self.optimizer, "_engine", None)
        if engine is not None:
            for name in ("update", "revisit"):
                setattr(engine, name, self._timed("update", getattr(engine, name)))
            engine.precondition = self._timed("precondition", engine.precondition)
            engine.answer = self._counted(engine.answer)
        self.step(updates=True)  # allocates the state

    def step(self, *, updates: bool) -> float:
        """Makes a step.

        Args:
            updates: Whether it updates the factors, and inverts them where that is due.

        Returns:
            Its seconds, of which ``spent`` tells the stages.
        """
        if self.engine is not None:
            self.engine.schedule = ALWAYS if updates else NEVER
            self.engine.index = NUMBER
            self.engine.listen()
        self.spent = dict.fromkeys(STAGES, 0.0)
        self.sent = 0
        begin = self._now()
        self.optimizer.step(self._timed("passes", self._closure))
        total = self._now() - begin
        self.spent["weights"] = total - sum(self.spent.values())
        return total

    def peak_bytes(self) -> int:
        """Returns the most bytes held at a time in a step, the state's and weights' too."""
        self.optimizer.zero_grad()
        held = held_bytes(self.optimizer)
        kinds = (True, False)
        return max(peak_bytes(partial(self.step, updates=updates), held) for updates in kinds)

    def _closure(self) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.loss()
        loss.backward()
        return loss

    def _timed(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            begin = self._now()
            try:
                return function(*arguments)
            finally:
                self.spent[stage] += self._now() - begin

        return call

    def _counted(self, answer: Callable[[Mapping[str, Any]], Any]) -> Callable[..., Any]:
        def call(messages: Mapping[str, Any]) -> Any:
            for message in messages.values():
                if not isinstance(message, Owned):
                    parts = (message.sum.values(), message.mean.values(), message.gather.values())
                    self.sent += sum(tensor.numel() for part in parts for tensor in part)
            return answer(messages)

        return call


def interval(optimizer: str) -> int:
    """Returns every how many steps an optimizer updates its factors, 1 if it has none."""
    return int(settled_options(optimizer).get("factor_update_steps", 1))


def median_stages(records: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns the median of each stage over steps, in seconds, and of their sum as "total"."""
    out = {stage: statistics.median(record[stage] for record in records) for stage in STAGES}
    total = statistics.median(sum(record.values()) for record in records)
    return {**out, "total": total}
