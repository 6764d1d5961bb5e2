"""How the cost of second-order information grows with layer width and batch: Table 1 of the paper.

    python benchmarks/scaling.py          # prints exponents, stores them

For one layer of width d and b rows, the time of a factor update (with the inversion, where the
method has one), the bytes of state and the numbers that cross workers are measured over doublings
of d at fixed b and of b at fixed d. An exponent is the slope of log time over log size between the
two largest sizes; bytes and numbers are exact.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from record import save
from torch import nn

import mkor
from mkor.messages import Owned

LATER = 1000
"""A step after every warm-up, in which inverses are due."""

METHODS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "MKOR": (mkor.MKOR, {}, "d^2 + bd"),
    "Eva": (mkor.Eva, {}, "d^2 + bd"),
    "K-FAC eigen": (mkor.KFAC, {"solver": "eigen"}, "d^3"),
    "K-FAC inverse": (mkor.KFAC, {"solver": "inverse"}, "d^3"),
    "SNGD": (mkor.SNGD, {}, "b^3"),
    "HyLo-KIS": (mkor.HyLo, {"sampling": "kis"}, "b^3"),
    "HyLo-KID": (mkor.HyLo, {"sampling": "kid"}, "b^3"),
    "K-BFGS": (mkor.KBFGS, {}, "bd^2"),
}
"""Methods with the complexity that the paper states."""


class Case:
    """One method on one layer, its updates timed by stage."""

    def __init__(self, cls: Any, options: dict[str, Any], width: int, rows: int) -> None:
        self.layer = nn.Linear(width, width, bias=False)
        base = torch.optim.SGD(self.layer.parameters(), lr=1e-4)
        self.optimizer = cls(self.layer, base, **options)
        self.data = torch.randn(rows, width)
        self.sent = 0
        self.spent = 0.0
        engine = self.optimizer._engine
        for stage in ("update", "revisit"):
            setattr(engine, stage, self.timed(getattr(engine, stage)))
        answer = engine.answer

        def counted(messages: dict[str, Any]) -> Any:
            for message in messages.values():
                if isinstance(message, Owned):
                    continue
                parts = (*message.sum.values(), *message.mean.values(), *message.gather.values())
                self.sent += sum(tensor.numel() for tensor in parts)
            return answer(messages)

        engine.answer = counted

    def timed(self, stage: Any) -> Any:
        """A stage of the engine that adds to the time spent."""

        def call() -> None:
            start = time.perf_counter()
            stage()
            self.spent += time.perf_counter() - start

        return call

    def run(self) -> tuple[float, int]:
        """Seconds and numbers sent of one update."""
        self.sent, self.spent = 0, 0.0

        def closure() -> Any:
            self.optimizer.zero_grad()
            loss = self.layer(self.data).square().mean()
            loss.backward()
            return loss

        self.optimizer._engine.index = LATER if self.optimizer.layers()[0].updates else 0
        self.optimizer._engine.listen()
        self.optimizer.step(closure)
        return self.spent, self.sent


def slope(sizes: list[int], values: list[float]) -> float:
    """Exponent between the two largest sizes."""
    return round(math.log(values[-1] / values[-2]) / math.log(sizes[-1] / sizes[-2]), 2)


def sweep(cls: Any, options: dict[str, Any], sizes: list[tuple[int, int]], rounds: int) -> Any:
    """Median seconds, bytes and numbers sent for every (d, b)."""
    out = []
    for width, rows in sizes:
        case = Case(cls, options, width, rows)
        case.run()
        runs = [case.run() for _ in range(rounds)]
        (info,) = case.optimizer.layers()
        seconds = statistics.median(spent for spent, _ in runs)
        out.append({"d": width, "b": rows, "s": seconds, "bytes": info.bytes, "sent": runs[0][1]})
    return out


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--widths", default="256,512,1024,2048", help="values of d")
    parser.add_argument("--rows", default="256,512,1024,2048", help="values of b")
    parser.add_argument("--width", type=int, default=256, help="d while b grows")
    parser.add_argument("--batch", type=int, default=128, help="b while d grows")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/scaling.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    widths = [int(d) for d in arguments.widths.split(",")]
    batches = [int(b) for b in arguments.rows.split(",")]
    results: dict[str, Any] = {}
    print(f"{'method':<14} {'paper':<9} {'time~d':>7} {'time~b':>7} {'bytes~d':>8} {'sent~d':>7}")
    for name, (cls, options, stated) in METHODS.items():
        over_d = sweep(cls, options, [(d, arguments.batch) for d in widths], arguments.rounds)
        over_b = sweep(cls, options, [(arguments.width, b) for b in batches], arguments.rounds)
        exponents = {
            "time_d": slope(widths, [row["s"] for row in over_d]),
            "time_b": slope(batches, [row["s"] for row in over_b]),
            "bytes_d": slope(widths, [row["bytes"] for row in over_d]),
            "sent_d": slope(widths, [row["sent"] for row in over_d]),
        }
        results[name] = {
            "paper": stated,
            "exponents": exponents,
            "over_d": over_d,
            "over_b": over_b,
        }
        t_d, t_b, b_d, s_d = exponents.values()
        print(f"{name:<14} {stated:<9} {t_d:>7} {t_b:>7} {b_d:>8} {s_d:>7}", flush=True)
    save(arguments.output, results)


if __name__ == "__main__":
    main()
