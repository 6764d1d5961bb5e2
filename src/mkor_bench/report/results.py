"""``results.json``: everything that was asked for, measured and concluded."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from mkor_bench.files import write_atomically
from mkor_bench.optimizers import optimizer_row
from mkor_bench.report.machine import describe_machine, versions
from mkor_bench.summary import OptimizerResult, TaskResult, final_loss
from mkor_bench.train import SCHEDULE, Run

FILE_NAME = "results.json"
FORMAT = 1
"""Grows when a reader of older files would misread a newer one."""


@dataclass(frozen=True)
class Conditions:
    """How the results came about.

    Attributes:
        command: The command line.
        seeds: The seeds of the runs.
        threads: torch threads of a run.
        time: What the seconds are: processor time or wall time.
        workers: How many runs ran side by side.
        tuning_seed: The seed of the runs on the grid, if there was one.
    """

    command: str
    seeds: tuple[int, ...]
    threads: int
    time: str
    workers: int
    tuning_seed: int | None = None


def write_results(folder: Path, results: Sequence[TaskResult], conditions: Conditions) -> None:
    """Writes ``results.json``.

    Args:
        folder: The output folder.
        results: One result a task.
        conditions: How they came about.
    """
    content = {
        "format": FORMAT,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": conditions.command,
        "machine": describe_machine(),
        "versions": versions(),
        "threads": conditions.threads,
        "time": conditions.time,
        "workers": conditions.workers,
        "seeds": list(conditions.seeds),
        "tuning_seed": conditions.tuning_seed,
        "schedule": SCHEDULE,
        "tasks": {result.task.name: _task(result) for result in results},
    }
    text = to_json(content)
    write_atomically(folder / FILE_NAME, lambda path: path.write_text(text, encoding="utf-8"))


def to_json(content: Any) -> str:
    """Writes JSON that people and every parser can read.

    Args:
        content: Dicts, lists, numbers, texts.

    Returns:
        Indented text with each list of numbers on one line; JSON has no infinity and
        no NaN, so both become null.
    """
    text = json.dumps(_finite(content), indent=2, ensure_ascii=False, allow_nan=False)
    # Line breaks are between JSON's values, never within its texts.
    numbers = re.compile(r"\[\n([^\[\]{}\"]*)\]")
    return numbers.sub(lambda found: f"[{' '.join(found[1].split())}]", text) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _task(result: TaskResult) -> dict[str, Any]:
    target = result.target
    return {
        "description": result.task.description,
        "steps": result.steps,
        "metric": result.task.metric,
        "higher_is_better": result.task.higher_is_better,
        "best_first_order": None
        if target is None
        else {"optimizer": target.optimizer, "final_loss": target.final_loss[0]},
        "optimizers": {r.optimizer: _optimizer(result, r) for r in result.optimizers},
    }


def _optimizer(of_task: TaskResult, result: OptimizerResult) -> dict[str, Any]:
    reached = of_task.reach(result)
    return {
        "description": optimizer_row(result.optimizer).description,
        "lr": result.lr,
        "lr_at_edge_of_grid": result.lr_at_edge,
        "grid": [{"lr": lr, "final_loss": loss} for lr, loss in result.grid.items()],
        "finalists": [
            {"lr": lr, "final_loss": _mean_and_spread(result.final_loss_at(lr))}
            for lr in result.finalists
        ],
        "final_loss": _mean_and_spread(result.final_loss),
        "metric": _mean_and_spread(result.metric),
        "steps_to_best_first_order": reached[0] if reached else None,
        "seconds_to_best_first_order": round(reached[1], 4) if reached else None,
        "step_seconds": result.step_seconds,
        "step_time_relative_to_sgd": result.step_time_ratio,
        "runs": [_run(run) for run in result.runs],
    }


def _mean_and_spread(pair: tuple[float, float]) -> dict[str, float]:
    return {"mean": pair[0], "spread": pair[1]}


def _run(run: Run) -> dict[str, Any]:
    return {
        "seed": run.settings.seed,
        "diverged": run.diverged,
        "final_loss": final_loss(run),
        "metric": run.metric,
        "loss": run.losses,
        "seconds": [round(second, 6) for second in run.seconds],
    }
