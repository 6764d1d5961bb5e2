"""What ``mkor study`` does, once its options are read."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
from rich.markdown import Markdown

from mkor_bench.console import Display, output_console, progress_display
from mkor_bench.errors import UserError, unknown_name
from mkor_bench.files import prepare_folder
from mkor_bench.interrupt import raises_interrupt
from mkor_bench.options import MAX_SEEDS, check_count, parse_lrs, parse_names, parse_optimizers
from mkor_bench.report.section import Section
from mkor_bench.studies import ALL, STUDIES
from mkor_bench.studies.drive import drive
from mkor_bench.studies.kept import FOLDER_NAME, Kept
from mkor_bench.studies.piece import Piece
from mkor_bench.studies.study import Report, Request, Study
from mkor_bench.studies.tuning import place
from mkor_bench.tasks import GROUPS, TASKS
from mkor_bench.tasks.source import TaskSource, check_data
from mkor_bench.workers import Workers, cores

_WHAT = {"--lrs": "learning rates to tune", "--autocast": "training on tasks"}
"""What options stand for, where their names do not tell."""


def run_study(
    name: str,
    *,
    quick: bool,
    tasks: str | None,
    optimizers: str | None,
    seeds: int | None,
    lrs: str | None,
    autocast: bool,
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
        lrs: Learning rates that tuning begins with, separated by commas, or None for the study's
            own.
        autocast: Whether to train under bfloat16 autocast.
        workers: Processes side by side, or None for one a core.
        output: The output folder, or None for ``runs/study/NAME``. Of all studies, each gets a
            folder of its name in it.
        data: What --data named.
        report_only: Whether to report on what is there and run nothing.
    """
    given = Given(tasks, optimizers, seeds, lrs, autocast or None)
    if name == ALL:
        _refuse_given(given.options(), "all studies differ in their", "name one study")
    check_data(data)
    studies = [find_study(each) for each in (STUDIES if name == ALL else (name,))]
    asked = [_asked(study, quick, data, given) for study in studies]
    root = output or Path("runs/study") / (f"{name}-quick" if quick else name)
    if report_only and not root.exists():
        raise UserError(
            f"there is no folder {str(root)!r} to report on: name that of a study with --output, "
            "or run it without --report."
        )
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


@dataclass(frozen=True)
class Given:
    """What the command line says of a study; None where it says nothing.

    Attributes:
        tasks: Names, separated by commas.
        optimizers: The same.
        seeds: How many.
        lrs: Learning rates, separated by commas.
        autocast: True, if it was asked for.
    """

    tasks: str | None
    optimizers: str | None
    seeds: int | None
    lrs: str | None
    autocast: bool | None

    def options(self) -> dict[str, object]:
        """Returns what is given by the options' names."""
        return {f"--{field.name}": getattr(self, field.name) for field in fields(self)}


def _asked(study: Study, quick: bool, data: str | None, given: Given) -> Request:
    own = study.request(quick, data)
    # What trains on no tasks has nothing to put under autocast.
    has = (own.tasks, own.optimizers, own.seeds, own.grid, own.tasks)
    options = given.options()
    absent = {option: options[option] for option, it in zip(options, has, strict=True) if not it}
    _refuse_given(absent, f"study {study.name!r} has no", "leave the option out")
    if given.tasks is not None:
        own = replace(own, tasks=_parse_tasks(given.tasks, study))
    if given.optimizers is not None:
        own = replace(own, optimizers=parse_optimizers(given.optimizers))
    if given.seeds is not None:
        own = replace(own, seeds=check_count(given.seeds, "--seeds", most=MAX_SEEDS))
    if given.lrs is not None:
        own = replace(own, grid=_parse_grid(given.lrs))
    return replace(own, autocast=bool(given.autocast))


def _refuse_given(given: Mapping[str, object], why: str, remedy: str) -> None:
    for option, value in given.items():
        if value is not None:
            typed = option if value is True else f"{option} {value}"
            raise UserError(f"{typed}: {why} {_WHAT.get(option, option.strip('-'))}; {remedy}.")


def _parse_grid(text: str) -> tuple[int, ...]:
    found = {lr: place(lr) for lr in parse_lrs(text)}
    for lr, where in found.items():
        if where is None:
            raise UserError(
                f"--lrs: {lr:g} is not on the common grid, which everything is tuned on: "
                "give 1 or 3 times powers of ten, such as 0.0001,0.0003,0.001."
            )
    return tuple(where for where in found.values() if where is not None)


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
