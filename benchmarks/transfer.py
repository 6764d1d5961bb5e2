"""Does the best learning rate of `mkor.auto` stay where it is when a network grows?

    MKOR_DATA=FOLDER python benchmarks/transfer.py           # prints and stores
    MKOR_DATA=FOLDER python benchmarks/transfer.py --tasks shakespeare --rules "rms 1"

Networks of a task in several widths are trained at rates a factor of two apart, one seed, with each
rule for the size of a matrix's update: a root mean square of 1 whatever its shape; of one over the
root of its inputs, 1 at 128 of them; and by Muon's factor √max(1, o/i). A rule transfers where the
best rates of the narrowest and the widest network are no further apart than a step of the grid.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from record import save, stored
from torch import Tensor, nn

from mkor import rescale
from mkor_bench.models.transformer import LanguageModel
from mkor_bench.tasks import cifar100_convnet, mnist_autoencoder
from mkor_bench.tasks.source import TaskSource
from mkor_bench.train import Settings, Training, train

Rule = Callable[[int, int], float]

RULES: dict[str, Rule] = {
    "rms 1": lambda outputs, inputs: 1.0,
    "rms by inputs": lambda outputs, inputs: math.sqrt(128 / inputs),
    "rms by shape": lambda outputs, inputs: math.sqrt(max(1, outputs / inputs)),
}
"""The root mean square of an update by the sides of its matrix."""


def autoencoder(scale: float) -> nn.Module:
    """The autoencoder of MNIST with other widths."""
    widths = (784, *(round(scale * width) for width in (500, 250, 100)), 30)
    nothing = torch.empty(0)
    return mnist_autoencoder.MnistAutoencoder(nothing, nothing, (*widths, *widths[-2::-1])).build(0)


def convnet(scale: float) -> nn.Module:
    """The convolutional network of CIFAR-100 with other numbers of channels."""
    return cifar100_convnet.network(tuple(round(scale * width) for width in (16, 32, 64)))


def transformer(scale: float) -> nn.Module:
    """The language model of Shakespeare with another width."""
    return LanguageModel(65, 64, round(96 * scale), causal=True)


class Family(NamedTuple):
    """Networks of a task: how to build one, their widths in parts of the task's own, and steps."""

    build: Callable[[float], nn.Module]
    widths: tuple[float, ...]
    steps: int


FAMILIES = {
    "mnist-autoencoder": Family(autoencoder, (0.25, 1, 2), 150),
    "cifar100-convnet": Family(convnet, (0.5, 1, 3), 150),
    "shakespeare": Family(transformer, (1 / 3, 1, 8 / 3), 200),
}


def run(name: str, width: float, rule: Rule, lr: float) -> float:
    """Mean training loss of the last tenth of a run."""

    def factor(size: Tensor, wanted: Tensor, sides: rescale.Sides) -> Tensor:
        return rescale.unit_rms(size, wanted, sides) * rule(*sides)

    rescale.RESCALE["rms"] = rescale.SIZED["rms"] = factor
    family = FAMILIES[name]
    task = TaskSource(name, os.environ.get("MKOR_DATA")).load()
    task = replace(task, build=lambda seed: family.build(width), steps=family.steps)
    losses = train(Training(task, Settings("auto:rescale=rms", lr, 0, family.steps))).losses
    whole = len(losses) == family.steps and math.isfinite(losses[-1])
    return statistics.fmean(losses[-family.steps // 10 :]) if whole else math.inf


def search(name: str, width: float, rule: Rule, start: float) -> dict[float, float]:
    """Losses by rate, from `start` outwards until the best has a worse one on both sides."""
    found: dict[float, float] = {}
    wanted = [start / 2, start, 2 * start]
    while wanted:
        found |= {lr: run(name, width, rule, lr) for lr in wanted}
        best = min(found, key=lambda lr: found[lr])
        wanted = [lr for lr in (best / 2, 2 * best) if lr not in found]
    return found


def excess(results: dict[str, Any], rule: str) -> dict[str, tuple[float, float]]:
    """By the rates that every network had: how far the losses lie above their best; mean, worst."""
    networks = [losses for rules in results.values() for losses in rules.get(rule, {}).values()]
    shared = set.intersection(*map(set, networks)) if networks else set()
    above = {lr: [losses[lr] / min(losses.values()) - 1 for losses in networks] for lr in shared}
    return {lr: (statistics.fmean(above[lr]), max(above[lr])) for lr in sorted(above, key=float)}


def main() -> None:
    """Run, print, store."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", default=",".join(FAMILIES))
    parser.add_argument("--rules", default=",".join(RULES))
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/transfer.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = stored(arguments.output)
    for name in arguments.tasks.split(","):
        for rule in arguments.rules.split(","):
            start = 0.004
            for width in FAMILIES[name].widths:
                found = search(name, width, RULES[rule], start)
                start = min(found, key=lambda lr: found[lr])
                losses = {f"{lr:g}": round(found[lr], 4) for lr in sorted(found)}
                results.setdefault(name, {}).setdefault(rule, {})[f"{width:.3g}"] = losses
                print(f"{name:<18} {rule:<14} {width:<6.3g} best {start:g} {losses}", flush=True)
                save(arguments.output, results)
    for rule in RULES:
        for lr, (mean, worst) in excess(results, rule).items():
            print(
                f"{rule:<14} {lr} on all networks: {mean:.1%} above the best, at worst {worst:.1%}"
            )


if __name__ == "__main__":
    main()
