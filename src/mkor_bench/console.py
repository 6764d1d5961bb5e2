"""The terminal: results on standard output, progress on standard error."""

from __future__ import annotations

import shutil

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

_FILE_WIDTH = 110


def output_console() -> Console:
    """Makes the console for results; in a file, lines are as long as a table needs."""
    console = Console()
    if not console.is_terminal and shutil.get_terminal_size((0, 0)).columns == 0:
        console.width = _FILE_WIDTH
    return console


def progress_bars() -> Progress:
    """Makes the progress bars; where no one looks, nothing is drawn."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[told]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )
