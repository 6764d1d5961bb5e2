"""A section of the report: a claim, what was measured about it, and a verdict.

Each study writes one section as ``NAME.json`` beside its figures. ``mkor report`` puts the sections
of a folder on one page; it needs nothing but these files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from mkor_bench.files import write_atomically
from mkor_bench.report.results import to_json
from mkor_bench.report.table import number

FORMAT = 1
"""Grows when a reader of older files would misread a newer one."""

LARGEST = 2**63
"""What numbers in tables are below."""

Cell = str | int | float | bool | None

_PARTS = ("verdict", "tables", "figures")
"""What a section has besides texts."""


class Verdict(str, Enum):
    """What became of a claim. The words are what the report shows."""

    HOLDS = "holds"
    PARTLY = "holds in part"
    FAILS = "does not hold"
    OPEN = "not decided here"


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        caption: What it shows, with units.
        columns: The headings.
        rows: Cells in the order of the columns: numbers stay numbers, so that they can be sorted,
            and None is what is not known.
    """

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True)
class Figure:
    """A figure.

    Attributes:
        file: The name of a PNG file beside the section's.
        text: What it shows, also to those who cannot see it.
    """

    file: str
    text: str


@dataclass(frozen=True)
class Section:
    """What a study found.

    Attributes:
        study: Its name on the command line.
        title: A heading.
        source: Where the paper says it, such as ``"Table 1"``.
        claim: The paper's claim, in our words.
        measured: What was measured, in words with figures.
        verdict: What became of the claim.
        reason: Why, in a sentence: what decided it, or what would.
        tables: The tables.
        figures: The figures.
    """

    study: str
    title: str
    source: str
    claim: str
    measured: str
    verdict: Verdict
    reason: str
    tables: tuple[Table, ...] = ()
    figures: tuple[Figure, ...] = ()


def write_section(
    folder: Path,
    section: Section,
    conditions: Mapping[str, Any],
    data: Mapping[str, Any] | None = None,
) -> tuple[str, ...]:
    """Writes ``NAME.json`` and ``NAME.md``.

    Args:
        folder: The study's output folder.
        section: The section; its figures lie there already.
        conditions: How the results came about, as
            :func:`~mkor_bench.studies.conditions.conditions` tells it.
        data: Whatever else is worth keeping, as JSON can hold it.

    Returns:
        The names of the files, the figures' too.
    """
    content = {
        "format": FORMAT,
        "study": section.study,
        "conditions": conditions,
        "section": asdict(section),
        "data": data or {},
    }
    names = f"{section.study}.json", f"{section.study}.md"
    for name, text in zip(names, (to_json(content), to_markdown(section)), strict=True):
        _write(folder / name, text)
    return (*names, *(figure.file for figure in section.figures))


def read_section(path: Path) -> tuple[Section, Mapping[str, Any]] | None:
    """Reads what :func:`write_section` wrote.

    Args:
        path: A JSON file.

    Returns:
        The section and the conditions; None for a JSON file of another kind.

    Raises:
        ValueError: The file is no JSON, or has a section of another format.
    """
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict) or not content.keys() & {"section", "study"}:
        return None
    if content.get("format") != FORMAT:
        raise ValueError(
            f"it has format {content.get('format')!r}, and this version of mkor reads {FORMAT}"
        )
    try:
        section, conditions = _parsed(content["section"]), content["conditions"]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"its section is incomplete ({error})") from error
    if not isinstance(conditions, dict):
        raise ValueError(f"its conditions are no object but {type(conditions).__name__}")
    _check(section)
    return section, conditions


def to_markdown(section: Section) -> str:
    """Returns a section as Markdown, as the terminal and the docs show it."""
    parts = [
        f"## {section.title} ({section.source})",
        f"**Claim.** {section.claim}",
        f"**Measured.** {section.measured}",
        f"**Verdict: {section.verdict.value}.** {section.reason}",
        *map(_table, section.tables),
        *(f"![{figure.text}]({figure.file})" for figure in section.figures),
    ]
    return "\n\n".join(parts) + "\n"


def shown(cell: Cell) -> str:
    """Returns a cell as text."""
    if cell is None:
        return "–"
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    return number(cell) if isinstance(cell, float) else str(cell)


def _parsed(fields: Mapping[str, Any]) -> Section:
    tables = tuple(
        Table(table["caption"], tuple(table["columns"]), tuple(map(tuple, table["rows"])))
        for table in fields["tables"]
    )
    figures = tuple(Figure(**figure) for figure in fields["figures"])
    verdict = Verdict(fields["verdict"])
    return Section(**{**fields, "verdict": verdict, "tables": tables, "figures": figures})


def _check(section: Section) -> None:
    """Refuses what no study writes: a file that was edited, or that someone else made."""
    texts = {name: value for name, value in vars(section).items() if name not in _PARTS}
    texts |= {f"caption of table {n}": t.caption for n, t in enumerate(section.tables, 1)}
    texts |= {f"file of figure {n}": f.file for n, f in enumerate(section.figures, 1)}
    texts |= {f"text of figure {n}": f.text for n, f in enumerate(section.figures, 1)}
    for name, value in texts.items():
        if not isinstance(value, str):
            raise ValueError(f"its {name} is no text but {value!r}")
    for table in section.tables:
        if not all(isinstance(column, str) for column in table.columns):
            raise ValueError(f"table {table.caption!r} has a heading that is no text")
        for row in table.rows:
            if len(row) != len(table.columns):
                raise ValueError(
                    f"table {table.caption!r} has {len(table.columns)} columns "
                    f"and a row of {len(row)}"
                )
            if not all(isinstance(cell, Cell) and _moderate(cell) for cell in row):
                raise ValueError(
                    f"table {table.caption!r} has a cell that is no text and no usual number"
                )
    for figure in section.figures:
        if Path(figure.file).name != figure.file:
            raise ValueError(f"its figure {figure.file!r} does not lie beside it")


def _moderate(cell: Cell) -> bool:
    """Tells whether a number fits into a float, as those do that a study writes."""
    return not isinstance(cell, int) or abs(cell) < LARGEST


def _table(table: Table) -> str:
    lines = [table.columns, ("---",) * len(table.columns), *map(_cells, table.rows)]
    return "\n".join([f"{table.caption}:", "", *(f"| {' | '.join(line)} |" for line in lines)])


def _cells(row: Sequence[Cell]) -> tuple[str, ...]:
    return tuple(shown(cell).replace("|", "\\|") for cell in row)


def _write(path: Path, text: str) -> None:
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))
