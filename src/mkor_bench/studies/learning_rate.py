"""Table 5: steps to converge over four decades of learning rate, D and * as the paper marks them.

The paper counts epochs until convergence and does not define it. Here a run converges at the step
where its smoothed loss has fallen by 95 % of the way from the first loss to the lowest final loss
of any run on the task. A run that never gets there has found a worse minimum (*), and the step is
that at which it has done 95 % of its own way. D is a run whose loss stopped being finite, or ended
no lower than it began.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from mkor_bench.report.chart import draw_lines, finish, name_beside, new_figure, save_figure
from mkor_bench.report.section import Cell, Figure, Section, Table
from mkor_bench.studies.finding import Check, conclude, judge
from mkor_bench.studies.kept import Kept
from mkor_bench.studies.piece import Piece
from mkor_bench.studies.runs import places_of, run_of, run_piece
from mkor_bench.studies.study import Report, Request, Study
from mkor_bench.studies.tuned import usual_tasks
from mkor_bench.summary import final_loss, smooth, window
from mkor_bench.train import Run

RATES = (10.0, 1.0, 0.1, 0.01)
COMPARED = ("sgd", "lamb", "kfac", "kaisa-eigen", "hylo-kis", "eva", "mkor", "mkor-lowrank")
QUICK = ("sgd", "kaisa-eigen", "mkor")
SHARE = 0.95
"""Of the way from the first loss to the lowest, after which a run has converged."""

SPREAD = 1.3
"""The most that MKOR's steps may differ by over the rates; the paper's differ by 1.24."""

Ends = Mapping[str, Mapping[float, tuple[int | None, str]]]
"""By optimizer and rate: the steps and "", "*", or None and "D"."""


def pieces(asked: Request, kept: Kept) -> Sequence[Piece]:
    """Returns one run for each task, optimizer and rate."""
    del kept
    return [
        run_piece(place, name, lr, 0)
        for place in places_of(asked)
        for name in asked.optimizers
        for lr in RATES
    ]


def ends(runs: Mapping[tuple[str, float], Run]) -> dict[str, dict[float, tuple[int | None, str]]]:
    """Tells when each run converged.

    Args:
        runs: By optimizer and learning rate, all of one task and one seed.

    Returns:
        See :data:`Ends`.
    """
    sound = [run for run in runs.values() if not _failed(run)]
    lowest = min((final_loss(run) for run in sound), default=math.nan)
    out: dict[str, dict[float, tuple[int | None, str]]] = {}
    for (name, lr), run in runs.items():
        if _failed(run):
            found: tuple[int | None, str] = None, "D"
        else:
            step = _step(run, lowest)
            found = (step, "") if step is not None else (_step(run, final_loss(run)), "*")
        out.setdefault(name, {})[lr] = found
    return out


def _failed(run: Run) -> bool:
    return run.diverged or not final_loss(run) < run.losses[0]


def _step(run: Run, lowest: float) -> int | None:
    goal = run.losses[0] - SHARE * (run.losses[0] - lowest)
    width = window(run.settings.steps)
    for step, loss in enumerate(smooth(run.losses, width), 1):
        if step >= width and loss <= goal:
            return step
    return None


def checks(tasks: Mapping[str, Ends]) -> list[Check]:
    """Compares with the paper, task by task."""
    out = []
    for task, found in tasks.items():
        if "mkor" not in found:
            continue
        ours = found["mkor"]
        marks = [mark for _, mark in ours.values() if mark]
        good = len(ours) - len(marks)
        told = f"{task}: MKOR converges at {good} of {len(ours)} rates; claimed: all"
        out.append(Check(told, not marks))
        steps = [step for step, mark in ours.values() if step is not None and not mark]
        if steps and not marks:
            spread = max(steps) / min(steps)
            told = f"{task}: its steps differ by {spread:.2f} times, at most {SPREAD}"
            out.append(Check(told, spread <= SPREAD))
        others = {
            n: sum(bool(m) for _, m in own.values()) for n, own in found.items() if n != "mkor"
        }
        if others:
            fewest = min(others.values())
            told = f"{task}: it fails at {len(marks)} rates, the best of the others at {fewest}"
            out.append(Check(told, len(marks) <= fewest))
    return out


def report(asked: Request, kept: Kept, folder: Path) -> Report:
    """Writes the section."""
    tasks, losses = {}, {}
    for place in places_of(asked):
        known = {(n, lr): run_of(kept, place, n, lr, 0) for n in asked.optimizers for lr in RATES}
        runs = {key: run for key, run in known.items() if run is not None}
        tasks[place.task] = ends(runs)
        losses[place.task] = {key: final_loss(run) for key, run in runs.items()}
    verdict, reason = judge(checks(tasks), asked.quick)
    _draw(folder / "learning-rate.png", tasks, losses)
    section = Section(
        study="learning-rate",
        title="Sensitivity to the learning rate",
        source="Table 5",
        claim=(
            "MKOR converges at learning rates from 0.01 to 10 in nearly as many epochs (76 to 94), "
            "where others diverge (D), or find a worse minimum (*)."
        ),
        measured=(
            f"One run for each rate on {', '.join(tasks)}: the step at which the smoothed loss has "
            f"done {SHARE:.0%} of the way to the lowest final loss of the task."
        ),
        verdict=verdict,
        reason=reason,
        tables=tuple(_table(task, found) for task, found in tasks.items()),
        figures=(Figure("learning-rate.png", "Final loss and steps to converge by learning rate"),),
    )
    return conclude(asked, kept, folder, section)


def _table(task: str, found: Ends) -> Table:
    rows = tuple(
        (name, *(_cell(*own[lr]) if lr in own else None for lr in RATES))
        for name, own in found.items()
    )
    return Table(f"Steps to converge, {task}", ("optimizer", *map(str, RATES)), rows)


def _cell(step: int | None, mark: str) -> Cell:
    return f"{step or ''}{mark}" if mark else step


def _draw(
    path: Path, tasks: Mapping[str, Ends], losses: Mapping[str, Mapping[tuple[str, float], float]]
) -> None:
    figure, charts = new_figure(len(tasks), 2)
    for (left, right), (task, found) in zip(charts, tasks.items(), strict=True):
        steps, finals = [], []
        for name, own in found.items():
            good = {lr: step for lr, (step, mark) in own.items() if step is not None and not mark}
            steps.append((name, list(good), list(good.values())))
            sound = {lr: losses[task][name, lr] for lr, (_, mark) in own.items() if mark != "D"}
            finals.append((name, list(sound), list(sound.values())))
        for axes, curves, told, y in (
            (left, finals, "no mark: D", "final training loss"),
            (right, steps, "no mark: D or *", "steps to converge"),
        ):
            draw_lines(axes, curves)
            axes.set(xscale="log", xlim=(min(RATES) / 2, max(RATES) * 2))
            finish(axes, f"{task}; {told}", "learning rate", y, legend=False)
    name_beside(figure, charts[0][0])
    save_figure(path, figure)


def _request(quick: bool, data: str | None) -> Request:
    tasks = usual_tasks(data, ("digits-classifier", "cifar100-resnet20"), quick)
    if quick:
        return Request(("digits-classifier",), QUICK, seeds=0, quick=True, data=data)
    return Request(tasks, COMPARED, seeds=0, data=data)


STUDY = Study(
    name="learning-rate",
    description="steps to converge over four decades of learning rate, by optimizer",
    request=_request,
    pieces=pieces,
    report=report,
)
