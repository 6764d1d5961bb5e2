"""Compare two result files of the same benchmark.

python benchmarks/compare.py old.json new.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def leaves(tree: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, float]]:
    """Every number of a nested dict with its path."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, (*path, key))
        else:
            yield " / ".join((*path, key)), value


def main() -> None:
    """Print old, new and new/old of every ratio that both files have."""
    parser = argparse.ArgumentParser(description="Compare two result files of one benchmark.")
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    arguments = parser.parse_args()
    old, new = (json.loads(path.read_text()) for path in (arguments.old, arguments.new))
    for label, file in (("old", old), ("new", new)):
        machine = file["machine"]
        print(f"{label}: {machine['processor']}, torch {machine['torch']}, {machine['command']}")
    before = dict(leaves(old["results"]))
    for name, value in leaves(new["results"]):
        if name.endswith("ratio") and name in before:
            change = value / before[name]
            print(f"{name:<60} {before[name]:>8.3f} {value:>8.3f}  x{change:.3f}")


if __name__ == "__main__":
    main()
