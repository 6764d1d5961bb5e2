"""Ten thousand steps on batches that wear a method out: what stays finite, and what is counted.

    python benchmarks/endurance.py                      # all methods
    python benchmarks/endurance.py --only kbfgs --steps 1000

A small network (a convolution, two linear layers, one without a bias) updates its factors in every
step. Stretches of forty steps follow each other: ordinary batches, the same batch again, constant
inputs, single rows, and zeros in every second step. Every 97th batch is a million times as large,
and every 131st holds a NaN. Gradients are made finite and clipped to a norm of 1, as a training
loop would, so that what breaks is the method's. K-BFGS must not be clipped, so there huge and bad
batches have a loss of zero: their inputs still reach its factors.
"""

from __future__ import annotations

import argparse
import logging
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from record import save
from torch import Tensor, nn

import mkor
from mkor.methods.base import EVENTS

BF16 = {"state_dtype": torch.bfloat16}
LOWRANK = {"representation": "lowrank", "rank": 4, "vectors": 3}
WINDOW = {"representation": "window", "window": 4}
SKETCH = {"statistic": "sketch", "vectors": 3}
RUNS: dict[str, tuple[Any, dict[str, Any]]] = {
    "mkor": (mkor.MKOR, {}),
    "mkor bf16": (mkor.MKOR, BF16),
    "mkor reference": (mkor.MKOR, {"rule": "reference"}),
    "mkor paper": (mkor.MKOR, {"rule": "paper"}),
    "mkor sketch": (mkor.MKOR, SKETCH),
    "mkor window sketch": (mkor.MKOR, {**WINDOW, **SKETCH}),
    "mkor window bf16": (mkor.MKOR, {**WINDOW, **BF16}),
    "mkor lowrank": (mkor.MKOR, LOWRANK),
    "mkor lowrank sketch": (mkor.MKOR, {**LOWRANK, **SKETCH}),
    "mkor lowrank sketch bf16": (mkor.MKOR, {**LOWRANK, **SKETCH, **BF16}),
    "kfac eigen": (mkor.KFAC, {"inverse_update_steps": 1}),
    "kfac eigen bf16": (mkor.KFAC, {"inverse_update_steps": 1, **BF16}),
    "kfac inverse": (mkor.KFAC, {"solver": "inverse", "inverse_update_steps": 1}),
    "kfac inverse bf16": (mkor.KFAC, {"solver": "inverse", "inverse_update_steps": 1, **BF16}),
    "eva": (mkor.Eva, {}),
    "eva bf16": (mkor.Eva, BF16),
    "sngd": (mkor.SNGD, {}),
    "sngd bf16": (mkor.SNGD, BF16),
    "hylo kis": (mkor.HyLo, {"sampling": "kis", "rank": 0.5}),
    "hylo kid": (mkor.HyLo, {"sampling": "kid", "rank": 0.5}),
    "hylo kid bf16": (mkor.HyLo, {"sampling": "kid", "rank": 0.5, **BF16}),
    "kbfgs": (mkor.KBFGS, {}),
    "kbfgs bf16": (mkor.KBFGS, BF16),
    "kbfgs memory": (mkor.KBFGS, {"memory": 5}),
    "kbfgs memory bf16": (mkor.KBFGS, {"memory": 5, **BF16}),
}
RATES = {mkor.KFAC: 0.0005, mkor.Eva: 0.002}
"""Learning rates where 0.02 is too high without any of this: their steps aren't gradient-sized."""

SHAPE = (2, 4, 4)
HUGE, BAD = 97, 131


def network() -> nn.Module:
    """A convolution and two linear layers, one without a bias."""
    layers = (nn.Conv2d(2, 4, 2, bias=False), nn.Tanh(), nn.Flatten(), nn.Linear(36, 8), nn.Tanh())
    return nn.Sequential(*layers, nn.Linear(8, 3, bias=False))


