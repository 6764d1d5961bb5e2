"""How the results of a study came about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mkor_bench.studies.study import Request
from mkor_bench.train import SCHEDULE


def conditions(asked: Request, records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Tells under which conditions results arose, and whether they were all the same.

    Args:
        asked: What was done.
        records: The results as they are kept.

    Returns:
        What JSON can hold.
    """
    return {
        "quick": asked.quick,
        "seeds": asked.seeds,
        "schedule": SCHEDULE,
        "threads": 1,
        "precision": "bfloat16 autocast" if asked.autocast else "float32",
        "machines": _different(records, "machine"),
        "versions": _different(records, "versions"),
        "sources": _different(records, "sources"),
        "pieces": len(records),
        "processor_hours": round(
            sum(record["result"]["processor_seconds"] for record in records) / 3600, 2
        ),
    }


def _different(records: Sequence[Mapping[str, Any]], key: str) -> list[Any]:
    found: list[Any] = []
    for record in records:
        if record[key] not in found:
            found.append(record[key])
    return found
