"""The terminal: results on standard output, progress on standard error."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

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


class Display(Protocol):
    """Shows how far several pieces of work are."""

    def add(self, name: str, total: int, stage: str = "", done: int = 0) -> None:
        """Adds a piece of work; the first one has the number 0.

        Args:
            name: Its name.
            total: All of its steps.
            stage: What it does at first.
            done: The steps that are done already.
        """

    def advance(self, number: int, steps: int, stage: str, detail: str = "") -> None:
        """Notes progress.

        Args:
            number: The number of a piece of work.
            steps: The steps made since the last call.
            stage: What it does now.
            detail: What changes with every step.
        """

    def say(self, line: str) -> None:
        """Tells something once.

        Args:
            line: What.
        """


def output_console() -> Console:
    """Makes the console for results; in a file, lines are as long as a table needs."""
    console = Console()
    if not console.is_terminal and shutil.get_terminal_size((0, 0)).columns == 0:
        console.width = _FILE_WIDTH
    return console


@contextmanager
def progress_display() -> Iterator[Display]:
    """Shows progress as bars in a terminal, and as plain lines in a file."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines(console)
        return
    bars = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[told]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
    )
    with bars:
        yield _Bars(bars)


class _Bars:
    def __init__(self, bars: Progress) -> None:
        self._bars = bars

    def add(self, name: str, total: int, stage: str = "", done: int = 0) -> None:
        self._bars.add_task(name, total=total, completed=done, told=stage)

    def advance(self, number: int, steps: int, stage: str, detail: str = "") -> None:
        bar = self._bars.task_ids[number]
        self._bars.update(bar, advance=steps, told=f"{stage} {detail}".strip())

    def say(self, line: str) -> None:
        self._bars.console.print(line, soft_wrap=True, highlight=False, markup=False)


@dataclass
class _Work:
    name: str
    total: int
    stage: str
    done: int

    @property
    def told(self) -> tuple[int, str]:
        """What is worth a line when it changes."""
        return 10 * self.done // self.total, self.stage


class _Lines:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._works: list[_Work] = []

    def add(self, name: str, total: int, stage: str = "", done: int = 0) -> None:
        self._works.append(_Work(name, total, stage, done))
        if stage:
            self.say(f"{name}: {stage}")

    def advance(self, number: int, steps: int, stage: str, detail: str = "") -> None:
        work = self._works[number]
        before = work.told
        work.done += steps
        work.stage = stage
        if work.told != before:
            told = ", ".join(part for part in (stage, detail) if part)
            self.say(f"{work.name}: {100 * work.done // work.total} %, {told}")

    def say(self, line: str) -> None:
        self._console.print(line, soft_wrap=True, highlight=False, markup=False)
