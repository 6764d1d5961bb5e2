"""Cost of seeing a layer's mean output gradient: a tensor hook, a probe, or an identity.

    python benchmarks/capture.py

All take the mean input, too. Prints the time of forward and backward pass relative to none.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from record import save
from torch import Tensor, nn
from workloads import WORKLOADS


class Identity(torch.autograd.Function):
    """The identity, which gives a leaf the sum of the output gradient."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, leaf: Tensor, conv: bool, copy: bool) -> Tensor:
        """A copy, or the output marked as edited; either may be edited in place afterwards."""
        ctx.conv = conv
        if copy:
            return output.clone()
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """The gradient, and its sum for the leaf."""
        rows = grad.flatten(2).sum(-1) if ctx.conv else grad.flatten(0, -2)
        return grad, rows.sum(0), None, None


class Observer:
    """A forward hook that sees the output gradient in one of the ways."""

    def __init__(self) -> None:
        self.way = "none"
        self.seen: list[Any] = []

    def __call__(self, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Any:
        """Observe one call."""
        if self.way == "none":
            return None
        conv = isinstance(module, nn.Conv2d)
        x = args[0].detach()
        self.seen.append(x.mean(0) if conv else x.flatten(0, -2).mean(0))
        channels = output.shape[1] if conv else output.shape[-1]
        if self.way == "probe":
            probe = torch.zeros(channels, requires_grad=True)
            self.seen.append(probe)
            return output + (probe[:, None, None] if conv else probe)
        if self.way.startswith("identity"):
            leaf = torch.zeros(channels, requires_grad=True)
            self.seen.append(leaf)
            return Identity.apply(output, leaf, conv, self.way != "identity")
        others = (0, 2, 3) if conv else tuple(range(output.dim() - 1))
        output.register_hook(lambda grad: self.seen.append(grad.sum(others)))
        return None


def measure(build: Callable[[], Any], rounds: int) -> dict[str, Any]:
    """Median milliseconds and ratio to no observation, in turns."""
    torch.manual_seed(0)
    model, loss = build()
    observer = Observer()
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            module.register_forward_hook(observer)
    ways = ("none", "tensor hook", "probe", "identity with a copy", "identity")
    times: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(rounds + 1):
        for way, values in times.items():
            observer.way = way
            observer.seen.clear()
            start = time.perf_counter()
            loss().backward()
            if number:
                values.append(time.perf_counter() - start)
            model.zero_grad()
    base = times["none"]
    return {
        way: {
            "ms": round(1000 * statistics.median(values), 2),
            "ratio": round(statistics.median(a / b for a, b in zip(values, base, strict=True)), 3),
        }
        for way, values in times.items()
    }


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/capture.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = {}
    for key, (title, build) in WORKLOADS.items():
        results[key] = measure(build, arguments.rounds)
        row = {way: value["ratio"] for way, value in results[key].items()}
        print(f"({key}) {title}: {row}")
    save(arguments.output, results)


if __name__ == "__main__":
    main()
