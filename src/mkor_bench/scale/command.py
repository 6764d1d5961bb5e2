"""What ``mkor estimate`` does: predicts, prints a table, draws a figure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from torch import nn

import mkor
from mkor_bench.errors import UserError
from mkor_bench.report.chart import COLOURS, finish, new_figure, save_figure
from mkor_bench.scale.bert import bert_large
from mkor_bench.scale.model import Machine, Step, predict

MKOR: dict[str, Any] = {"factor_update_steps": 10}
METHODS: dict[str, tuple[Any, dict[str, Any]]] = {
    "LAMB": (None, {}),
    "MKOR": (mkor.MKOR, MKOR),
    "MKOR, window": (mkor.MKOR, {**MKOR, "representation": "window"}),
    "Eva": (mkor.Eva, {}),
    "K-FAC": (
        mkor.KFAC,
        {"solver": "inverse", "factor_update_steps": 50, "inverse_update_steps": 50},
    ),
}
"""The methods of the paper's figure 9, updating as often as its appendix says."""


@dataclass(frozen=True)
class Plan:
    """What is trained on what.

    Attributes:
        machine: Workers and network.
        batch: Sequences of a step, of all workers together.
        sequence: Tokens of one.
    """

    machine: Machine
    batch: int
    sequence: int

    def step(self, model: nn.Module, name: str, workers: int) -> Step:
        """A step of a method on a number of workers."""
        rows = math.ceil(self.batch / workers) * self.sequence
        cls, options = METHODS[name]
        found = mkor.estimate(model, cls, rows=rows, workers=workers, **options) if cls else None
        weights = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
        # A forward pass takes two operations a weight and token, a backward pass twice as many.
        flops = 6.0 * weights * rows
        size = 4 * sum(parameter.numel() for parameter in model.parameters())
        return predict(self.machine, workers, flops, size, found)


def run_estimate(
    *,
    workers: str,
    bandwidth: float,
    latency: float,
    rate: float,
    batch: int,
    sequence: int,
    output: Path | None,
) -> None:
    """Predicts the step of every method on every number of workers.

    Args:
        workers: Numbers of workers, separated by commas.
        bandwidth: Of a worker, in GB/s.
        latency: Of a message, in microseconds.
        rate: Operations a second of a worker, in TFLOP/s.
        batch: Sequences of a step, of all workers together.
        sequence: Tokens of one.
        output: The figure, if one is wanted.

    Raises:
        UserError: A number is out of range.
    """
    numbers = counts_of(workers)
    for option, value in {
        "--bandwidth": bandwidth,
        "--latency": latency,
        "--flops": rate,
        "--batch": batch,
        "--sequence": sequence,
    }.items():
        if not (math.isfinite(value) and value > 0):
            raise UserError(f"{option} must be a positive number, got {value}.")
    plan = Plan(Machine(rate * 1e12, bandwidth * 1e9, latency * 1e-6), batch, sequence)
    model = bert_large()
    steps = {name: [plan.step(model, name, p) for p in numbers] for name in METHODS}
    for line in table(numbers, steps):
        typer.echo(line)
    if output is not None:
        draw(output, numbers, steps)
        typer.echo(f"wrote {output}")


def counts_of(text: str) -> list[int]:
    """Numbers of workers as typed, in order."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or not all(word.isdecimal() and int(word) for word in words):
        raise UserError(f"--workers {text!r} must be whole numbers such as 1,8,64.")
    return sorted({int(word) for word in words})


def table(numbers: Sequence[int], steps: dict[str, list[Step]]) -> list[str]:
    """Milliseconds of a step by method and workers, and what the method adds to the base's."""
    lines = [
        f"{'workers':>7}  {'method':<12} {'step ms':>9} {'work ms':>9} {'wire ms':>9} {'x':>6}"
    ]
    for place, workers in enumerate(numbers):
        base = steps["LAMB"][place].total
        for name, own in steps.items():
            step = own[place]
            times = f"{1e3 * step.total:>9.1f} {1e3 * step.method:>9.1f} {1e3 * step.wire:>9.2f}"
            lines.append(f"{workers:>7}  {name:<12} {times} {step.total / base:>6.2f}")
    return lines


def draw(path: Path, numbers: Sequence[int], steps: dict[str, list[Step]]) -> None:
    """The speed-up over LAMB on the least number of workers, by workers."""
    figure, ((axes,),) = new_figure(1, 1, width=7, height=5)
    start = steps["LAMB"][0].total
    for (name, own), colour in zip(steps.items(), COLOURS, strict=False):
        axes.loglog(numbers, [start / s.total for s in own], "o-", color=colour, label=name)
    ideal = [number / numbers[0] for number in numbers]
    axes.loglog(numbers, ideal, ":", color="grey", label="without a network")
    told = f"steps a second, over LAMB's on {numbers[0]}"
    finish(axes, "BERT-Large, predicted", "workers", told)
    save_figure(path, figure)
