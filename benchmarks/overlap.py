"""What overlapping the statistics' reduction with the backward pass could gain at most.

Two processes (gloo, CPU). Of steps that all update: the time of a step, and that of the collectives
in it, each begun together so that no process waits for the other's arithmetic.

    PYTHONPATH=src python benchmarks/overlap.py
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from record import save
from torch import nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import mkor
from gloo import spawn

WIDTH, DEPTH, ROWS = 512, 6, 512
EVERY: dict[str, Any] = {"factor_update_steps": 1}
METHODS: dict[str, tuple[Any, dict[str, Any]]] = {
    "MKOR, mean": (mkor.MKOR, {**EVERY, "representation": "window"}),
    "MKOR, 16 sketches": (
        mkor.MKOR,
        {**EVERY, "representation": "lowrank", "rank": 20, "statistic": "sketch", "vectors": 16},
    ),
    "Eva": (mkor.Eva, EVERY),
    "K-FAC": (mkor.KFAC, {**EVERY, "solver": "inverse", "inverse_update_steps": 10}),
}


def network() -> nn.Sequential:
    """That of `workers.py`."""
    layers: list[nn.Module] = []
    for _ in range(DEPTH):
        layers += [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    return nn.Sequential(*layers)


def worker(rank: int, steps: int) -> dict[str, dict[str, float]]:
    """Median seconds of a step, of its collectives, and of a step as it is, by method."""
    del rank
    torch.set_num_threads(1)
    return {name: measured(*METHODS[name], steps) for name in METHODS}


def measured(cls: Any, options: dict[str, Any], steps: int) -> dict[str, float]:
    """The same of one method."""
    torch.manual_seed(0)
    model = DistributedDataParallel(network())
    optimizer = cls(model, torch.optim.SGD(model.parameters(), lr=1e-3), **options)
    rows = torch.randn(ROWS, WIDTH)
    spent: list[float] = []

    def timed(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            dist.barrier()
            start = time.perf_counter()
            result = function(*args, **kwargs)
            spent.append(time.perf_counter() - start)
            return result

        return call

    out: dict[str, list[float]] = {"step": [], "collectives": []}
    for number in range(2 * steps):
        start = time.perf_counter()
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        if number % 2:
            optimizer.step()
            out["step"].append(time.perf_counter() - start)
            continue
        spent.clear()
        every = {name: timed(getattr(dist, name)) for name in ("all_reduce", "all_gather")}
        with mock.patch.multiple(dist, **every):
            optimizer.step()
        out["collectives"].append(sum(spent))
    return {key: statistics.median(values[2:]) for key, values in out.items()}


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/overlap.json"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = spawn(worker, Path(folder), arguments.steps, timeout=500)[0]
    print("| method | step that updates, ms | its collectives, ms | part |")
    print("| --- | --- | --- | --- |")
    for name, row in found.items():
        step, part = 1e3 * row["step"], row["collectives"] / row["step"]
        print(f"| {name} | {step:.1f} | {1e3 * row['collectives']:.2f} | {part:.1%} |")
    save(arguments.output, found)


if __name__ == "__main__":
    main()
