"""A study of numbers: squares first, then the sum of them, noting each call in a file."""

from pathlib import Path

import torch

from mkor_bench.report.section import Section, Verdict
from mkor_bench.studies.finding import conclude
from mkor_bench.studies.piece import Piece
from mkor_bench.studies.study import Request, Study

SECTION = Section("toy", "Squares", "none", "They add up.", "All.", Verdict.HOLDS, "They did.")


def add_ones(workers, spec):
    """Adds a one of each process."""
    total = torch.ones(1)
    if workers > 1:
        torch.distributed.all_reduce(total)
    return {"total": float(total)}


def square(spec, data, report):
    note(data, f"square {spec['number']}")
    report(1)
    return {"value": spec["number"] ** 2}


def add(spec, data, report):
    note(data, "add")
    return {"value": sum(spec["values"])}


def note(data, text):
    with (Path(data) / "calls.txt").open("a") as file:
        file.write(f"{text}\n")


def squares(count):
    return [Piece("toy_study:square", {"number": n}, f"square {n}", 3) for n in range(count)]


def pieces(request, kept):
    wanted = squares(request.seeds)
    values = [kept.get(piece) for piece in wanted]
    if all(value is not None for value in values):
        spec = {"values": [value["value"] for value in values]}
        wanted.append(Piece("toy_study:add", spec, "sum", 2))
    return wanted


STUDY = Study(
    name="toy",
    description="squares",
    request=lambda quick, data: Request((), (), 3, quick, data),
    pieces=pieces,
    report=lambda request, kept, folder: conclude(request, kept, folder, SECTION),
)
