"""Table 1: how the cost of second-order information grows with the width d and the rows b.

One linear layer of width d sees b rows. What an update of its factors takes (with the inversion,
where the method has one), what the factors hold and what crosses workers is measured at several d
with b fixed, and at several b with d fixed, the sizes in turns. An exponent is the slope of the
logarithm between the two largest sizes; bytes and numbers are exact.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mkor_bench.memory import factor_bytes
from mkor_bench.optimizers import settled_options
from mkor_bench.report.chart import draw_lines, finish, name_beside, new_figure, save_figure
from mkor_bench.report.section import Figure, Section, Table
from mkor_bench.studies.finding import Check, conclude, judge
from mkor_bench.studies.kept import Kept
from mkor_bench.studies.measure import Trainee
from mkor_bench.studies.piece import Piece
from mkor_bench.studies.study import Report, Request, Study
from mkor_bench.studies.workloads import layer

PAPER = {
    "mkor": "d² + bd",
    "mkor-lowrank": "–",
    "eva": "d² + bd",
    "kfac": "d³",
    "kaisa-eigen": "d³",
    "sngd": "b³",
    "hylo-kis": "b³",
    "hylo-kid": "b³",
    "kbfgs": "bd²",
}
"""The cost of an update by the paper's table 1 and introduction; the low rank is not in it."""

FULL = {
    "widths": [512, 1024, 2048, 4096],
    "rows": [512, 1024, 2048, 4096],
    "width": 256,
    "batch": 128,
}
QUICK = {"widths": [64, 128, 256], "rows": [64, 128, 256], "width": 64, "batch": 32}
ENOUGH = 1024
"""The least largest size at which an exponent of time says more than the costs of each call."""

FLAT, CUBIC = 2.35, 2.5
"""Above, below which an exponent counts as one of a square or less, and as one of a cube."""

Point = Mapping[str, Any]


def pieces(asked: Request, kept: Kept) -> Sequence[Piece]:
    """Returns a measurement for each method."""
    del kept
    return [_piece(asked, name) for name in asked.optimizers]


def _piece(asked: Request, name: str) -> Piece:
    size = QUICK if asked.quick else FULL
    spec = {
        "optimizer": name,
        "options": settled_options(name),
        "rounds": 3 if asked.quick else 7,
        **size,
    }
    steps = spec["rounds"] * (len(size["widths"]) + len(size["rows"]))
    return Piece("mkor_bench.studies.complexity:measure", spec, f"{name} sizes", steps, alone=True)


def measure(
    spec: Mapping[str, Any], data: str | None, report: Callable[[int], None]
) -> dict[str, Any]:
    """Measures a method at all sizes."""
    del data
    sweeps = {
        "over_d": [(width, spec["batch"]) for width in spec["widths"]],
        "over_b": [(spec["width"], rows) for rows in spec["rows"]],
    }
    return {key: _sweep(spec, sizes, report) for key, sizes in sweeps.items()}


def _sweep(
    spec: Mapping[str, Any], sizes: Sequence[tuple[int, int]], report: Callable[[int], None]
) -> list[dict[str, Any]]:
    trainees = [Trainee(partial(layer, *size), spec["optimizer"]) for size in sizes]
    seconds: list[list[float]] = [[] for _ in sizes]
    for _ in range(spec["rounds"]):
        for trainee, own in zip(trainees, seconds, strict=True):
            trainee.step(updates=True)
            own.append(trainee.spent["update"])
            report(1)
    return [
        {
            "d": width,
            "b": rows,
            "seconds": statistics.median(own),
            "bytes": factor_bytes(trainee.optimizer),
            "sent": trainee.sent,
        }
        for (width, rows), trainee, own in zip(sizes, trainees, seconds, strict=True)
    ]


def exponent(points: Sequence[Point], size: str, value: str) -> float:
    """Returns the slope of log value by log size between the two largest sizes."""
    first, last = points[-2:]
    if not (first[value] > 0 and last[value] > 0):
        return math.nan
    return math.log(last[value] / first[value]) / math.log(last[size] / first[size])


def exponents(result: Mapping[str, Sequence[Point]]) -> dict[str, float]:
    """Returns the exponents of a method: of time by d and b, of bytes and numbers by d."""
    return {
        "time_d": exponent(result["over_d"], "d", "seconds"),
        "time_b": exponent(result["over_b"], "b", "seconds"),
        "bytes_d": exponent(result["over_d"], "d", "bytes"),
        "sent_d": exponent(result["over_d"], "d", "sent"),
        "sent_b": exponent(result["over_b"], "b", "sent"),
    }


