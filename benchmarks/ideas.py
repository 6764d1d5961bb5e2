"""Schedules of `mkor.auto`'s options that might pay, beside its constants.

    MKOR_DATA=FOLDER python benchmarks/ideas.py           # prints and stores

Every idea trains with the learning rate, the seeds and the target that `mkor study defaults` found
for the constants (`benchmarks/results/study/defaults.json`).
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from record import save
from torch.optim.lr_scheduler import LambdaLR

import mkor
from mkor_bench.summary import OptimizerResult
from mkor_bench.tasks.source import TaskSource
from mkor_bench.train import Settings, Training, train, warmup_cosine

STUDY = Path(__file__).parent / "results" / "study" / "defaults.json"


def falling(start: float, end: float, steps: int) -> Callable[[int], float]:
    """From `start` to `end` by a constant factor a step over `steps` steps."""
    return lambda step: end * (start / end) ** max(0.0, 1 - step / steps)


def changed(early: int, late: int, at: float) -> Callable[[int], int]:
    """`early` before step `at`, and `late` from there on."""
    return lambda step: early if step < at else late


IDEAS: Mapping[str, Callable[[int], dict[str, Any]]] = {
    "constants (taken)": lambda steps: {},
    "damping falls from 0.1": lambda steps: {"damping": falling(0.1, 0.003, steps // 5)},
    "damping falls to 0.001": lambda steps: {"damping": falling(0.01, 0.001, steps)},
    "damping rises to 0.01": lambda steps: {"damping": falling(0.001, 0.01, steps)},
    "every step, then 10": lambda steps: {"factor_update_steps": changed(1, 10, 0.2 * steps)},
    "every 10, then 2": lambda steps: {"factor_update_steps": changed(10, 2, 0.5 * steps)},
    "vectors 64": lambda steps: {"vectors": 64},
    "vectors 64, rank 80": lambda steps: {"vectors": 64, "rank": 80},
}


def run(name: str, idea: str, lr: float, target: float, seeds: int) -> dict[str, Any]:
    """Trainings with an idea."""
    task = TaskSource(name, os.environ.get("MKOR_DATA")).load()
    options = IDEAS[idea](task.steps)
    found = []
    for seed in range(seeds):
        training = Training(task, Settings("auto", lr, seed, task.steps))
        usual: Any = training.optimizer
        usual.close()
        training.optimizer = mkor.auto(training.model, lr, **options)
        training.scheduler = LambdaLR(training.optimizer, warmup_cosine(task.steps))
        found.append(train(training))
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
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/ideas.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    if arguments.output.exists():
        results = json.loads(arguments.output.read_text())["results"]
    for task in arguments.tasks.split(","):
        lr, target = study[task]["optimizers"]["auto"]["lr"], study[task]["target"]["final_loss"]
        for idea in IDEAS:
            found = run(task, idea, lr, target, arguments.seeds)
            results.setdefault(task, {})[idea] = {"lr": lr, "seeds": arguments.seeds, **found}
            print(f"{task:<20} {idea:<24} {found}", flush=True)
            save(arguments.output, results)


if __name__ == "__main__":
    main()
