"""Figure 3: where the time of a step goes, by method and model.

A step of each method is timed by stage, once as a step that updates (and inverts) the factors and
once as one that does not, in turns with SGD's. What is shown is the mean step at the method's own
interval.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from mkor_bench.report.chart import draw_stacks, finish, name_beside, new_figure, save_figure
from mkor_bench.report.section import Figure, Section, Table
from mkor_bench.studies.finding import Check, conclude, judge
from mkor_bench.studies.kept import Kept
from mkor_bench.studies.measure import interval
from mkor_bench.studies.piece import Piece
from mkor_bench.studies.stages import Stages, mean_step, stages_of, stages_piece
from mkor_bench.studies.study import Report, Request, Study
from mkor_bench.studies.workloads import workloads

COMPARED = (
    *("sgd", "adamw", "lamb", "kfac", "kaisa-eigen", "sngd", "hylo-kis", "hylo-kid", "kbfgs"),
    *("eva", "mkor", "mkor-lowrank", "auto"),
)
SHOWN = {
    "passes": "forward and backward",
    "factors": "factors, in the passes",
    "update": "update and inversion",
    "precondition": "preconditioning",
    "weights": "weights",
}
SMALL = 0.2
"""The largest share of a step that counts as small beside the whole."""


def pieces(asked: Request, kept: Kept) -> Sequence[Piece]:
    """Returns a measurement for each model and optimizer."""
    del kept
    models = workloads(asked.quick)
    return [stages_piece(m, asked.quick, name) for m in models for name in asked.optimizers]


def checks(found: Mapping[str, Mapping[str, Stages]]) -> list[Check]:
    """Compares the cost of second-order information with what the paper says of it.

    Args:
        found: Stages by model and optimizer.

    Returns:
        Checks for each model that has the methods.
    """
    out = []
    for model, own in found.items():
        cost = {name: _of_information(stages) for name, stages in own.items()}
        for rival in ("kfac", "kaisa-eigen", "hylo-kid", "sngd"):
            if {"mkor", rival} <= cost.keys():
                times = cost[rival] / cost["mkor"]
                out.append(Check(f"{model}: {rival}'s is {times:.1f} times MKOR's", times > 1))
        if "mkor" in own:
            step = mean_step(own["mkor"], interval("mkor"))
            share = (step["factors"] + step["update"]) / step["total"]
            told = f"{model}: MKOR's is {share:.0%} of its mean step, at most {SMALL:.0%}"
            out.append(Check(told, share <= SMALL))
    return out


def _of_information(stages: Stages) -> float:
    """Returns the seconds of factors and their inversion in a step that updates them."""
    step = mean_step(stages, 1)
    return max(step["factors"] + step["update"], 1e-9)


def report(asked: Request, kept: Kept, folder: Path) -> Report:
    """Writes the section."""
    found: dict[str, dict[str, Stages]] = {}
    for model in workloads(asked.quick):
        known = {name: stages_of(kept, model, asked.quick, name) for name in asked.optimizers}
        found[model] = {name: stages for name, stages in known.items() if stages is not None}
    verdict, reason = judge(checks(found), asked.quick)
    _draw(folder / "breakdown.png", found)
    models = "; ".join(f"{m}: {told}" for m, (told, _) in workloads(asked.quick).items())
    section = Section(
        study="breakdown",
        title="Where the time of a step goes",
        source="Figure 3",
        claim=(
            "K-FAC's inversions are costly on both models and HyLo's kernels on BERT; factors and "
            "inversions of MKOR cost much less than either, and little beside the whole step."
        ),
        measured=(
            f"{models}. Medians of steps in turns with SGD's, one thread. The verdict compares a "
            "step that updates and inverts the factors; the chart shows the mean step at each "
            "method's own interval."
        ),
        verdict=verdict,
        reason=reason,
        tables=tuple(_table(model, own) for model, own in found.items()),
        figures=(Figure("breakdown.png", "The stages of a mean step of each optimizer"),),
    )
    return conclude(asked, kept, folder, section, {"stages": found})


def _table(model: str, found: Mapping[str, Stages]) -> Table:
    columns = ("optimizer", "interval", *SHOWN.values(), "mean step", "over SGD's", "an update")
    rows = []
    for name, stages in found.items():
        step = mean_step(stages, interval(name))
        parts = [1e3 * step[stage] for stage in (*SHOWN, "total")]
        ratio = step["total"] / stages["sgd"]
        rows.append((name, interval(name), *parts, ratio, 1e3 * _of_information(stages)))
    return Table(f"{model}, ms of processor time", columns, tuple(rows))


def _draw(path: Path, found: Mapping[str, Mapping[str, Stages]]) -> None:
    figure, (charts,) = new_figure(1, len(found))
    for axes, (model, own) in zip(charts, found.items(), strict=True):
        steps = [mean_step(stages, interval(name)) for name, stages in own.items()]
        parts = [(told, [1e3 * s[stage] for s in steps]) for stage, told in SHOWN.items()]
        draw_stacks(axes, list(own), parts)
        finish(axes, f"Mean step: {model}", "processor time (ms)", "", legend=False)
    name_beside(figure, charts[0])
    save_figure(path, figure)


STUDY = Study(
    name="breakdown",
    description="the time of a step by stage, by method and model",
    request=lambda quick, data: Request((), COMPARED, seeds=0, quick=quick, data=data),
    pieces=pieces,
    report=report,
)
