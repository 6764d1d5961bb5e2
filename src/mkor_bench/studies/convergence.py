"""Figures 2, 6, 11, 12 and Tables 2-4: steps and time to the first-order baseline, task by task.

See ``tuned`` for the protocol; K-FAC's damping and frequency are tuned as well, and the dampings of
HyLo and Eva.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from mkor_bench.report.section import Section
from mkor_bench.studies.defaults import SEARCHED
from mkor_bench.studies.finding import Check, judge
from mkor_bench.studies.kept import Kept
from mkor_bench.studies.outcome import TaskOutcome, median
from mkor_bench.studies.study import Report, Request, Study
from mkor_bench.studies.tuned import Tuned, grid_of, usual_tasks
from mkor_bench.studies.tuned_report import conclude_tuned
from mkor_bench.summary import OptimizerResult
from mkor_bench.tasks import TASKS

WANTED = (
    *("mnist-autoencoder", "cifar100-autoencoder", "cifar100-convnet", "cifar100-resnet20"),
    *("wikitext-masked", "minilm-rte", "minilm-cola", "minilm-sst2", "minilm-stsb"),
    "minilm-squad",
)
FULL = tuple(task for task in WANTED if task in TASKS)
COMPARED = (
    *("sgd", "adamw", "lamb", "kfac", "kaisa-eigen", "hylo-kis", "kbfgs", "eva"),
    *("mkor", "mkor-h", "mkor-lowrank", "auto"),
)
QUICK = ("sgd", "adamw", "kfac", "eva", "mkor", "mkor-h")
METRIC_SLACK = 0.01
"""By how much of the baseline's a metric may be behind it and count as the same."""

Gain = Callable[[TaskOutcome, OptimizerResult], float]


def checks(outcomes: Sequence[TaskOutcome]) -> list[Check]:
    """Compares with the paper by medians over the tasks.

    Args:
        outcomes: One for each task.

    Returns:
        Checks on what was run; none where MKOR was not.
    """
    steps, seconds = TaskOutcome.step_gain, TaskOutcome.time_gain
    out = [
        _above("mkor", steps, outcomes, "MKOR needs {:.2f} times fewer steps than the baseline"),
        _above("mkor", seconds, outcomes, "MKOR needs {:.2f} times less time than the baseline"),
        _above("mkor-h", seconds, outcomes, "MKOR-H needs {:.2f} times less time"),
        *(_faster("mkor", rival, outcomes) for rival in ("kfac", "kaisa-eigen", "eva", "hylo-kis")),
        _as_good("mkor", outcomes),
    ]
    return [check for check in out if check is not None]


def _above(name: str, gain: Gain, outcomes: Sequence[TaskOutcome], told: str) -> Check | None:
    found = [(outcome, outcome.of(name)) for outcome in outcomes]
    value = median([gain(outcome, result) for outcome, result in found if result is not None])
    if math.isnan(value):
        return None
    return Check(f"{told.format(value)} in the median, above 1", value > 1)


def _faster(name: str, rival: str, outcomes: Sequence[TaskOutcome]) -> Check | None:
    """Counts the tasks where one takes less time to the target than another."""
    pairs = [(outcome, outcome.of(name), outcome.of(rival)) for outcome in outcomes]
    gains = [
        (outcome.time_gain(ours), outcome.time_gain(theirs))
        for outcome, ours, theirs in pairs
        if ours is not None and theirs is not None
    ]
    known = [(ours, theirs) for ours, theirs in gains if not math.isnan(ours + theirs)]
    if not known:
        return None
    wins = sum(ours > theirs for ours, theirs in known)
    told = f"{name} takes less time than {rival} on {wins} of {len(known)} tasks, more than half"
    return Check(told, wins > len(known) / 2)


def _as_good(name: str, outcomes: Sequence[TaskOutcome]) -> Check | None:
    """Counts the tasks where the test metric is as good as that of the best first-order one."""
    found = []
    for outcome in outcomes:
        result, target = outcome.of(name), outcome.result.target
        if result is not None and target is not None:
            ours, theirs = result.metric[0], target.metric[0]
            sign = 1 if outcome.result.task.higher_is_better else -1
            found.append(sign * (ours - theirs) >= -METRIC_SLACK * abs(theirs))
    if not found:
        return None
    told = (
        f"{name}'s test metric is as good as the baseline's on {sum(found)} of {len(found)} tasks"
    )
    return Check(f"{told}, more than half", sum(found) > len(found) / 2)


def report(asked: Request, kept: Kept, folder: Path) -> Report:
    """Writes the section."""
    outcomes = _tuned(asked, kept).outcomes()
    verdict, reason = judge(checks(outcomes), asked.quick)
    section = Section(
        study="convergence",
        title="Steps and time to the first-order baseline",
        source="Figures 2, 6, 11, 12, Tables 2-4",
        claim=(
            "MKOR reaches the baseline's quality in fewer steps and less time than first-order "
            "optimizers (1.26 to 2.57 times), K-FAC, HyLo and Eva, MKOR-H in the least of all; "
            "the metrics are as good or better."
        ),
        measured=(
            f"{len(outcomes)} tasks, every optimizer tuned alike, seeds: {asked.seeds}. The "
            "baseline is the lowest final loss of the first-order optimizers; seconds are steps "
            "times the median ratio of step times."
        ),
        verdict=verdict,
        reason=reason,
    )
    groups: Mapping[str, Sequence[TaskOutcome]] = {"choice": outcomes}
    return conclude_tuned(asked, kept, folder, section, groups)


def _tuned(asked: Request, kept: Kept) -> Tuned:
    return Tuned(asked, kept, SEARCHED)


def _request(quick: bool, data: str | None) -> Request:
    tasks, grid = usual_tasks(data, FULL, quick), grid_of(quick)
    if quick:
        return Request(tasks[:2], QUICK, 1, quick, data, grid)
    return Request(tasks, COMPARED, 3, quick, data, grid)


STUDY = Study(
    name="convergence",
    description="steps and time to the best first-order loss, every optimizer tuned, by task",
    request=_request,
    pieces=lambda asked, kept: _tuned(asked, kept).pieces(),
    report=report,
)
