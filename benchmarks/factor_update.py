"""Time of one rank-1 update of a d x d factor, relative to the bare `mv` and `addr_`.

python benchmarks/factor_update.py
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

from mkor.factors import dense


def timed(call: Callable[[], Any]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(side: int, dtype: torch.dtype, rounds: int) -> dict[str, float]:
    """Median milliseconds and ratio of the whole guarded update, in turn with the bare one."""
    factor = dense.identity(1, side, dtype, torch.device("cpu"))
    bare = factor[0].clone()
    vector = torch.randn(1, side, 1)
    flat = vector[0, :, 0].to(dtype) * 1e-3
    usable = torch.ones(1, dtype=torch.bool)

    def update() -> None:
        seen = dense.prepare(vector, 0.02)
        change = dense.exact(factor, seen, 0.9, 2.0, 0.95)
        dense.write_(factor, dense.guard(change, usable, dtype)[0])

    def plain() -> None:
        bare.addr_(flat, bare.mv(flat), alpha=-1e-3)

    pairs = [(timed(update), timed(plain)) for _ in range(rounds + 3)][3:]
    return {
        "ms": round(1000 * statistics.median(a for a, _ in pairs), 3),
        "mv_addr_ms": round(1000 * statistics.median(b for _, b in pairs), 3),
        "ratio": round(statistics.median(a / b for a, b in pairs), 2),
    }


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument(
        "--output", type=Path, default=Path("benchmarks/results/factor_update.json")
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for side in (1024, 2048, 3072, 4096):
            name = f"{str(dtype).removeprefix('torch.')} d={side}"
            results[name] = row = measure(side, dtype, arguments.rounds)
            bare = f"mv + addr_ {row['mv_addr_ms']:.3f} ms, x{row['ratio']}"
            print(f"{name:<18} {row['ms']:>8.3f} ms, {bare}")
    save(arguments.output, results)


if __name__ == "__main__":
    main()
