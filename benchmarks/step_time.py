"""Time of a training step with each optimizer, relative to SGD with momentum.

    python benchmarks/step_time.py                       # all workloads, prints and stores ratios
    python benchmarks/step_time.py --workloads b --rounds 9
    python benchmarks/compare.py old.json new.json

Every optimizer trains its own copy of the model. A round runs one update cycle of each in turn, so
that a slow moment of the machine hits all of them; the figure is the median over rounds of the
ratio to SGD's time in the same round. "update 10" averages over the ten steps of a cycle.
"without products" replaces the matrix products of preconditioning by a copy: what remains is
capture, factor update, rescaling and the base's step.
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
from torch import Tensor
from workloads import WORKLOADS

import mkor

Step = Callable[[], Any]


class NoProducts:
    """A method whose preconditioning is a copy."""

    def __init__(self, method: Any) -> None:
        self.method = method

    def __getattr__(self, name: str) -> Any:
        return getattr(self.method, name)

    def precondition(self, state: dict[str, Tensor], grad: Tensor) -> Tensor:
        """A copy of the gradient."""
        return grad.clone()


def steps(build: Callable[[], Any]) -> dict[str, tuple[Step, int]]:
    """A training step and its cycle length for every optimizer."""
    half = {"state_dtype": torch.bfloat16}
    rows: dict[str, tuple[dict[str, Any] | str, int]] = {
        "SGD": ("SGD", 1),
        "AdamW": ("AdamW", 1),
        "MKOR update 1": ({"factor_update_steps": 1}, 1),
        "MKOR update 10": ({"factor_update_steps": 10}, 10),
        "MKOR bf16 update 1": ({"factor_update_steps": 1, **half}, 1),
        "MKOR bf16 update 10": ({"factor_update_steps": 10, **half}, 10),
        "MKOR without products update 1": ({"factor_update_steps": 1, "products": False}, 1),
    }
    return {name: (make_step(build, options), cycle) for name, (options, cycle) in rows.items()}


def make_step(build: Callable[[], Any], options: dict[str, Any] | str) -> Step:
    """One training step of a fresh model."""
    torch.manual_seed(0)
    model, loss = build()
    if options == "AdamW":
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    if isinstance(options, dict):
        own = {key: value for key, value in options.items() if key != "products"}
        optimizer = mkor.MKOR(model, optimizer, warmup_steps=0, **own)
        if "products" in options:
            optimizer._engine.method = NoProducts(optimizer._engine.method)

    def step() -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    step.optimizer = optimizer  # type: ignore[attr-defined]
    return step


def measure(build: Callable[[], Any], rounds: int) -> dict[str, Any]:
    """Median milliseconds and ratio to SGD of every optimizer, and bytes of factors."""
    table = steps(build)
    times: dict[str, list[float]] = {name: [] for name in table}
    for number in range(rounds + 1):
        for name, (step, cycle) in table.items():
            start = time.perf_counter()
            for _ in range(cycle):
                step()
            if number:
                times[name].append((time.perf_counter() - start) / cycle)
    out: dict[str, Any] = {}
    for name, values in times.items():
        ratios = [value / sgd for value, sgd in zip(values, times["SGD"], strict=True)]
        optimizer = table[name][0].optimizer  # type: ignore[attr-defined]
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        size = sum(p.numel() * p.element_size() for p in parameters)
        layers = optimizer.layers() if hasattr(optimizer, "layers") else []
        out[name] = {
            "ms": round(1000 * statistics.median(values), 2),
            "ratio": round(statistics.median(ratios), 3),
            "ratio_min": round(min(ratios), 3),
            "ratio_max": round(max(ratios), 3),
            "factor_bytes_per_parameter_byte": round(sum(i.bytes for i in layers) / size, 2),
        }
    return out


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", default="abc", help="which of a, b, c")
    parser.add_argument("--rounds", type=int, default=9, help="counted rounds")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/step_time.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    results: dict[str, Any] = {}
    for key in arguments.workloads:
        title, build = WORKLOADS[key]
        results[key] = measure(build, arguments.rounds)
        print(f"({key}) {title}")
        for name, row in results[key].items():
            spread = f"{row['ratio_min']:.2f}-{row['ratio_max']:.2f}"
            state = row["factor_bytes_per_parameter_byte"]
            print(f"  {name:<32} {row['ms']:>9.2f} ms  x{row['ratio']:.3f} ({spread})  {state:.2f}")
    save(arguments.output, results)


if __name__ == "__main__":
    main()
