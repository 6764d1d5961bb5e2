"""What ``mkor report`` does: reads the sections of a folder and writes them as one page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from mkor_bench.console import output_console
from mkor_bench.errors import UserError
from mkor_bench.interrupt import raises_interrupt
from mkor_bench.report.collect import Found, find_sections
from mkor_bench.report.page import FILE_NAME, count_verdicts, write_page


def run_report(folder: Path) -> None:
    """Writes the report of a folder and tells its verdicts.

    Args:
        folder: Where studies wrote to.

    Raises:
        UserError: There is nothing to report, a file is damaged, or the page cannot be written.
    """
    found = find_sections(folder)
    page = folder / FILE_NAME
    if page.is_dir():
        raise UserError(f"{str(page)!r} is a folder where the report is to be written: remove it.")
    with raises_interrupt():
        write_page(folder, found)
    console = output_console()
    console.print(verdicts(found), count_verdicts(found))
    console.print(f"Written to {page}", soft_wrap=True, highlight=False, markup=False)


def verdicts(found: Sequence[Found]) -> Table:
    """Makes the table that the command ends with."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("study", "paper", "verdict"):
        table.add_column(heading)
    for each in found:
        section = each.section
        table.add_row(*map(Text, (section.study, section.source, section.verdict.value)))
    return table
