"""Part of the mean output gradient in a weight's gradient, ‖g‖‖a‖/‖∇W‖, layer by layer.

python benchmarks/noise.py               # float32
python benchmarks/noise.py --autocast    # bfloat16 autocast
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from record import save
from workloads import WORKLOADS

import mkor


def parts(key: str, autocast: bool) -> dict[str, list[float]]:
    """The part of every layer of a workload in its first step, one number a stacked matrix."""
    torch.manual_seed(0)
    model, loss = WORKLOADS[key][1]()
    optimizer = mkor.MKOR(model, torch.optim.SGD(model.parameters(), lr=0.01))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        value = loss()
    value.backward()
    out = {}
    for name, seen in optimizer._engine.collect().items():
        mean = seen.inputs / seen.rows[:, None]
        part = seen.grads.norm(dim=(1, 2)) * mean.norm(dim=(1, 2)) / seen.gradient
        out[name] = [float(f"{x:.1e}") for x in part]
    return out


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--autocast", action="store_true", help="under bfloat16 autocast")
    parser.add_argument("--output", type=Path, default=None)
    arguments = parser.parse_args()
    suffix = "_autocast" if arguments.autocast else ""
    results = {key: parts(key, arguments.autocast) for key in "bc"}
    for key, layers in results.items():
        print(f"({key}) {WORKLOADS[key][0]}")
        for name, part in layers.items():
            print(f"  {name:<24} {part}")
    save(arguments.output or Path(f"benchmarks/results/noise{suffix}.json"), results)


if __name__ == "__main__":
    main()
