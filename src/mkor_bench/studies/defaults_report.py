"""The report of the study of defaults: tables in JSON and Markdown, and the curves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mkor_bench.files import write_atomically
from mkor_bench.report.curves import FILE_NAME as CURVES_NAME
from mkor_bench.report.curves import write_curves
from mkor_bench.report.results import to_json
from mkor_bench.report.table import number
from mkor_bench.studies.conditions import conditions
from mkor_bench.studies.outcome import TaskOutcome, median
from mkor_bench.studies.study import Report, Request
from mkor_bench.summary import OptimizerResult, final_loss

JSON_NAME, TABLE_NAME = "defaults.json", "defaults.md"


def write_report(
    asked: Request,
    outcomes: Sequence[TaskOutcome],
    held_out: Sequence[str],
    records: Sequence[Mapping[str, Any]],
    folder: Path,
) -> Report:
    """Writes ``defaults.json``, ``defaults.md`` and ``curves.png``.

    Args:
        asked: What was done.
        outcomes: One for each task.
        held_out: The names of tasks that are reported apart.
        records: The results as they are kept, each with its machine and versions.
        folder: The output folder.

    Returns:
        The files, and the tables for the terminal.
    """
    choice = [outcome for outcome in outcomes if outcome.name not in held_out]
    apart = [outcome for outcome in outcomes if outcome.name in held_out]
    groups = {"choice": choice, "held_out": apart}
    content = {
        "study": "defaults",
        **conditions(asked, records),
        "medians": {
            group: {name: _medians(name, part) for name in asked.optimizers}
            for group, part in groups.items()
        },
        "tasks": {outcome.name: _task(outcome, held_out) for outcome in outcomes},
    }
    tables = [_summary(asked, group, part) for group, part in groups.items() if part]
    tables += [_task_table(outcome) for outcome in outcomes]
    text = "\n\n".join([f"# Defaults\n\n{_told(content)}", *tables]) + "\n"
    _write(folder / JSON_NAME, to_json(content))
    _write(folder / TABLE_NAME, text)
    write_curves(folder, [outcome.result for outcome in outcomes])
    return Report((JSON_NAME, TABLE_NAME, CURVES_NAME), tuple(tables))


def _medians(name: str, outcomes: Sequence[TaskOutcome]) -> dict[str, Any]:
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


def _task(outcome: TaskOutcome, held_out: Sequence[str]) -> dict[str, Any]:
    target = outcome.result.target
    return {
        "held_out": outcome.name in held_out,
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


def _summary(asked: Request, group: str, outcomes: Sequence[TaskOutcome]) -> str:
    lines = [
        "| optimizer | tasks | target reached | fewer steps | less time | step time "
        "| behind its base |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name in asked.optimizers:
        row = _medians(name, outcomes)
        if row["tasks"]:
            behind = ", ".join(row["behind_base"]) or "–"
            figures = [_times(row[key]) for key in ("step_gain", "time_gain", "step_time")]
            cells = [f"`{name}`", row["tasks"], row["reached"], *figures, behind]
            lines.append(_row(cells))
    title = "Tasks to choose by" if group == "choice" else "Tasks held out"
    return "\n".join([f"## {title}: medians", "", *lines])


def _task_table(outcome: TaskOutcome) -> str:
    target = outcome.result.target
    told = (
        "No first-order optimizer came to an end, so there is no target."
        if target is None
        else f"Target: {number(target.final_loss[0])}, the final loss of `{target.optimizer}`."
    )
    metric = outcome.result.task.metric
    lines = [
        f"| optimizer | rate | final loss | {metric} | steps to target | seconds to it "
        "| fewer steps | less time | step time |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for result in outcome.result.optimizers:
        cells = [
            f"`{outcome.chosen.get(result.optimizer, result.optimizer)}`",
            "–" if result.lr is None else f"{result.lr:g}",
            _mean_and_spread(*result.final_loss),
            _mean_and_spread(*result.metric),
            outcome.steps_to_target(result) or "–",
            _optional(outcome.seconds_to_target(result)),
            _times(outcome.step_gain(result)),
            _times(outcome.time_gain(result)),
            _times(result.step_time_ratio),
        ]
        lines.append(_row(cells))
    return "\n".join([f"## {outcome.name}, {outcome.result.steps} steps", "", told, "", *lines])


def _told(content: Mapping[str, Any]) -> str:
    quick = (
        "At the quick size, which shows that it works and nothing else. "
        if content["quick"]
        else ""
    )
    machines = "; ".join(sorted({str(machine["cpu"]) for machine in content["machines"]}))
    torch = ", ".join(sorted({str(v["torch"]) for v in content["versions"]}))
    mixed = (
        f" The library changed meanwhile: results are from {len(content['sources'])} states of it."
        if len(content["sources"]) > 1
        else ""
    )
    return (
        f"{quick}{content['seeds']} seeds a result, tuned with one more; {content['schedule']}; "
        f"one thread a run, processor time. Gains are relative to the optimizer that sets the "
        f"target; 0 where the target is not reached. {content['pieces']} pieces, "
        f"{content['processor_hours']:g} hours of {machines}, torch {torch}.{mixed}"
    )


def _row(cells: Sequence[object]) -> str:
    return f"| {' | '.join(str(cell) for cell in cells)} |"


def _times(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.2f}"


def _optional(value: float | None) -> str:
    return "–" if value is None or math.isnan(value) else f"{value:.2f}"


def _mean_and_spread(mean: float, spread: float) -> str:
    if not math.isfinite(mean):
        return "diverged" if math.isinf(mean) else "–"
    return f"{number(mean)} ± {number(spread)}" if spread > 0 else number(mean)


def _write(path: Path, text: str) -> None:
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))
