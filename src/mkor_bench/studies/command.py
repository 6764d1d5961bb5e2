"""What ``mkor study`` does, once its options are read."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from rich.markdown import Markdown

from mkor_bench.console import Display, output_console, progress_display
from mkor_bench.errors import unknown_name
from mkor_bench.files import prepare_folder
from mkor_bench.interrupt import raises_interrupt
from mkor_bench.options import MAX_SEEDS, check_count, parse_names, parse_optimizers
from mkor_bench.studies import STUDIES
from mkor_bench.studies.drive import drive
from mkor_bench.studies.kept import FOLDER_NAME, Kept
from mkor_bench.studies.piece import Piece
from mkor_bench.studies.study import Request, Study
from mkor_bench.tasks import GROUPS, TASKS
from mkor_bench.tasks.source import TaskSource, check_data
from mkor_bench.workers import Workers, cores


def run_study(
    name: str,
    *,
    quick: bool,
    tasks: str | None,
    optimizers: str | None,
    seeds: int | None,
    workers: int | None,
    output: Path | None,
    data: str | None,
    report_only: bool,
) -> None:
    """Does what ``mkor study`` is asked to.

    Args:
        name: Of the study.
        quick: Whether to do a small part at a small size.
        tasks: Tasks and groups of them, separated by commas, or None for the study's own.
        optimizers: Names, separated by commas, or None for the study's own.
        seeds: How many, or None for the study's own.
        workers: Processes side by side, or None for one a core.
        output: The output folder, or None for ``runs/study/NAME``.
        data: What --data named.
        report_only: Whether to report on what is there and run nothing.
    """
    study = find_study(name)
    asked = _asked(study, quick, data, tasks, optimizers, seeds)
    folder = output or Path("runs/study") / (f"{name}-quick" if quick else name)
    count = cores() if workers is None else check_count(workers, "--workers", most=4 * cores())
    torch.set_num_threads(1)
    for task in asked.tasks:
        TaskSource(task, data, quick).load()  # what is missing shows before work begins
    prepare_folder(folder, (), (FOLDER_NAME,))
    with raises_interrupt():
        if not report_only:
            _drive_with_progress(study, asked, folder, count)
        report = study.report(asked, Kept(folder), folder)
    console = output_console()
    for part in report.shown:
        console.print(Markdown(part) if isinstance(part, str) else part, "")
    console.print(f"Written to {folder}: {', '.join(report.files)}", soft_wrap=True)


def find_study(name: str) -> Study:
    """Looks a study up.

    Args:
        name: Its name on the command line.

    Returns:
        The study.

    Raises:
        UserError: The name is unknown.
    """
    if name not in STUDIES:
        raise unknown_name("study", name, STUDIES)
    study: Study = importlib.import_module(STUDIES[name]).STUDY
    return study


def _asked(
    study: Study,
    quick: bool,
    data: str | None,
    tasks: str | None,
    optimizers: str | None,
    seeds: int | None,
) -> Request:
    check_data(data)
    asked = study.request(quick, data)
    if tasks is not None:
        asked = replace(asked, tasks=_parse_tasks(tasks, study))
    if optimizers is not None:
        asked = replace(asked, optimizers=parse_optimizers(optimizers))
    if seeds is not None:
        asked = replace(asked, seeds=check_count(seeds, "--seeds", most=MAX_SEEDS))
    return asked


def _parse_tasks(text: str, study: Study) -> tuple[str, ...]:
    groups = {**GROUPS, **study.groups}
    known = {**{task: (task,) for task in TASKS}, **groups}
    found: dict[str, None] = {}
    for name in parse_names(text, "--tasks", "digits-autoencoder,shakespeare"):
        if name not in known:
            raise unknown_name("task", name, known)
        found |= dict.fromkeys(known[name])
    return tuple(found)


def _drive_with_progress(study: Study, asked: Request, folder: Path, count: int) -> None:
    with progress_display() as display, Workers(count, threads=1) as pool:
        rounds = _Rounds(study.name, display)

        def on_wait(missing: Sequence[Piece]) -> None:
            display.say(
                f"{len(missing)} pieces are claimed by other processes: waiting for them. "
                f"If none is at work, remove {folder / FOLDER_NAME}/*.claim."
            )

        drive(study, asked, folder, pool, rounds.begin, on_wait)


class _Rounds:
    """Shows a bar for each round of a study."""

    def __init__(self, name: str, display: Display) -> None:
        self._name = name
        self._display = display
        self._count = 0

    def begin(self, missing: Sequence[Piece]) -> Callable[[Piece, int], None]:
        """Shows a new round; returns what is told about its progress."""
        number = self._count
        self._count += 1
        left = {piece.key: piece.steps for piece in missing}
        name = f"{self._name}, round {self._count}: {len(missing)} pieces"
        self._display.add(name, sum(left.values()), "begins")

        def on_progress(piece: Piece, steps: int) -> None:
            left[piece.key] -= steps
            done = sum(1 for steps_left in left.values() if steps_left <= 0)
            self._display.advance(number, steps, f"{done} of {len(left)} done", piece.label)

        return on_progress
