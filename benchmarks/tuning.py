"""Dampings of the second-order methods on the digits tasks, by the rule that `mkor compare` uses.

    python benchmarks/tuning.py                 # all methods, prints and stores the final losses
    python benchmarks/tuning.py --methods eva

Every method runs with every damping of one grid at every learning rate of the task's, with the seed
that `mkor compare` tunes with, and in two forms: with the norm of the gradient kept ("norm"), and
with the step bounded by a KL clip ("clip"). The losses are those at the end of training. The row of
a method in `mkor_bench/optimizers.py` holds the damping with the lowest geometric mean over the
tasks, each at its best rate; docs/comparison.md tells which form it takes and why.
"""

from __future__ import annotations

import argparse
import json
import math
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from record import save

from mkor_bench import optimizers
from mkor_bench.compare import TUNING_SEED
from mkor_bench.summary import final_loss
from mkor_bench.tasks.source import TaskSource
from mkor_bench.train import Settings, Training, train

TASKS = ("digits-autoencoder", "digits-classifier")
GRID = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
METHODS = ("mkor", "kfac", "kaisa-eigen", "sngd", "hylo-kis", "hylo-kid", "eva", "kbfgs")
FORMS: dict[str, dict[str, Any]] = {
    "norm": {"rescale": "gradient", "kl_clip": None},
    "clip": {"rescale": None, "kl_clip": 0.001},
}


def run(job: tuple[str, str, str, float, float]) -> float:
    """Final loss of one run; infinite where it diverged."""
    task_name, name, form, damping, lr = job
    torch.set_num_threads(1)
    task = TaskSource(task_name).load()
    row = optimizers.OPTIMIZERS[name]
    build: Any = row.build
    options = {**build.keywords, **FORMS[form], "damping": damping}
    optimizers.OPTIMIZERS[name] = replace(row, build=type(build)(build.func, **options))
    loss = final_loss(train(Training(task, Settings(name, lr, TUNING_SEED, task.steps))))
    return loss if math.isfinite(loss) else math.inf


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--forms", default=",".join(FORMS))
    parser.add_argument("--dampings", default=",".join(map(str, GRID)))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/tuning.json"))
    arguments = parser.parse_args()
    dampings = [float(part) for part in arguments.dampings.split(",")]
    rates = {name: TaskSource(name).load().lrs for name in TASKS}
    results: dict[str, Any] = {}
    if arguments.output.exists():  # dampings that are run again replace those alone
        results = json.loads(arguments.output.read_text())["results"]
    with ProcessPoolExecutor(arguments.workers) as pool:
        for name, form in product(arguments.methods.split(","), arguments.forms.split(",")):
            jobs = [(t, name, form, d, lr) for t in TASKS for d in dampings for lr in rates[t]]
            losses = dict(zip(jobs, pool.map(run, jobs), strict=True))
            known = results.get(f"{name} {form}", {}).get("tasks", {})
            table = {
                task: {float(d): cell for d, cell in known.get(task, {}).items()}
                | {
                    d: min((losses[task, name, form, d, lr], lr) for lr in rates[task])
                    for d in dampings
                }
                for task in TASKS
            }
            tried = sorted(table[TASKS[0]])
            means = {d: math.prod(table[t][d][0] for t in TASKS) ** 0.5 for d in tried}
            best = min(means, key=lambda d: means[d])
            results[f"{name} {form}"] = {"best": best, "mean": means[best], "tasks": table}
            print(f"{name}, {form}: best {best}, mean {means[best]:.4g}", flush=True)
            for task, row in table.items():
                parts = [f"{d:g}: {loss:.4g} @{lr:g}" for d, (loss, lr) in sorted(row.items())]
                cells = "  ".join(parts)
                print(f"  {task:<20} {cells}", flush=True)
            save(arguments.output, results)


if __name__ == "__main__":
    main()