class Batches:
    """Batches by the number of the step, and what they are fitted to."""

    def __init__(self) -> None:
        self.source = torch.Generator().manual_seed(0)
        self.weight = torch.randn(32, 3, generator=self.source) / 32**0.5
        self.same = self.rows(12)

    def rows(self, count: int) -> Tensor:
        """Ordinary inputs."""
        return torch.randn(count, *SHAPE, generator=self.source) + 0.3

    def at(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets."""
        kind = step // 40 % 5
        inputs = {
            0: lambda: self.rows(12),
            1: lambda: self.same,
            2: lambda: torch.full((12, *SHAPE), 0.5),
            3: lambda: self.rows(1),
            4: lambda: self.rows(12) * (step % 2),
        }[kind]()
        targets = (inputs.flatten(1) @ self.weight).tanh()
        if step % HUGE == HUGE - 1:
            inputs = inputs * 1e6
        if step % BAD == BAD - 1:
            inputs = inputs.clone()
            inputs[0, 0, 0, 0] = torch.nan
        return inputs, targets


def evaluate(model: nn.Module, inputs: Tensor, targets: Tensor, twice: bool, odd: bool) -> Tensor:
    """The loss, its gradients in `.grad`, made finite and clipped unless they are compared."""
    loss: Tensor = F.mse_loss(model(inputs), targets)
    if twice and odd:
        loss = 0 * loss
    loss.backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.nan_to_num_(0, 0, 0)
    if not twice:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return loss.detach()


def finite(model: nn.Module, optimizer: mkor.Preconditioner) -> bool:
    """Whether all parameters and all of the curvature state are."""
    layers = optimizer.state_dict()["preconditioner"]["layers"].values()
    tensors = [tensor for layer in layers for tensor in layer["state"].values()]
    return all(bool(torch.isfinite(t).all()) for t in [*model.parameters(), *tensors])


def endure(name: str, steps: int) -> dict[str, Any]:
    """One run: losses on unseen rows, the first step that wasn't finite, and the events."""
    logging.disable(logging.WARNING)  # of faults, which are what is looked for here
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, batches = network(), Batches()
    cls, options = RUNS[name]
    settings = {"lr": RATES.get(cls, 0.02), "momentum": 0.9, "weight_decay": 1e-4}
    base = torch.optim.SGD(model.parameters(), **settings)
    optimizer = cls(model, base, factor_update_steps=1, **options)
    twice = cls is mkor.KBFGS
    unseen = batches.rows(200)
    goal = (unseen.flatten(1) @ batches.weight).tanh()

    def measured() -> float:
        with torch.no_grad():
            return round(F.mse_loss(model(unseen), goal).item(), 5)

    losses, broken = [measured()], None
    for step in range(steps):
        inputs, targets = batches.at(step)
        odd = step % HUGE == HUGE - 1 or step % BAD == BAD - 1

        def closure(data: tuple[Tensor, Tensor] = (inputs, targets), odd: bool = odd) -> Tensor:
            optimizer.zero_grad()
            return evaluate(model, *data, twice, odd)

        optimizer.step(closure)
        if broken is None and (step % 20 == 19 or odd) and not finite(model, optimizer):
            broken = step
        if (step + 1) % max(steps // 4, 1) == 0:
            losses.append(measured())
    events: Counter[str] = Counter()
    for layer in optimizer.layers():
        for event in EVENTS:
            events[event] += getattr(layer, event)
    return {"losses": losses, "not finite in step": broken, "events": {**+events}}


def main() -> None:
    """Run, print, store."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--only", default="", help="methods whose name contains this")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/endurance.json"))
    arguments = parser.parse_args()
    names = [name for name in RUNS if arguments.only in name]
    with ProcessPoolExecutor(arguments.workers) as pool:
        found = pool.map(endure, names, [arguments.steps] * len(names))
        results = {}
        for name, result in zip(names, found, strict=True):
            results[name] = result
            print(f"{name:<26} {result}", flush=True)
    save(arguments.output, {"steps": arguments.steps, "methods": results})


if __name__ == "__main__":
    main()