def checks(found: Mapping[str, Mapping[str, float]], largest: int) -> list[Check]:
    """Compares exponents with the paper's.

    Args:
        found: What :func:`exponents` returned, by the method's name.
        largest: The largest size that was measured.

    Returns:
        One check for each statement of the table about a method that was measured.
    """
    rules = [
        (
            "mkor",
            "time_d",
            lambda x: x <= FLAT,
            f"MKOR's update grows as d^{{:.2f}}, at most {FLAT}",
        ),
        ("eva", "time_d", lambda x: x <= FLAT, f"Eva's as d^{{:.2f}}, at most {FLAT}"),
        ("kfac", "time_d", lambda x: x >= CUBIC, f"K-FAC's as d^{{:.2f}}, at least {CUBIC}"),
        ("sngd", "time_b", lambda x: x >= CUBIC, f"SNGD's as b^{{:.2f}}, at least {CUBIC}"),
        ("mkor", "sent_d", lambda x: x <= 1.1, "MKOR sends numbers as d^{:.2f}, at most 1.1"),
        ("kfac", "sent_d", lambda x: x >= 1.8, "K-FAC as d^{:.2f}, at least 1.8"),
        ("mkor", "bytes_d", lambda x: x <= 2.1, "MKOR keeps bytes as d^{:.2f}, at most 2.1"),
    ]
    out = []
    for name, key, rule, told in rules:
        value = found.get(name, {}).get(key, math.nan)
        known = not math.isnan(value) and (largest >= ENOUGH or not key.startswith("time"))
        out.append(Check(told.format(value), rule(value) if known else None))
    return out


def report(asked: Request, kept: Kept, folder: Path) -> Report:
    """Writes the section."""
    known = {name: kept.get(_piece(asked, name)) for name in asked.optimizers}
    results = {name: result for name, result in known.items() if result is not None}
    found = {name: exponents(result) for name, result in results.items()}
    size = QUICK if asked.quick else FULL
    largest = min(size["widths"][-1], size["rows"][-1])
    verdict, reason = judge(checks(found, largest), asked.quick)
    _draw(folder / "complexity.png", results)
    columns = ("method", "paper: time", "time by d", "time by b", "bytes by d", "sent by d")
    rows = [
        (name, PAPER.get(name.partition(":")[0], "–"), *(round(x, 2) for x in list(own.values())))
        for name, own in found.items()
    ]
    section = Section(
        study="complexity",
        title="How cost grows with the size of a layer",
        source="Table 1",
        claim=(
            "An update of MKOR's factors costs d² + bd, where K-FAC's costs d³ and SNGD's b³; "
            "MKOR sends vectors (2d numbers), K-FAC matrices (4d²), SNGD rows (2bd + b²); MKOR "
            "keeps half of K-FAC's 4d²."
        ),
        measured=(
            f"Updates of one layer with d from {size['widths'][0]} to {size['widths'][-1]} at "
            f"b = {size['batch']}, and b from {size['rows'][0]} to {size['rows'][-1]} at "
            f"d = {size['width']}; exponents between the two largest sizes, medians of steps "
            "in turns."
        ),
        verdict=verdict,
        reason=reason,
        tables=(
            Table("Exponents of an update", (*columns, "sent by b"), tuple(rows)),
            Table(
                "At the largest d",
                ("method", "d", "ms", "KiB of factors", "numbers sent"),
                tuple(_largest(name, result) for name, result in results.items()),
            ),
        ),
        figures=(Figure("complexity.png", "Time of an update by d and by b, for each method"),),
    )
    return conclude(asked, kept, folder, section, {"results": results})


def _largest(name: str, result: Mapping[str, Any]) -> tuple[Any, ...]:
    point = result["over_d"][-1]
    return name, point["d"], 1e3 * point["seconds"], point["bytes"] / 1024, point["sent"]


def _draw(path: Path, results: Mapping[str, Mapping[str, Sequence[Point]]]) -> None:
    figure, ((by_d, by_b),) = new_figure(1, 2)
    for axes, key, size, told in (
        (by_d, "over_d", "d", "width d of the layer"),
        (by_b, "over_b", "b", "rows b of a batch"),
    ):
        curves = [
            (name, [p[size] for p in result[key]], [1e3 * p["seconds"] for p in result[key]])
            for name, result in results.items()
        ]
        draw_lines(axes, curves)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        finish(
            axes,
            f"Time of an update by {size}",
            told,
            "processor time of an update (ms)",
            legend=False,
        )
    name_beside(figure, by_d)
    save_figure(path, figure)


STUDY = Study(
    name="complexity",
    description="how an update's time, memory and traffic grow with width and rows, by method",
    request=lambda quick, data: Request((), tuple(PAPER), seeds=0, quick=quick, data=data),
    pieces=pieces,
    report=report,
)
