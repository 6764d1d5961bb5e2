"""Time and peak memory of a training step with each optimizer, relative to SGD with momentum.

    python benchmarks/step_time.py                       # all workloads, prints and stores ratios
    python benchmarks/step_time.py --workloads b --only Eva,K-FAC --rounds 9
    python benchmarks/compare.py old.json new.json

Every optimizer trains its own copy of the model. A round runs the kinds of steps of each optimizer
in turn (steps that leave the factors alone, that update them, that invert them as well), so that a
slow moment of the machine hits all of them; the figure is the median over rounds of the ratio to
SGD's time in the same round, with the kinds weighted by how often they come. "1/10" updates the
factors every step and inverts them every ten steps. "without products" replaces the matrix products
of preconditioning by a copy: what remains is capture, factor update, rescaling and the base's step.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peak import resident_bytes
from record import save
from torch import Tensor
from workloads import WORKLOADS

import mkor
from mkor_bench.memory import held_bytes, peak_bytes
from mkor_bench.rivals import build_muon

ATTENTION = ["attn"]
"""Layers without which K-FAC is timed once more: not every implementation can observe them."""

Build = Callable[[Any], torch.optim.Optimizer]


class NoProducts:
    """A method whose preconditioning is a copy."""

    def __init__(self, method: Any) -> None:
        self.method = method

    def __getattr__(self, name: str) -> Any:
        return getattr(self.method, name)

    def at(self, step: int) -> NoProducts:
        """Itself: no option depends on the step."""
        return self

    def learn(self, sizes: tuple[float, ...]) -> NoProducts:
        """Itself: it listens to nothing."""
        return self

    def precondition(self, state: dict[str, Tensor], grad: Tensor) -> Tensor:
        """A copy of the gradient."""
        return grad.clone()


def on_sgd(cls: Any, **options: Any) -> Build:
    """A method on SGD with momentum, without updates at the start."""

    def build(model: torch.nn.Module) -> torch.optim.Optimizer:
        base = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
        products = options.pop("products", True)
        optimizer = cls(model, base, **{"warmup_steps": 0, **options})
        if not products:
            optimizer._engine.method = NoProducts(optimizer._engine.method)
            optimizer._engine.listen()
        return optimizer

    return build


def automatic(**options: Any) -> Build:
    """MKOR on the momentum with AdamW, without updates at the start."""
    return lambda model: mkor.auto(model, 1e-4, warmup_steps=0, **options)


def rows() -> dict[str, tuple[Build, dict[int, float]]]:
    """A builder of every optimizer, and the share of each kind of step by a step of that kind."""
    half = {"state_dtype": torch.bfloat16}
    thin = {"representation": "lowrank", "statistic": "sketch", "vectors": 16, "rank": 20}
    every, tenth = {10: 1.0}, {1: 0.9, 10: 0.1}
    hundredth = {1: 0.9, 10: 0.09, 100: 0.01}
    rare, often = {"factor_update_steps": 10}, {"factor_update_steps": 1}
    kfac = {**rare, "inverse_update_steps": 100}
    return {
        "SGD": (lambda m: torch.optim.SGD(m.parameters(), lr=1e-4, momentum=0.9), every),
        "AdamW": (lambda m: torch.optim.AdamW(m.parameters(), lr=1e-4), every),
        "LAMB": (lambda m: mkor.LAMB(m.parameters(), lr=1e-4), every),
        "MKOR every 1": (on_sgd(mkor.MKOR, **often), every),
        "MKOR every 10": (on_sgd(mkor.MKOR, **rare), tenth),
        "MKOR bf16 every 1": (on_sgd(mkor.MKOR, **often, **half), every),
        "MKOR bf16 every 10": (on_sgd(mkor.MKOR, **rare, **half), tenth),
        "MKOR packed every 1": (on_sgd(mkor.MKOR, packed=True, **often), every),
        "MKOR packed every 10": (on_sgd(mkor.MKOR, packed=True, **rare), tenth),
        "MKOR packed bf16 every 1": (on_sgd(mkor.MKOR, packed=True, **often, **half), every),
        "MKOR packed bf16 every 10": (on_sgd(mkor.MKOR, packed=True, **rare, **half), tenth),
        "MKOR without products every 1": (on_sgd(mkor.MKOR, **often, products=False), every),
        "MKOR low rank every 1": (on_sgd(mkor.MKOR, **often, **thin), every),
        "MKOR low rank every 10": (on_sgd(mkor.MKOR, **rare, **thin), tenth),
        "auto every 1": (automatic(**often), every),
        "auto every 10": (automatic(**rare), tenth),
        "Muon every 1": (lambda m: build_muon(m, 1e-3), every),
        "Eva every 1": (on_sgd(mkor.Eva, **often), every),
        "HyLo-KIS every 10": (on_sgd(mkor.HyLo, sampling="kis", **rare), tenth),
        "HyLo-KID every 10": (on_sgd(mkor.HyLo, sampling="kid", **rare), tenth),
        "SNGD every 10": (on_sgd(mkor.SNGD, **rare), tenth),
        "K-FAC inverse 1/10": (
            on_sgd(mkor.KFAC, solver="inverse", inverse_update_steps=10, **often),
            {1: 0.9, 10: 0.1},
        ),
        "K-FAC inverse 10/100": (on_sgd(mkor.KFAC, solver="inverse", **kfac), hundredth),
        "K-FAC eigen 10/100": (on_sgd(mkor.KFAC, solver="eigen", **kfac), hundredth),
        "K-FAC eigen 10/100, no attention": (
            on_sgd(mkor.KFAC, solver="eigen", skip=ATTENTION, **kfac),
            hundredth,
        ),
        "K-BFGS every 1": (on_sgd(mkor.KBFGS, **often), every),
        "K-BFGS every 10": (on_sgd(mkor.KBFGS, **rare), tenth),
    }


class Trainee:
    """A model with its loss and optimizer."""

    def __init__(self, workload: Callable[[], Any], build: Build) -> None:
        torch.manual_seed(0)
        self.model, self.loss = workload()
        self.optimizer: Any = build(self.model)
        self.step(0)  # allocates the state

    def closure(self) -> Any:
        """Loss and gradients."""
        self.optimizer.zero_grad()
        loss = self.loss()
        loss.backward()
        return loss

    def step(self, number: int) -> None:
        """One step, which the optimizer takes for step `number` of the training."""
        if hasattr(self.optimizer, "_engine"):
            self.optimizer._engine.index = number
            self.optimizer._engine.listen()
        self.optimizer.step(self.closure)

    def seconds(self, kinds: dict[int, float]) -> float:
        """Mean seconds of a step, by the shares of its kinds."""
        total = 0.0
        for number, share in kinds.items():
            start = time.perf_counter()
            self.step(number)
            total += share * (time.perf_counter() - start)
        return total

    def peak(self, kinds: dict[int, float]) -> int:
        """Peak bytes over the kinds of steps."""
        self.optimizer.zero_grad()
        gc.collect()
        held = held_bytes(self.optimizer)
        return max(peak_bytes(lambda n=number: self.step(n), held) for number in kinds)  # type: ignore[misc]


def few_steps(key: str, name: str) -> None:
    """Each kind of step of one optimizer, to see what memory a process needs."""
    torch.set_num_threads(1)
    build, kinds = rows()[name]
    trainee = Trainee(WORKLOADS[key][1], build)
    for number in kinds:
        trainee.step(number)


def measure(key: str, turns: int, only: list[str]) -> dict[str, dict[str, float]]:
    """Median milliseconds and ratio to SGD, peak memory and factor bytes of every optimizer."""
    workload = WORKLOADS[key][1]
    table = {
        name: row
        for name, row in rows().items()
        if name == "SGD" or any(part in name for part in only)
    }
    trainees = {name: Trainee(workload, build) for name, (build, _) in table.items()}
    peaks = {name: trainees[name].peak(kinds) for name, (_, kinds) in table.items()}
    resident = {name: resident_bytes(few_steps, key, name) for name in table}
    times: dict[str, list[float]] = {name: [] for name in table}
    for _ in range(turns):
        for name, (_, kinds) in table.items():
            times[name].append(trainees[name].seconds(kinds))
    out: dict[str, dict[str, float]] = {}
    for name, values in times.items():
        ratios = [value / sgd for value, sgd in zip(values, times["SGD"], strict=True)]
        optimizer = trainees[name].optimizer
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        size = sum(p.numel() * p.element_size() for p in parameters)
        layers = optimizer.layers() if hasattr(optimizer, "layers") else []
        out[name] = {
            "ms": round(1000 * statistics.median(values), 2),
            "ratio": round(statistics.median(ratios), 3),
            "ratio_min": round(min(ratios), 3),
            "ratio_max": round(max(ratios), 3),
            "peak_mib": round(peaks[name] / 2**20, 1),
            "peak_ratio": round(peaks[name] / peaks["SGD"], 3),
            "resident_mib": round(resident[name] / 2**20, 1),
            "resident_ratio": round(resident[name] / resident["SGD"], 3),
            "factor_bytes_per_parameter_byte": round(sum(i.bytes for i in layers) / size, 2),
        }
    return out


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", default="abc", help="which of a, b, c")
    parser.add_argument("--rounds", type=int, default=9, help="counted rounds")
    parser.add_argument("--only", default="", help="parts of names of optimizers, with commas")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/step_time.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    results: dict[str, Any] = {}
    for key in arguments.workloads:
        title, _ = WORKLOADS[key]
        results[key] = measure(key, arguments.rounds, arguments.only.split(","))
        print(f"({key}) {title}")
        for name, row in results[key].items():
            spread = f"{row['ratio_min']:.2f}-{row['ratio_max']:.2f}"
            state = row["factor_bytes_per_parameter_byte"]
            print(
                f"  {name:<30} {row['ms']:>9.2f} ms  x{row['ratio']:.3f} ({spread})  "
                f"peak x{row['peak_ratio']:.2f}  resident x{row['resident_ratio']:.2f}  "
                f"state {state:.2f}"
            )
    save(arguments.output, results)


if __name__ == "__main__":
    main()
