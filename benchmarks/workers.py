"""A step at 1, 2 and 4 processes (gloo, CPU): time, memory and bytes, beside the prediction.

Rate, latency and bandwidth are measured first, on as many processes as the step itself runs on:
processes that share cores share the rate as well.

    PYTHONPATH=src python benchmarks/workers.py
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from record import save
from torch import nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import mkor
from collectives import counted
from gloo import spawn
from mkor_bench.scale.measured import (
    measured_machine,
    median_machine,
    network,
    predicted_seconds,
)
from mkor_bench.scale.model import Machine

WIDTH, DEPTH, ROWS = 512, 6, 512
SIZE = {"width": WIDTH, "depth": DEPTH, "rows": ROWS}
EVERY: dict[str, Any] = {"factor_update_steps": 4, "warmup_steps": 1}
METHODS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (None, {}),
    "MKOR": (mkor.MKOR, EVERY),
    "MKOR, a layer on one worker": (mkor.MKOR, {**EVERY, "grad_worker_fraction": 1e-9}),
    "MKOR, window": (mkor.MKOR, {**EVERY, "representation": "window"}),
    "Eva": (mkor.Eva, EVERY),
    "K-FAC": (mkor.KFAC, {**EVERY, "solver": "inverse", "inverse_update_steps": 4}),
    "K-FAC, a layer on one worker": (
        mkor.KFAC,
        {**EVERY, "solver": "inverse", "inverse_update_steps": 4, "grad_worker_fraction": 1e-9},
    ),
}


def run(name: str, workers: int, steps: int) -> dict[str, Any]:
    """Median seconds of a step in whole periods, bytes of state, and bytes on the wire."""
    cls, options = METHODS[name]
    torch.manual_seed(0)
    model: nn.Module = network(WIDTH, DEPTH)
    if workers > 1:
        model = DistributedDataParallel(model)
    base = torch.optim.SGD(model.parameters(), lr=1e-3)
    optimizer = cls(model, base, **options) if cls else base
    rows = torch.randn(ROWS, WIDTH)
    periods: list[float] = []
    wire: list[int] = []
    for _ in range(steps // 4 + 1):
        start = time.perf_counter()
        sent = 0
        for _ in range(4):
            optimizer.zero_grad()
            model(rows).square().mean().backward()
            with counted() as calls:
                optimizer.step()
            sent += sum(size for _, size in calls)
        periods.append((time.perf_counter() - start) / 4)
        wire.append(sent)
    kept = sum(layer.bytes for layer in optimizer.layers()) if cls else 0
    return {"s": statistics.median(periods[1:]), "state": kept, "wire": wire[-1] / 4}


def worker(rank: int, workers: int, steps: int) -> tuple[Machine, dict[str, Any]]:
    """Everything that one process measures."""
    del rank
    torch.set_num_threads(1)
    return measured_machine(workers, WIDTH, ROWS), {
        name: run(name, workers, steps) for name in METHODS
    }


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/workers.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    print(
        "| processes | method | step ms | predicted | state MiB (most) | KiB on the wire a step |"
    )
    print("| --- | --- | --- | --- | --- | --- |")
    for workers in (1, 2, 4):
        if workers == 1:
            found = [worker(0, 1, arguments.steps)]
        else:
            with tempfile.TemporaryDirectory() as folder:
                found = spawn_all(workers, arguments.steps, Path(folder))
        machine = median_machine([own for own, _ in found])
        rows: dict[str, Any] = {}
        for name, method in METHODS.items():
            own = [by_name[name] for _, by_name in found]
            row = {
                "s": max(one["s"] for one in own),
                "predicted_s": predicted_seconds(method, machine, workers, **SIZE),
                "state": [one["state"] for one in own],
                "wire": own[0]["wire"],
            }
            rows[name] = row
            print(
                f"| {workers} | {name} | {1e3 * row['s']:.1f} | {1e3 * row['predicted_s']:.1f} "
                f"| {max(row['state']) / 2**20:.1f} | {row['wire'] / 1024:.1f} |",
                flush=True,
            )
        results[str(workers)] = {"machine": vars(machine), "methods": rows}
    save(arguments.output, results)


def spawn_all(workers: int, steps: int, folder: Path) -> list[tuple[Machine, dict[str, Any]]]:
    """The same in several processes; their results cross as plain numbers."""
    found = spawn(plain_worker, folder, workers, steps, workers=workers, timeout=500)
    return [(Machine(**machine), by_name) for machine, by_name in found]


def plain_worker(rank: int, workers: int, steps: int) -> tuple[dict[str, float], dict[str, Any]]:
    """`worker` as numbers that can be loaded without code."""
    machine, by_name = worker(rank, workers, steps)
    return dict(vars(machine)), by_name


if __name__ == "__main__":
    main()
