"""Variants of `mkor.auto` on the tasks of `mkor study defaults`, at the rate that it found best.

Each is judged by its final loss and by the steps to the study's target, as the study judges.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from record import save, stored

from mkor_bench.summary import OptimizerResult
from mkor_bench.tasks.source import TaskSource
from mkor_bench.train import Settings, Training, train

RESULTS = Path(__file__).parent / "results"

Variant = TypeVar("Variant")


def compare_variants(
    description: str,
    variants: Mapping[str, Variant],
    apply: Callable[[Training, Variant], None],
    output: str,
) -> None:
    """Train every variant on every task; print and store.

    Args:
        description: What the command line's help says.
        variants: By name.
        apply: Makes a new training one with a variant.
        output: The name of the file of results.
    """
    study = json.loads((RESULTS / "study" / "defaults.json").read_text())["data"]["tasks"]
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--tasks", default=",".join(study))
    parser.add_argument("--variants", default=",".join(variants), help="names, by commas")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULTS / output)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = stored(arguments.output)
    for name in arguments.tasks.split(","):
        lr, target = study[name]["optimizers"]["auto"]["lr"], study[name]["target"]["final_loss"]
        task = TaskSource(name, os.environ.get("MKOR_DATA")).load()
        for variant in arguments.variants.split(","):
            runs = []
            for seed in range(arguments.seeds):
                training = Training(task, Settings("auto", lr, seed, task.steps))
                apply(training, variants[variant])
                runs.append(train(training))
            found = outcome(OptimizerResult("auto", {}, {lr: runs}), target)
            results.setdefault(name, {})[variant] = {"lr": lr, "seeds": arguments.seeds, **found}
            print(f"{name:<20} {variant:<24} {found}", flush=True)
            save(arguments.output, results)


def outcome(result: OptimizerResult, target: float) -> dict[str, Any]:
    """Final loss, its spread, and steps to the target."""
    reached = result.reach(target)
    loss, spread = result.final_loss
    return {"final loss": loss, "spread": spread, "steps": reached and reached[0]}
