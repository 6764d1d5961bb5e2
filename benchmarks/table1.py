"""Numbers that cross workers in an update of one layer, beside the paper's Table 1.

python benchmarks/table1.py
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import mkor

NARROW = torch.bfloat16
LOWRANK = {"representation": "lowrank", "statistic": "sketch", "vectors": 16}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=1024, help="d, both sides of the layer")
    parser.add_argument("--rows", type=int, default=64, help="rows of a worker")
    parser.add_argument("--workers", type=int, default=4)
    chosen = parser.parse_args()
    d, b = chosen.width, chosen.rows * chosen.workers
    kept = round(0.1 * b)
    paper = {"MKOR": d, "Eva": 2 * d, "K-FAC": 4 * d * d, "SNGD": 2 * b * d + b * b}
    paper["HyLo"] = 2 * kept * d + kept * kept
    methods = {
        "MKOR": ("2d/2", mkor.MKOR, {"wire_dtype": NARROW}),
        "MKOR, sketches": ("", mkor.MKOR, {**LOWRANK, "wire_dtype": NARROW}),
        "Eva": ("2d", mkor.Eva, {}),
        "K-FAC": ("4d²", mkor.KFAC, {"solver": "inverse"}),
        "SNGD": ("2bd + b²", mkor.SNGD, {}),
        "HyLo": ("2ρbd + (ρb)²", mkor.HyLo, {"sampling": "kis"}),
    }
    print(f"d = {d}, b = {b} rows of {chosen.workers} workers, ρ = 0.1; bytes an update\n")
    print("| method | Table 1 | in bytes | measured | with a bias |")
    print("| --- | --- | --- | --- | --- |")
    for name, (formula, cls, options) in methods.items():
        found = [
            mkor.estimate(
                nn.Linear(d, d, bias=bias),
                cls,
                rows=chosen.rows,
                workers=chosen.workers,
                **options,
            ).wire
            for bias in (False, True)
        ]
        stated = f"{4 * paper[name]:,}" if name in paper else ""
        print(f"| {name} | {formula} | {stated} | {found[0]:,} | {found[1]:,} |")


if __name__ == "__main__":
    main()
