"""What ``mkor estimate`` does: predicts, prints a table, draws a figure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import typer
from torch import nn

import mkor
from mkor.estimate import MOST_WORKERS
from mkor_bench.errors import UserError, unknown_name
from mkor_bench.options import parse_names
from mkor_bench.report.chart import COLOURS, check_figure, finish, new_figure, save_figure
from mkor_bench.scale.bert import MODELS, Size, encoder
from mkor_bench.scale.model import Machine, Step, predict


class Row(NamedTuple):
    """A method as it is estimated.

    Attributes:
        name: On the command line.
        cls: The optimizer's class; None for LAMB alone.
        options: Of the optimizer.
    """

    name: str
    cls: Any
    options: dict[str, Any]


MKOR: dict[str, Any] = {"factor_update_steps": 10}
KFAC: dict[str, Any] = {"factor_update_steps": 50, "inverse_update_steps": 50}
SKETCHES = {"representation": "lowrank", "statistic": "sketch", "vectors": 16, "rank": 20}
METHODS = {
    "LAMB": Row("lamb", None, {}),
    "MKOR": Row("mkor", mkor.MKOR, MKOR),
    "MKOR, window": Row("mkor-window", mkor.MKOR, {**MKOR, "representation": "window"}),
    "Eva": Row("eva", mkor.Eva, {}),
    "K-FAC": Row("kfac", mkor.KFAC, {**KFAC, "solver": "inverse"}),
    "MKOR, sketches": Row("mkor-lowrank", mkor.MKOR, {**MKOR, **SKETCHES}),
    "K-FAC, eigen": Row("kaisa-eigen", mkor.KFAC, {**KFAC, "solver": "eigen"}),
    "K-BFGS": Row("kbfgs", mkor.KBFGS, MKOR),
    "HyLo": Row("hylo-kid", mkor.HyLo, MKOR),
    "SNGD": Row("sngd", mkor.SNGD, MKOR),
}
"""The methods by their titles, updating as often as the appendix of the paper says."""

FIGURE_9 = tuple(METHODS)[:5]
"""Those of the paper's figure, and the window."""

NAMES = {row.name: title for title, row in METHODS.items() if row.cls is not None}
"""Titles by the names on the command line; LAMB, which all are compared with, is always there."""


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
        _, cls, options = METHODS[name]
        found = mkor.estimate(model, cls, rows=rows, workers=workers, **options) if cls else None
        weights = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
        # A forward pass takes two operations a weight and token, a backward pass twice as many.
        flops = 6.0 * weights * rows
        size = 4 * sum(parameter.numel() for parameter in model.parameters())
        step = predict(self.machine, workers, flops, size, found)
        if found is None or cls is not mkor.KBFGS:
            return step
        again = sum(update.share for update in found.updates)  # it evaluates the batch once more
        return replace(step, method=step.method + again * step.model)


def run_estimate(
    *,
    model: str,
    methods: str,
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
        model: Name of the model.
        methods: Names of the methods beside LAMB, separated by commas.
        workers: Numbers of workers, separated by commas.
        bandwidth: Of a worker, in GB/s.
        latency: Of a message, in microseconds.
        rate: Operations a second of a worker, in TFLOP/s.
        batch: Sequences of a step, of all workers together.
        sequence: Tokens of one.
        output: The figure, if one is wanted.

    Raises:
        UserError: A name is unknown, a number is out of range, or no figure can be drawn there.
    """
    if model not in MODELS:
        raise unknown_name("model", model, MODELS)
    size, titles, numbers = MODELS[model], titles_of(methods), counts_of(workers)
    for option, value in {
        "--bandwidth": bandwidth,
        "--latency": latency,
        "--flops": rate,
        "--batch": batch,
        "--sequence": sequence,
    }.items():
        if not (math.isfinite(value) and value > 0):
            raise UserError(f"{option} must be a positive number, got {value}.")
    if output is not None:
        check_figure(output)
    plan = Plan(Machine(rate * 1e12, bandwidth * 1e9, latency * 1e-6), batch, sequence)
    shapes = encoder(size)
    steps = {name: [plan.step(shapes, name, p) for p in numbers] for name in titles}
    for line in table(numbers, steps):
        typer.echo(line)
    if output is not None:
        draw(output, size, numbers, steps)
        typer.echo(f"wrote {output}")


def titles_of(methods: str) -> list[str]:
    """LAMB, and methods as typed, by the names that tables use."""
    names = parse_names(methods, "--methods", "mkor,kfac")
    for name in names:
        if name not in NAMES:
            raise unknown_name("method", name, NAMES)
    return ["LAMB", *(NAMES[name] for name in names)]


def counts_of(text: str) -> list[int]:
    """Numbers of workers as typed, in order."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or not all(word.isdecimal() and int(word) for word in words):
        raise UserError(f"--workers {text!r} must be whole numbers above 0, such as 1,8,64.")
    numbers = sorted({int(word) for word in words})
    if numbers[-1] > MOST_WORKERS:
        raise UserError(f"--workers must be at most {MOST_WORKERS}, got {numbers[-1]}.")
    return numbers


def table(numbers: Sequence[int], steps: Mapping[str, list[Step]]) -> list[str]:
    """Milliseconds of a step by method and workers, and what the method adds to the base's."""
    lines = [
        f"{'workers':>7}  {'method':<14} {'step ms':>9} {'work ms':>9} {'wire ms':>9} {'x':>6}"
    ]
    for place, workers in enumerate(numbers):
        base = steps["LAMB"][place].total
        for name, own in steps.items():
            step = own[place]
            spent = (step.total, step.method, step.wire)
            times = " ".join(map(milliseconds, spent, (1, 1, 2)))
            lines.append(f"{workers:>7}  {name:<14} {times} {step.total / base:>6.2f}")
    return lines


def milliseconds(seconds: float, digits: int) -> str:
    """A time in a column of nine characters."""
    time = 1e3 * seconds
    return f"{time:>9.{digits}f}" if time < 1e6 else f"{time:>9.2e}"


def draw(path: Path, size: Size, numbers: Sequence[int], steps: Mapping[str, list[Step]]) -> None:
    """The speed-up over LAMB on the least number of workers, by workers."""
    figure, ((axes,),) = new_figure(1, 1, width=7, height=5)
    start = steps["LAMB"][0].total
    for (name, own), colour in zip(steps.items(), COLOURS, strict=False):
        axes.loglog(numbers, [start / s.total for s in own], "o-", color=colour, label=name)
    ideal = [number / numbers[0] for number in numbers]
    axes.loglog(numbers, ideal, ":", color="grey", label="without a network")
    told = f"steps a second, over LAMB's on {numbers[0]}"
    finish(axes, f"{size.title}, predicted", "workers", told)
    save_figure(path, figure)
