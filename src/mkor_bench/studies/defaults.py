"""Which optimizer, with which defaults: every one tuned in the same way, on ten real tasks.

See ``tuned`` for the protocol; K-FAC's damping and frequency are tuned as well, and the dampings of
SNGD, HyLo and Eva. Two tasks are held out: they are reported apart, and defaults must not be chosen
by them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mkor_bench.report.section import Section
from mkor_bench.studies.finding import Check, judge
from mkor_bench.studies.kept import Kept
from mkor_bench.studies.outcome import TaskOutcome
from mkor_bench.studies.piece import Piece
from mkor_bench.studies.study import Report, Request, Study
from mkor_bench.studies.tuned import Tuned, grid_of, usual_tasks
from mkor_bench.studies.tuned_report import conclude_tuned, medians_of

HELD_OUT = ("cifar100-resnet20", "minilm-polarity")
CHOICE = (
    *("digits-autoencoder", "digits-classifier", "mnist-autoencoder", "mnist-convnet"),
    *("cifar100-convnet", "cifar100-autoencoder", "shakespeare", "wikitext-masked"),
)

KFAC_SEARCH: Mapping[str, Sequence[Any]] = {
    "damping": (0.001, 0.01, 0.03, 0.1),
    "inverse_update_steps": (1, 50),
}
"""What is tried besides the row's own damping of 0.003 and interval of 10 steps."""

DAMPINGS: Mapping[str, Sequence[Any]] = {"damping": (0.0001, 0.001, 0.01, 0.1)}
"""The same for absolute dampings, whose best follows the size of the gradients; the rows have 1."""

SEARCHED = {
    **dict.fromkeys(("kfac", "kaisa-eigen"), KFAC_SEARCH),
    **dict.fromkeys(("sngd", "hylo-kis", "hylo-kid", "eva"), DAMPINGS),
}
"""Options that are tuned too, by the optimizer's name."""

COMPARED = (
    *("sgd", "adamw", "lamb", "soap", "muon", "kfac", "mkor", "mkor-adamw", "mkor-lowrank"),
    *("mkor-lowrank-adamw", "auto"),
)
QUICK_OPTIMIZERS = ("sgd", "adamw", "muon", "mkor", "auto")


def request(quick: bool, data: str | None) -> Request:
    """Returns what is done unless told otherwise.

    Args:
        quick: Three small tasks and a few optimizers, in minutes.
        data: What --data named; without any, the quick tasks are those that need none.

    Returns:
        The request.
    """
    grid = grid_of(quick)
    if not quick:
        return Request((*CHOICE, *HELD_OUT), COMPARED, 3, quick, data, grid)
    return Request(usual_tasks(data, (), quick), QUICK_OPTIMIZERS, 2, quick, data, grid)


def pieces(asked: Request, kept: Kept) -> Sequence[Piece]:
    """Returns what is wanted by now."""
    return Tuned(asked, kept, SEARCHED).pieces()


def report(asked: Request, kept: Kept, folder: Path) -> Report:
    """Writes the section."""
    return write_report(asked, Tuned(asked, kept, SEARCHED).outcomes(), HELD_OUT, kept, folder)


def write_report(
    asked: Request,
    outcomes: Sequence[TaskOutcome],
    held_out: Sequence[str],
    kept: Kept,
    folder: Path,
) -> Report:
    """Writes the section.

    Args:
        asked: What was done.
        outcomes: One for each task.
        held_out: The names of tasks that are reported apart.
        kept: The results.
        folder: The output folder.
    """
    groups = {
        "choice": [outcome for outcome in outcomes if outcome.name not in held_out],
        "held_out": [outcome for outcome in outcomes if outcome.name in held_out],
    }
    verdict, reason = judge(checks(groups), asked.quick)
    section = Section(
        study="defaults",
        title="One set of defaults on many tasks",
        source="section 4",
        claim=(
            "An optimizer on rank-one or low-rank factors, with the same options on all tasks, "
            "needs fewer steps and less time than the best first-order optimizer."
        ),
        measured=(
            f"{len(outcomes)} tasks, {len(groups['held_out'])} of them held out; seeds at the best "
            f"learning rate, which one more seed found: {asked.seeds}; one thread a run."
        ),
        verdict=verdict,
        reason=reason,
    )
    return conclude_tuned(asked, kept, folder, section, groups)


def checks(groups: Mapping[str, Sequence[TaskOutcome]]) -> list[Check]:
    """Returns one check for each gain of each optimizer on MKOR, in each group of tasks."""
    out = []
    for name in ("mkor", "auto"):
        for group, outcomes in groups.items():
            row = medians_of(name, outcomes)
            where = f"on {row['tasks']} tasks {'held out' if group == 'held_out' else 'chosen by'}"
            for key, told in (("step_gain", "fewer steps"), ("time_gain", "less time")):
                value = row[key]
                text = f"{name} needs {value:.2f} times {told} {where}, in the median"
                out += [] if math.isnan(value) else [Check(text, value > 1)]
    return out


STUDY = Study(
    name="defaults",
    description="every optimizer tuned alike on ten tasks: steps, time, losses, test metrics",
    request=request,
    groups={"choice": CHOICE, "held-out": HELD_OUT},
    pieces=pieces,
    report=report,
)
