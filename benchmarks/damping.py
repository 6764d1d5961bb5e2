"""Dampings that a layer finds by its own spectrum, against one damping for all, in mkor.auto.

    MKOR_DATA=... python benchmarks/damping.py
    MKOR_DATA=... python benchmarks/damping.py --tasks shakespeare --rules fixed,noise

λ are the eigenvalues that are kept of a side's covariance in parts of its trace, d is the side, k
their number. What they leave, 1 - Σλ, is spread over d - k directions: "noise" takes that level for
the damping, as probabilistic PCA does, above a least one. Three seeds at one learning rate a task,
the rate that is best with the fixed damping in the study of defaults; the final loss, and the steps
to the final loss of AdamW in that study.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from record import save
from torch import Tensor

from mkor.factors.lowrank import LowRank
from mkor_bench.summary import OptimizerResult
from mkor_bench.tasks.source import TaskSource
from mkor_bench.train import Settings, Training, train

STUDY = Path(__file__).parent / "results" / "study" / "defaults.json"

Rule = Callable[[Tensor, int], Tensor]
"""The damping [G] of λ [G, k] and d."""


def fixed(value: float) -> Rule:
    """One for all."""
    return lambda values, side: torch.full_like(values[:, 0], value)


def noise(part: float, least: float) -> Rule:
    """A part of the mean of the eigenvalues that are not kept, above a least damping."""

    def rule(values: Tensor, side: int) -> Tensor:
        left = (1 - values.sum(dim=1)).clamp_min(0)
        return least + part * left / max(side - values.shape[1], 1)

    return rule


RULES: dict[str, Rule] = {
    "fixed": fixed(0.003),
    "noise": noise(1, 0.003),
    "noise above 0.001": noise(1, 0.001),
    "3 noise above 0.001": noise(3, 0.001),
    "median": lambda values, side: values.median(dim=1).values,
    "geometric mean": lambda values, side: values.clamp_min(1e-6).log().mean(dim=1).exp(),
    "0.01 sum of squares": lambda values, side: 0.01 * values.square().sum(dim=1),
}


def run(task_name: str, rule: Rule, lr: float, target: float, seeds: int) -> dict[str, Any]:
    """Trainings with a rule."""
    LowRank.level = lambda self, relative, side: rule(relative.square(), side)  # type: ignore
    task = TaskSource(task_name, os.environ.get("MKOR_DATA")).load()
    found = [train(Training(task, Settings("auto", lr, seed, task.steps))) for seed in range(seeds)]
    result = OptimizerResult("auto", {}, {lr: found})
    reached = result.reach(target)
    loss, spread = result.final_loss
    return {"final loss": loss, "spread": spread, "steps": reached and reached[0]}


def main() -> None:
    """Run, print, store."""
    study = json.loads(STUDY.read_text())["data"]["tasks"]
    usual = [name for name, task in study.items() if "auto" in task["optimizers"]]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", default=",".join(usual))
    parser.add_argument("--rules", default=",".join(RULES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/damping.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    if arguments.output.exists():
        results = json.loads(arguments.output.read_text())["results"]
    names = [name for name in RULES if name in arguments.rules.split(",")]
    for task in arguments.tasks.split(","):
        lr, target = study[task]["optimizers"]["auto"]["lr"], study[task]["target"]["final_loss"]
        for name in names:
            found = run(task, RULES[name], lr, target, arguments.seeds)
            results.setdefault(task, {})[name] = {"lr": lr, "seeds": arguments.seeds, **found}
            print(f"{task:<20} {name:<24} {found}", flush=True)
            save(arguments.output, results)


if __name__ == "__main__":
    main()
