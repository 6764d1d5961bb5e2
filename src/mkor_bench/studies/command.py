"""What ``mkor study`` does, once its options are read."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from rich.markdown import Markdown

from mkor_bench.console import Display, output_console, progress_display
from mkor_bench.errors import UserError, unknown_name
from mkor_bench.files import prepare_folder
from mkor_bench.interrupt import raises_interrupt
from mkor_bench.options import MAX_SEEDS, check_count, parse_names, parse_optimizers
from mkor_bench.report.section import Section
from mkor_bench.studies import ALL, STUDIES
from mkor_bench.studies.drive import drive
from mkor_bench.studies.kept import FOLDER_NAME, Kept
from mkor_bench.studies.piece import Piece
from mkor_bench.studies.study import Report, Request, Study
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
        name: Of the study, or "all".
        quick: Whether to do a small part at a small size.
        tasks: Tasks and groups of them, separated by commas, or None for the study's own.
        optimizers: Names, separated by commas, or None for the study's own.
        seeds: How many, or None for the study's own.
        workers: Processes side by side, or None for one a core.
        output: The output folder, or None for ``runs/study/NAME``. Of all studies, each gets a
            folder of its name in it.
        data: What --data named.
        report_only: Whether to report on what is there and run nothing.
    """
    given = {"--tasks": tasks, "--optimizers": optimizers, "--seeds": seeds}
    if name == ALL:
        _refuse_given(given, "all studies differ in their", "name one study")
    check_data(data)
    studies = [find_study(each) for each in (STUDIES if name == ALL else (name,))]
    asked = [_asked(study, quick, data, tasks, optimizers, seeds) for study in studies]
    root = output or Path("runs/study") / (f"{name}-quick" if quick else name)
    folders = [root / study.name if name == ALL else root for study in studies]
    count = cores() if workers is None else check_count(workers, "--workers", most=4 * cores())
    torch.set_num_threads(1)
    for task in dict.fromkeys(task for request in asked for task in request.tasks):
        TaskSource(task, data, quick).load()  # what is missing shows before work begins
    for folder in folders:
        prepare_folder(folder, (), (FOLDER_NAME,))
    work = list(zip(studies, asked, folders, strict=True))
    with raises_interrupt():
        reports = _report(work) if report_only else _do(work, count)
    _show(reports, folders, root)


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
        raise unknown_name("study", name, [*STUDIES, ALL])
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
    asked = study.request(quick, data)
    has = {
        "--tasks": (tasks, asked.tasks),
        "--optimizers": (optimizers, asked.optimizers),
        "--seeds": (seeds, asked.seeds),
    }
    absent = {option: given for option, (given, own) in has.items() if not own}
    _refuse_given(absent, f"study {study.name!r} has no", "leave the option out")
    if tasks is not None:
        asked = replace(asked, tasks=_parse_tasks(tasks, study))
    if optimizers is not None:
        asked = replace(asked, optimizers=parse_optimizers(optimizers))
    if seeds is not None:
        asked = replace(asked, seeds=check_count(seeds, "--seeds", most=MAX_SEEDS))
    return asked


def _refuse_given(given: Mapping[str, object], why: str, remedy: str) -> None:
    for option, value in given.items():
        if value is not None:
            raise UserError(f"{option} {value}: {why} {option.strip('-')}; {remedy}.")


def _parse_tasks(text: str, study: Study) -> tuple[str, ...]:
    groups = {**GROUPS, **study.groups}
    known = {**{task: (task,) for task in TASKS}, **groups}
    found: dict[str, None] = {}
    for name in parse_names(text, "--tasks", "digits-autoencoder,shakespeare"):
        if name not in known:
            raise unknown_name("task", name, known)
        found |= dict.fromkeys(known[name])
    return tuple(found)


def _report(work: Sequence[tuple[Study, Request, Path]]) -> list[Report]:
    return [study.report(asked, Kept(folder), folder) for study, asked, folder in work]


def _do(work: Sequence[tuple[Study, Request, Path]], count: int) -> list[Report]:
    """Does all studies, one after the other, each reported as soon as it is done."""
    with ExitStack() as stack:
        rounds = _Rounds(stack.enter_context(progress_display()))
        pool = stack.enter_context(Workers(count, threads=1))
        reports: list[Report] = []
        for study, asked, folder in work:
            rounds.enter(study.name, folder)
            drive(study, asked, folder, pool, rounds.begin, rounds.wait)
            reports += _report([(study, asked, folder)])
    return reports


def _show(reports: Sequence[Report], folders: Sequence[Path], root: Path) -> None:
    console = output_console()
    if len(reports) == 1:
        for part in reports[0].shown:
            console.print(Markdown(part) if isinstance(part, str) else part, "")
        console.print(f"Written to {root}: {', '.join(reports[0].files)}", soft_wrap=True)
        return
    lines = ["| study | paper | verdict |", "| --- | --- | --- |"]
    lines += [_line(report.section) for report in reports]
    console.print(Markdown("\n".join(lines)), "")
    console.print(f"Written to {', '.join(map(str, folders))}", soft_wrap=True)


def _line(section: Section) -> str:
    return f"| {section.study} | {section.source} | {section.verdict.value} |"


class _Rounds:
    """Shows a bar for each round of the studies."""

    def __init__(self, display: Display) -> None:
        self._display = display
        self._bars = 0

    def enter(self, study: str, folder: Path) -> None:
        """Goes on to another study."""
        self._study, self._folder, self._count = study, folder, 0

    def begin(self, missing: Sequence[Piece]) -> Callable[[Piece, int], None]:
        """Shows a new round; returns what is told about its progress."""
        number = self._bars
        self._bars += 1
        self._count += 1
        left = {piece.key: piece.steps for piece in missing}
        name = f"{self._study}, round {self._count}: {len(missing)} pieces"
        self._display.add(name, sum(left.values()), "begins")

        def on_progress(piece: Piece, steps: int) -> None:
            left[piece.key] -= steps
            done = sum(1 for steps_left in left.values() if steps_left <= 0)
            self._display.advance(number, steps, f"{done} of {len(left)} done", piece.label)

        return on_progress

    def wait(self, missing: Sequence[Piece]) -> None:
        """Tells that other processes are at all that is left."""
        self._display.say(
            f"{len(missing)} pieces are claimed by other processes: waiting for them. "
            f"If none is at work, remove {self._folder / FOLDER_NAME}/*.claim."
        )
