"""Figure 4: step time and convergence by the number of steps between updates of the factors.

The time of a step follows exactly from that of a step that updates and of one that does not, which
are timed in turns with SGD's. Convergence is measured by training at each interval, each tuned.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from mkor_bench.report.chart import draw_lines, finish, name_beside, new_figure, save_figure
from mkor_bench.report.section import Figure, Section, Table
from mkor_bench.studies.finding import Check, conclude, judge
from mkor_bench.studies.kept import Kept
from mkor_bench.studies.outcome import TaskOutcome
from mkor_bench.studies.piece import Piece
from mkor_bench.studies.stages import Stages, mean_step, stages_of, stages_piece
from mkor_bench.studies.study import Report, Request, Study
from mkor_bench.studies.tuned import Tuned, grid_of, usual_tasks
from mkor_bench.studies.workloads import workloads

METHODS = ("mkor", "kfac", "kaisa-eigen", "hylo-kid")
INTERVALS = (1, 3, 10, 30, 100)
QUICK_INTERVALS = (1, 10, 100)
FREQUENT, RARE = 10, 100
"""The intervals of MKOR and of K-FAC at scale, which the claims are about."""

INDEPENDENT, HEAVY = 1.25, 1.5
"""How much slower steps are at FREQUENT than at RARE: at most, to count as almost independent; at
least, to count as dependent."""

Finals = Mapping[int, tuple[float, float]]
"""Mean final loss and its spread over seeds, by interval."""


def at(method: str, interval: int) -> str:
    """Returns the name of a method with an interval between updates, and inversions if any."""
    inverts = ":inverse_update_steps={0}" if method in {"kfac", "kaisa-eigen"} else ""
    return f"{method}:factor_update_steps={{0}}{inverts}".format(interval)


def _intervals(asked: Request) -> tuple[int, ...]:
    return QUICK_INTERVALS if asked.quick else INTERVALS


def _tuned(asked: Request, kept: Kept) -> Tuned:
    names = tuple(at(method, i) for method in asked.optimizers for i in _intervals(asked))
    return Tuned(replace(asked, optimizers=names), kept, timed=False)


def pieces(asked: Request, kept: Kept) -> Sequence[Piece]:
    """Returns the trainings, and a measurement of time for each model and method."""
    times = [
        stages_piece(m, asked.quick, at(method, FREQUENT))
        for m in workloads(asked.quick)
        for method in asked.optimizers
    ]
    return [*_tuned(asked, kept).pieces(), *times]


def checks(
    times: Mapping[str, Mapping[str, Stages]], finals: Mapping[str, Mapping[str, Finals]]
) -> list[Check]:
    """Compares with the paper.

    Args:
        times: Stages by model and method.
        finals: Final losses by task and method.

    Returns:
        The checks.
    """
    out = []
    for model, own in times.items():
        slower = {
            method: mean_step(stages, FREQUENT)["total"] / mean_step(stages, RARE)["total"]
            for method, stages in own.items()
        }
        for method, least, most in (("mkor", 0, INDEPENDENT), ("kaisa-eigen", HEAVY, math.inf)):
            if method in slower:
                rule = f"at least {HEAVY}" if least else f"at most {INDEPENDENT}"
                told = f"{slower[method]:.2f} times slower every {FREQUENT} than every {RARE} steps"
                met = least <= slower[method] <= most
                out.append(Check(f"{model}: {method} is {told}, {rule}", met))
    for task, methods in finals.items():
        losses = {i: loss for i, loss in methods.get("mkor", {}).items() if math.isfinite(loss[0])}
        if len(losses) > 1:
            first, last = losses[min(losses)], losses[max(losses)]
            told = (
                f"{task}: MKOR ends at {first[0]:.4g} ± {first[1]:.2g} with an update every "
                f"{min(losses)} steps, at {last[0]:.4g} ± {last[1]:.2g} every {max(losses)}; "
                "claimed: lower by more than the spread"
            )
            out.append(Check(told, last[0] - first[0] > max(first[1], last[1])))
    return out


def report(asked: Request, kept: Kept, folder: Path) -> Report:
    """Writes the section."""
    times: dict[str, dict[str, Stages]] = {}
    for model in workloads(asked.quick):
        known = {m: stages_of(kept, model, asked.quick, at(m, FREQUENT)) for m in asked.optimizers}
        times[model] = {method: stages for method, stages in known.items() if stages is not None}
    outcomes = _tuned(asked, kept).outcomes()
    finals = {outcome.name: _finals(asked, outcome) for outcome in outcomes}
    verdict, reason = judge(checks(times, finals), asked.quick)
    _draw(folder / "frequency.png", _intervals(asked), times, finals)
    section = Section(
        study="frequency",
        title="How often to update the factors",
        source="Figure 4",
        claim=(
            "The time of KAISA's steps depends heavily on how often it inverts, MKOR's hardly at "
            "all; and more frequent updates converge faster."
        ),
        measured=(
            f"Mean steps at intervals of {', '.join(map(str, _intervals(asked)))} steps on "
            f"{' and '.join(times)}; final losses on {', '.join(finals)}, each interval tuned "
            f"over the learning rate, seeds: {asked.seeds}."
        ),
        verdict=verdict,
        reason=reason,
        tables=(
            *(_time_table(_intervals(asked), model, own) for model, own in times.items()),
            *(_loss_table(_intervals(asked), task, own) for task, own in finals.items()),
        ),
        figures=(Figure("frequency.png", "Time of a step and final loss by interval"),),
    )
    return conclude(asked, kept, folder, section, {"stages": times, "finals": finals})


def _finals(asked: Request, outcome: TaskOutcome) -> dict[str, dict[int, tuple[float, float]]]:
    out: dict[str, dict[int, tuple[float, float]]] = {}
    for method in asked.optimizers:
        known = {i: outcome.of(at(method, i)) for i in _intervals(asked)}
        out[method] = {i: result.final_loss for i, result in known.items() if result is not None}
    return out


def _time_table(intervals: Sequence[int], model: str, own: Mapping[str, Stages]) -> Table:
    rows = [
        (method, *(mean_step(stages, i)["total"] / stages["sgd"] for i in intervals))
        for method, stages in own.items()
    ]
    columns = ("method", *(f"every {i}" for i in intervals))
    return Table(f"Mean step over SGD's, {model}", columns, tuple(rows))


def _loss_table(intervals: Sequence[int], task: str, own: Mapping[str, Finals]) -> Table:
    columns = ["method"]
    for i in intervals:
        columns += [f"every {i}", f"± every {i}"]
    rows = []
    for method, finals in own.items():
        pairs = [finals.get(i, (math.nan, math.nan)) for i in intervals]
        cells = [x if math.isfinite(x) else None for pair in pairs for x in pair]
        rows.append((method, *cells))
    return Table(f"Final training loss, {task}", tuple(columns), tuple(rows))


def _draw(
    path: Path,
    intervals: Sequence[int],
    times: Mapping[str, Mapping[str, Stages]],
    finals: Mapping[str, Mapping[str, Finals]],
) -> None:
    figure, (charts,) = new_figure(1, len(times) + len(finals), width=4.6)
    told = "steps between updates"
    for axes, (model, own) in zip(charts, times.items(), strict=False):
        curves = [
            (method, intervals, [mean_step(s, i)["total"] / s["sgd"] for i in intervals])
            for method, s in own.items()
        ]
        draw_lines(axes, curves)
        axes.set(xscale="log", yscale="log")
        finish(axes, f"Time: {model}", told, "mean step over SGD's", legend=False)
    for axes, (task, methods) in zip(charts[len(times) :], finals.items(), strict=True):
        losses = [(m, list(own), [loss for loss, _ in own.values()]) for m, own in methods.items()]
        draw_lines(axes, losses)
        axes.set(xscale="log")
        finish(axes, f"Convergence: {task}", told, "final training loss", legend=False)
    name_beside(figure, charts[0])
    save_figure(path, figure)


def _request(quick: bool, data: str | None) -> Request:
    grid = grid_of(quick)
    if quick:
        return Request(("digits-autoencoder",), ("mkor", "kfac"), 1, quick, data, grid)
    tasks = usual_tasks(data, ("digits-autoencoder", "cifar100-autoencoder", "shakespeare"), quick)
    return Request(tasks, METHODS, 3, quick, data, grid)


STUDY = Study(
    name="frequency",
    description="step time and convergence by the steps between updates of the factors",
    request=_request,
    pieces=pieces,
    report=report,
)
