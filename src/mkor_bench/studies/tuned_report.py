"""The report of tuned optimizers on tasks: medians over the tasks, a table a task, the curves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mkor_bench.report.curves import FILE_NAME as CURVES_NAME
from mkor_bench.report.curves import write_curves
from mkor_bench.report.section import Figure, Section, Table
from mkor_bench.report.table import number
from mkor_bench.studies.finding import conclude
from mkor_bench.studies.kept import Kept
from mkor_bench.studies.outcome import TaskOutcome, median
from mkor_bench.studies.study import Report, Request
from mkor_bench.summary import OptimizerResult, final_loss

Groups = Mapping[str, Sequence[TaskOutcome]]
CAPTIONS = {"choice": "Medians over the tasks", "held_out": "Medians over the tasks held out"}


def conclude_tuned(
    asked: Request, kept: Kept, folder: Path, section: Section, groups: Groups
) -> Report:
    """Writes a section with the tables and the curves of tuned optimizers.

    Args:
        asked: What was done.
        kept: The results.
        folder: The output folder.
        section: What was found; the tables and the figure are added to it.
        groups: The tasks, "choice" and "held_out".

    Returns:
        The report.
    """
    outcomes = [outcome for group in groups.values() for outcome in group]
    tables = [_summary(asked, CAPTIONS[key], group) for key, group in groups.items() if group]
    tables += [_task_table(outcome) for outcome in outcomes]
    write_curves(folder, [outcome.result for outcome in outcomes])
    told = "Training loss by step and by second of each tuned optimizer, one row a task"
    whole = replace(
        section,
        tables=(*section.tables, *tables),
        figures=(*section.figures, Figure(CURVES_NAME, told)),
    )
    data = {
        "medians": {
            group: {name: medians_of(name, part) for name in asked.optimizers}
            for group, part in groups.items()
        },
        "tasks": {
            outcome.name: {"held_out": group == "held_out", **_task(outcome)}
            for group, part in groups.items()
            for outcome in part
        },
    }
    return conclude(asked, kept, folder, whole, data)


def medians_of(name: str, outcomes: Sequence[TaskOutcome]) -> dict[str, Any]:
    """Returns an optimizer's medians over tasks.

    Args:
        name: Of the optimizer.
        outcomes: Of the tasks.

    Returns:
        How many tasks have it, how many times it reached the target, the median gains of steps
        and time over the best first-order optimizer (0 where it did not reach it, NaN where
        nothing is known), the median time of a step over SGD's, and the tasks where it ended
        behind its base.
    """
    known = [(outcome, outcome.of(name)) for outcome in outcomes]
    there = [(outcome, result) for outcome, result in known if result is not None]
    return {
        "tasks": len(there),
        "reached": sum(outcome.steps_to_target(result) is not None for outcome, result in there),
        "step_gain": median([outcome.step_gain(result) for outcome, result in there]),
        "time_gain": median([outcome.time_gain(result) for outcome, result in there]),
        "step_time": median([result.step_time_ratio for _, result in there]),
        "behind_base": [o.name for o, result in there if o.behind_base(result)],
    }


def _task(outcome: TaskOutcome) -> dict[str, Any]:
    target = outcome.result.target
    return {
        "steps": outcome.result.steps,
        "metric": outcome.result.task.metric,
        "higher_is_better": outcome.result.task.higher_is_better,
        "target": None
        if target is None
        else {"optimizer": target.optimizer, "final_loss": target.final_loss[0]},
        "sgd_step_seconds": outcome.sgd_step_seconds,
        "optimizers": {
            result.optimizer: _optimizer(outcome, result) for result in outcome.result.optimizers
        },
    }


def _optimizer(outcome: TaskOutcome, result: OptimizerResult) -> dict[str, Any]:
    return {
        "chosen": outcome.chosen.get(result.optimizer),
        "lr": result.lr,
        "grid": [{"lr": lr, "final_loss": loss} for lr, loss in result.grid.items()],
        "final_loss": dict(zip(("mean", "spread"), result.final_loss, strict=True)),
        "final_losses": [final_loss(run) for run in result.runs],
        "metric": dict(zip(("mean", "spread"), result.metric, strict=True)),
        "metrics": [run.metric for run in result.runs],
        "steps_to_target": outcome.steps_to_target(result),
        "seconds_to_target": outcome.seconds_to_target(result),
        "step_gain": outcome.step_gain(result),
        "time_gain": outcome.time_gain(result),
        "step_time_relative_to_sgd": result.step_time_ratio,
        "behind_base": outcome.behind_base(result),
    }


def _summary(asked: Request, caption: str, outcomes: Sequence[TaskOutcome]) -> Table:
    columns = ("optimizer", "tasks", "target reached", "fewer steps", "less time", "step time")
    rows = []
    for name in asked.optimizers:
        row = medians_of(name, outcomes)
        gains = (_known(row[key]) for key in ("step_gain", "time_gain", "step_time"))
        behind = ", ".join(row["behind_base"]) or None
        if row["tasks"]:
            rows.append((name, row["tasks"], row["reached"], *gains, behind))
    told = "gains over the optimizer that sets the target, 0 where it is not reached"
    return Table(f"{caption}; {told}", (*columns, "behind its base"), tuple(rows))


def _task_table(outcome: TaskOutcome) -> Table:
    target = outcome.result.target
    told = (
        "no first-order optimizer came to an end, so there is no target"
        if target is None
        else f"target {number(target.final_loss[0])}, the final loss of {target.optimizer}"
    )
    metric = outcome.result.task.metric
    columns = (
        *("optimizer", "rate", "final loss", "± loss", metric, "± metric"),
        *("steps to target", "seconds to it", "fewer steps", "less time", "step time"),
    )
    rows = tuple(_task_row(outcome, result) for result in outcome.result.optimizers)
    return Table(f"{outcome.name}, {outcome.result.steps} steps; {told}", columns, rows)


def _task_row(outcome: TaskOutcome, result: OptimizerResult) -> tuple[Any, ...]:
    loss, spread = result.final_loss
    seconds = outcome.seconds_to_target(result)
    return (
        outcome.chosen.get(result.optimizer, result.optimizer),
        result.lr,
        "diverged" if math.isinf(loss) else loss,
        *map(_known, (spread, *result.metric)),
        outcome.steps_to_target(result),
        None if seconds is None else _known(seconds),
        *map(_known, (outcome.step_gain(result), outcome.time_gain(result))),
        _known(result.step_time_ratio),
    )


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None
