"""What handing over to the base optimizer saves: seconds, steps and final loss, with and without.

    python benchmarks/hybrid.py                      # three tasks, three seeds
    python benchmarks/hybrid.py --seeds 1 --tasks valley

Every method runs at the learning rate that is best for it without a switch, found on one grid with
a seed of its own; the switch changes nothing else. The target is the final loss of the base alone.
Losses are means over the last twentieth of the steps, times the processor time of one thread.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from record import save
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import mkor
from mkor_bench.seeding import seed_generators
from mkor_bench.tasks.source import TaskSource
from mkor_bench.tasks.task import Task
from mkor_bench.train import warmup_cosine

TUNING_SEED = 1000
LRS = (0.003, 0.01, 0.03, 0.1, 0.3)
TRIAL = {"threshold": 0.5, "trial": 3, "clock": time.thread_time}
ROWS: dict[str, tuple[str, float | None, dict[str, Any]]] = {
    "base": ("base", None, {}),
    "mkor": ("mkor", None, {}),
    "mkor-h": ("mkor", 1 / 20, {}),
    "mkor-h early": ("mkor", 1 / 50, {}),
    "mkor-h trial": ("mkor", 1 / 50, TRIAL),
    "kfac": ("kfac", None, {}),
    "kfac-h": ("kfac", 1 / 20, {}),
    "kfac-h trial": ("kfac", 1 / 50, TRIAL),
    "kfac norm": ("kfac norm", None, {}),
    "kfac-h norm": ("kfac norm", 1 / 20, {}),
    "kfac-h norm trial": ("kfac norm", 1 / 50, TRIAL),
}
"""What is compared: the base optimizer alone, and methods with a switch whose window is this share
of the steps, or none, and options of the switch that are not the defaults."""
KFAC: dict[str, dict[str, Any]] = {
    "kfac": {"inverse_update_steps": 10},
    "kfac norm": {"inverse_update_steps": 10, "rescale": "gradient", "kl_clip": None},
}
"""K-FAC with its defaults, and with the norm of the gradient kept as MKOR does."""


def valley(data: Path | None = None) -> Task:
    """Regression on inputs of very different sizes, rotated, with noise that no model can fit."""
    fixed = torch.Generator().manual_seed(9)
    scales = torch.logspace(0, -2, 32)
    rotation = torch.linalg.qr(torch.randn(32, 32, generator=fixed)).Q
    teacher = torch.randn(8, 32, generator=fixed)

    def batches(seed: int) -> Iterator[Any]:
        source = torch.Generator().manual_seed(seed)
        while True:
            rows = torch.randn(64, 32, generator=source)
            noise = 0.5 * torch.randn(64, 8, generator=source)
            yield rows * scales @ rotation, (rows @ teacher.T).tanh() + noise

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return (model(batch[0]) - batch[1]).square().mean()

    def build(seed: int) -> nn.Module:
        return nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 8))

    return Task(
        name="valley",
        description="two layers, 32 rotated inputs of sizes 1 to 0.01, noisy goals",
        build=build,
        batches=batches,
        loss=loss,
        evaluate=lambda model: float(loss(model, next(batches(77)))),
        metric="test loss",
        higher_is_better=False,
        steps=1000,
    )


def load(name: str) -> Task:
    """A task of `mkor compare`, or the one above."""
    return valley() if name == "valley" else TaskSource(name).load()


def optimizer_of(name: str, model: nn.Module, lr: float, steps: int) -> torch.optim.Optimizer:
    """The base, or a method on it."""
    base = torch.optim.AdamW(model.parameters(), lr=lr)
    method, share, options = ROWS[name]
    if method == "base":
        return base
    hybrid = None if share is None else mkor.HybridSwitch(window=round(share * steps), **options)
    if method in KFAC:
        return mkor.KFAC(model, base, hybrid=hybrid, **KFAC[method])
    return mkor.MKOR(model, base, hybrid=hybrid)


def run(task: Task, name: str, lr: float, seed: int) -> dict[str, Any]:
    """One training run."""
    seed_generators(seed)
    model = task.build(seed)
    optimizer = optimizer_of(name, model, lr, task.steps)
    schedule = LambdaLR(optimizer, warmup_cosine(task.steps))
    batches, losses, seconds = task.batches(seed), [], []
    spent = 0.0
    for _ in range(task.steps):
        batch = next(batches)
        begin = time.thread_time()
        optimizer.zero_grad()
        loss = task.loss(model, batch)
        loss.backward()
        if isinstance(optimizer, mkor.Preconditioner):
            optimizer.observe_loss(loss)
        optimizer.step()
        schedule.step()
        spent += time.thread_time() - begin
        losses.append(float(loss.detach()))
        seconds.append(spent)
    resting = getattr(getattr(optimizer, "_engine", None), "resting", None)
    return {"losses": losses, "seconds": seconds, "handed_over": resting}


def final(losses: list[float]) -> float:
    """Mean loss of the last twentieth of the steps."""
    return statistics.fmean(losses[-(len(losses) // 20) :])


def reached(runs: list[dict[str, Any]], target: float) -> tuple[int, float] | None:
    """Steps and seconds until the mean curve, averaged over a twentieth, is at the target."""
    curve = [statistics.fmean(column) for column in zip(*(r["losses"] for r in runs), strict=True)]
    width = len(curve) // 20
    for end in range(width, len(curve) + 1):
        if statistics.fmean(curve[end - width : end]) <= target * (1 + 1e-9):
            return end, round(statistics.fmean(r["seconds"][end - 1] for r in runs), 3)
    return None


def compare(task: Task, seeds: int) -> dict[str, Any]:
    """All rows of one task."""
    methods = dict.fromkeys(method for method, _, _ in ROWS.values())
    rates = {method: tuned(task, method) for method in methods}
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in ROWS}
    for seed in range(seeds):  # interleaved, so that a busy machine slows all of them alike
        for name, (method, _, _) in ROWS.items():
            runs[name].append(run(task, name, rates[method], seed))
    target = statistics.fmean(final(r["losses"]) for r in runs["base"])
    return {name: row(runs[name], rates[method], target) for name, (method, _, _) in ROWS.items()}


def tuned(task: Task, method: str) -> float:
    """The learning rate of the grid with the lowest final loss without a switch."""
    losses = {lr: final(run(task, method, lr, TUNING_SEED)["losses"]) for lr in LRS}
    return min(losses, key=lambda lr: losses[lr] if math.isfinite(losses[lr]) else math.inf)


def row(runs: list[dict[str, Any]], lr: float, target: float) -> dict[str, Any]:
    """What the table shows of one method."""
    finals = [final(r["losses"]) for r in runs]
    return {
        "lr": lr,
        "final": float(f"{statistics.fmean(finals):.4g}"),
        "spread": float(f"{statistics.stdev(finals) if len(finals) > 1 else 0:.2g}"),
        "seconds": round(statistics.fmean(r["seconds"][-1] for r in runs), 3),
        "to_target": reached(runs, target),
        "handed_over": [r["handed_over"] for r in runs],
    }


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", default="digits-autoencoder,digits-classifier,valley")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/hybrid.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    if arguments.output.exists():  # a task that is run again replaces that task alone
        results = json.loads(arguments.output.read_text())["results"]
    for name in arguments.tasks.split(","):
        results[name] = compare(load(name), arguments.seeds)
        print(name)
        for method, cells in results[name].items():
            print(f"  {method:<18} {cells}", flush=True)
    save(arguments.output, results)


if __name__ == "__main__":
    main()
