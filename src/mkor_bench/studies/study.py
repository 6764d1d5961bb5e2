"""What a study is: which pieces of work it wants, and what it makes of their results.

A study never runs anything. :attr:`Study.pieces` looks at the results that are there and names all
pieces that it wants by now; the driver does the missing ones and asks again, until none is missing.
So a study whose later pieces depend on earlier ones (seeds at the best learning rate, say) reads
from top to bottom, and can be stopped anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mkor_bench.report.section import Section
from mkor_bench.studies.kept import Kept
from mkor_bench.studies.piece import Piece


@dataclass(frozen=True)
class Request:
    """What is asked of a study.

    Attributes:
        tasks: Names of tasks; none where the study trains on none.
        optimizers: Names of optimizers, which may carry options; none where it has its own.
        seeds: How many, from 0 on; 0 where nothing depends on a seed.
        quick: Whether all is done at its small size.
        data: What --data named.
        grid: The places of the learning rates that tuning begins with, as
            :func:`~mkor_bench.studies.tuning.rate` counts them; none where nothing is tuned.
        autocast: Whether tasks are trained under bfloat16 autocast.
    """

    tasks: tuple[str, ...]
    optimizers: tuple[str, ...]
    seeds: int
    quick: bool = False
    data: str | None = None
    grid: tuple[int, ...] = ()
    autocast: bool = False


@dataclass(frozen=True)
class Report:
    """What a study made of its results.

    Attributes:
        files: The names of the files that it wrote.
        shown: What to print in the terminal: texts, or what rich prints.
        section: The section of the report that was written.
    """

    files: tuple[str, ...]
    shown: tuple[Any, ...]
    section: Section


@dataclass(frozen=True)
class Study:
    """One study.

    Attributes:
        name: On the command line.
        description: What it shows, in a sentence.
        request: What is done unless told otherwise, given --quick and --data.
        pieces: All pieces that are wanted, given the results so far.
        report: Writes files about the results so far into a folder, a section among them.
        groups: Names for several tasks, besides those that every command knows.
    """

    name: str
    description: str
    request: Callable[[bool, str | None], Request]
    pieces: Callable[[Request, Kept], Sequence[Piece]]
    report: Callable[[Request, Kept, Path], Report]
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)
