"""Section 3.2: what MKOR-H saves, and when it switches.

SGD and MKOR are tuned; MKOR-H runs at MKOR's learning rate, so that the switch alone differs. The
target is SGD's final loss. Seconds are those of the runs, processor time of one thread.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mkor_bench.report.chart import draw_lines, finish, new_figure, save_figure
from mkor_bench.report.section import Figure, Section, Table
from mkor_bench.studies.finding import Check, conclude, judge
from mkor_bench.studies.kept import Kept
from mkor_bench.studies.piece import Piece
from mkor_bench.studies.runs import Place, run_of, run_piece
from mkor_bench.studies.study import Report, Request, Study
from mkor_bench.studies.tuned import Tuned, small_request
from mkor_bench.summary import OptimizerResult, mean_curve, smooth, window

TUNED, HYBRID = ("sgd", "mkor"), "mkor-h"


@dataclass(frozen=True)
class Row:
    """One optimizer on one task.

    Attributes:
        result: Its runs.
        handed_over: The step of the hand-over in each run, None where there was none.
    """

    result: OptimizerResult
    handed_over: tuple[int | None, ...] = ()

    @property
    def seconds(self) -> float:
        """The mean time of a run."""
        return statistics.fmean(run.seconds[-1] for run in self.result.runs)


Rows = Mapping[str, Row]


def pieces(asked: Request, kept: Kept) -> Sequence[Piece]:
    """Returns what is wanted by now: the tuned ones, then MKOR-H at MKOR's learning rate."""
    tuned = _tuned(asked, kept)
    return [*tuned.pieces(), *(p for place in tuned.places for p in _hybrids(asked, tuned, place))]


def _tuned(asked: Request, kept: Kept) -> Tuned:
    return Tuned(replace(asked, optimizers=TUNED), kept, timed=False)


def _hybrids(asked: Request, tuned: Tuned, place: Place) -> list[Piece]:
    best = tuned.tuning(place, "mkor").best
    seeds = range(asked.seeds if best is not None else 0)
    return [run_piece(place, HYBRID, best[1], seed) for seed in seeds if best is not None]


def _rows(asked: Request, kept: Kept, place: Place) -> dict[str, Row]:
    tuned = _tuned(asked, kept)
    outcome = tuned.outcome(place)
    known = {name: outcome.of(name) for name in TUNED}
    out = {
        name: Row(result) for name, result in known.items() if result is not None and result.runs
    }
    best = tuned.tuning(place, "mkor").best
    if best is None:
        return out
    results = [kept.get(piece) for piece in _hybrids(asked, tuned, place)]
    runs = [run_of(kept, place, HYBRID, best[1], seed) for seed in range(asked.seeds)]
    done = [run for run in runs if run is not None]
    if len(done) == asked.seeds:
        switched = tuple(result.get("handed_over") for result in results if result is not None)
        out[HYBRID] = Row(OptimizerResult(HYBRID, {}, {best[1]: done}), switched)
    return out


def checks(tasks: Mapping[str, Rows]) -> list[Check]:
    """Compares MKOR-H with MKOR, task by task.

    Args:
        tasks: The rows by task.

    Returns:
        Checks; undecided where MKOR-H never switched.
    """
    out = []
    for task, rows in tasks.items():
        if HYBRID not in rows or "mkor" not in rows:
            continue
        ours, mkor = rows[HYBRID], rows["mkor"]
        steps = [step for step in ours.handed_over if step is not None]
        if not steps:
            out.append(Check(f"{task}: MKOR-H never handed over", None))
            continue
        saved = 1 - ours.seconds / mkor.seconds
        told = (
            f"{task}: handing over at step {statistics.median(steps):g} saves {saved:.0%} of time"
        )
        out.append(Check(told, saved > 0))
        (loss, spread), (other, theirs) = ours.result.final_loss, mkor.result.final_loss
        told = f"{task}: it ends at {loss:.4g}, MKOR at {other:.4g}; claimed: within the spread"
        out.append(Check(told, loss - other <= max(spread, theirs)))
        if "sgd" in rows:
            first, second = (reached(row, rows["sgd"]) for row in (ours, mkor))
            told = f"{task}: it reaches SGD's loss in {_told(first)}, MKOR in {_told(second)}"
            out.append(Check(told, first is not None and (second is None or first[1] <= second[1])))
    return out


def reached(row: Row, base: Row) -> tuple[int, float] | None:
    """Returns the steps and seconds to the base's final loss, None if it is not reached."""
    return row.result.reach(base.result.final_loss[0])


def _told(steps: tuple[int, float] | None) -> str:
    return "no time" if steps is None else f"{steps[1]:.2f} s"


def report(asked: Request, kept: Kept, folder: Path) -> Report:
    """Writes the section."""
    places = _tuned(asked, kept).places
    tasks = {place.task: _rows(asked, kept, place) for place in places}
    verdict, reason = judge(checks(tasks), asked.quick)
    _draw(folder / "hybrid.png", tasks)
    section = Section(
        study="hybrid",
        title="What handing over saves",
        source="section 3.2",
        claim=(
            "Second-order updates help most at first; MKOR-H hands over to the first-order "
            "optimizer by the rate at which the loss falls, and so needs less time than MKOR for "
            "the same quality."
        ),
        measured=(
            f"MKOR with and without a switch at the same learning rate, and SGD, on "
            f"{', '.join(tasks)}; seeds: {asked.seeds}. The target is SGD's final loss."
        ),
        verdict=verdict,
        reason=reason,
        tables=tuple(_table(task, rows) for task, rows in tasks.items()),
        figures=(Figure("hybrid.png", "Training loss by second, and when MKOR-H handed over"),),
    )
    data = {
        task: {n: list(row.handed_over) for n, row in rows.items()} for task, rows in tasks.items()
    }
    return conclude(asked, kept, folder, section, {"handed_over": data})


def _table(task: str, rows: Rows) -> Table:
    columns = (
        *("optimizer", "rate", "final loss", "± loss", "metric", "seconds of a run"),
        *("steps to target", "seconds to it", "handed over at step"),
    )
    cells = []
    for name, row in rows.items():
        found = reached(row, rows["sgd"]) if "sgd" in rows else None
        steps = [step for step in row.handed_over if step is not None]
        loss, spread = row.result.final_loss
        figures = (row.result.lr, loss, spread, row.result.metric[0], row.seconds)
        switched = statistics.median(steps) if steps else None
        cells.append((name, *figures, *(found or (None, None)), switched))
    return Table(task, columns, tuple(cells))


def _draw(path: Path, tasks: Mapping[str, Rows]) -> None:
    figure, (charts,) = new_figure(1, len(tasks))
    for axes, (task, rows) in zip(charts, tasks.items(), strict=True):
        curves = []
        for name, row in rows.items():
            losses = mean_curve([run.losses for run in row.result.runs])
            width = window(len(losses))
            shown = slice(width - 1, None, max(1, len(losses) // 50))
            seconds = mean_curve([run.seconds for run in row.result.runs])
            curves.append((name, seconds[shown], smooth(losses, width)[shown]))
            for step in row.handed_over:
                if step is not None:
                    axes.axvline(seconds[step - 1], color="grey", linestyle=":", zorder=0)
        draw_lines(axes, curves)
        axes.set_yscale("log")
        finish(axes, f"{task}; dotted: hand-over", "training time of a run (s)", "training loss")
    save_figure(path, figure)


STUDY = Study(
    name="hybrid",
    description="what MKOR-H saves, and when it switches",
    request=small_request,
    pieces=pieces,
    report=report,
)
