"""Which optimizer, with which defaults: every one tuned in the same way, on twelve real tasks.

For each task and optimizer, one seed finds the learning rate (and K-FAC's damping and frequency)
by the lowest final training loss; further seeds run at the best. The time of a step is measured
beside SGD's in interleaved turns. Two tasks are held out: they are reported apart, and defaults
must not be chosen by them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mkor_bench.compare import TUNING_SEED
from mkor_bench.optimizers import OPTIMIZERS
from mkor_bench.studies.defaults_report import write_report
from mkor_bench.studies.kept import Kept
from mkor_bench.studies.outcome import TaskOutcome
from mkor_bench.studies.piece import Piece
from mkor_bench.studies.runs import Place, run_of, run_piece, timing_piece
from mkor_bench.studies.study import Report, Request, Study
from mkor_bench.studies.tuning import Candidate, Tuning, tune
from mkor_bench.summary import OptimizerResult, TaskResult, final_loss
from mkor_bench.tasks import TASKS

HELD_OUT = ("cifar100-resnet20", "minilm-polarity")
CHOICE = tuple(task for task in TASKS if task not in HELD_OUT)

_KFAC_SEARCH = {
    "damping": (0.001, 0.01, 0.03, 0.1),
    "inverse_update_steps": (1, 50),
}
"""What is tried besides the row's own damping of 0.003 and interval of 10 steps."""

SEARCHED = {"kfac": _KFAC_SEARCH, "kaisa-eigen": _KFAC_SEARCH}
"""Options that are tuned too, by the optimizer's name."""

_USUAL = ("sgd", "adamw", "lamb", "soap", "muon", "kfac", "mkor", "mkor-adamw", "mkor-lowrank")
COMPARED = (*_USUAL, "mkor-lowrank-adamw", *("auto",) * ("auto" in OPTIMIZERS))

GRID = (-6, -5, -4, -3, -2)
"""Learning rates from 0.001 to 0.1, and further ones where the best is at the edge."""

QUICK_GRID = (-4, -3, -2)
QUICK_TASKS = ("digits-autoencoder", "mnist-autoencoder", "shakespeare")
_QUICK = {"sgd", "adamw", "muon", "mkor", "auto"}
QUICK_OPTIMIZERS = tuple(name for name in COMPARED if name in _QUICK)


def request(quick: bool, data: str | None) -> Request:
    """Returns what is done unless told otherwise.

    Args:
        quick: Three small tasks and a few optimizers, in minutes.
        data: What --data named; without any, the quick tasks are those that need none.

    Returns:
        The request.
    """
    if not quick:
        return Request((*CHOICE, *HELD_OUT), COMPARED, seeds=3, data=data)
    tasks = QUICK_TASKS if data is not None else ("digits-autoencoder", "digits-classifier")
    return Request(tasks, QUICK_OPTIMIZERS, seeds=2, quick=True, data=data)


def pieces(asked: Request, kept: Kept) -> Sequence[Piece]:
    """Returns what is wanted by now: tuning, then seeds, and step times when all else is done."""
    runs: list[Piece] = []
    timings: list[Piece] = []
    for place in _places(asked):
        for name in asked.optimizers:
            tuning = _tuning(asked, kept, place, name)
            runs += [run_piece(place, *point, TUNING_SEED) for point in tuning.points]
            if tuning.best is not None:
                runs += [run_piece(place, *tuning.best, seed) for seed in range(asked.seeds)]
                timings.append(timing_piece(place, tuning.best[0]))
    # Last, so that no training begins or ends while steps are timed.
    waiting = any(kept.get(piece) is None for piece in runs)
    return runs if waiting else [*runs, *timings]


def outcomes(asked: Request, kept: Kept) -> list[TaskOutcome]:
    """Gathers what is known about each task, leaving out optimizers that are not done there."""
    return [_outcome(asked, kept, place) for place in _places(asked)]


def report(asked: Request, kept: Kept, folder: Path) -> Report:
    """Writes the study's report."""
    return write_report(asked, outcomes(asked, kept), HELD_OUT, kept.records(), folder)


def _places(asked: Request) -> list[Place]:
    return [Place(task, asked.data, asked.quick) for task in asked.tasks]


def _tuning(asked: Request, kept: Kept, place: Place, name: str) -> Tuning:
    def loss_of(optimizer: str, lr: float) -> float | None:
        run = run_of(kept, place, optimizer, lr, TUNING_SEED)
        return None if run is None else final_loss(run)

    search = {} if asked.quick else SEARCHED.get(name, {})
    return tune(Candidate(name, search), QUICK_GRID if asked.quick else GRID, loss_of)


def _outcome(asked: Request, kept: Kept, place: Place) -> TaskOutcome:
    results, chosen = [], {}
    for name in asked.optimizers:
        tuning = _tuning(asked, kept, place, name)
        if tuning.missing:
            continue
        result = OptimizerResult(name, _grid(kept, place, tuning))
        if tuning.best is not None:
            runs = [run_of(kept, place, *tuning.best, seed) for seed in range(asked.seeds)]
            timing = kept.get(timing_piece(place, tuning.best[0]))
            done = [run for run in runs if run is not None]
            if len(done) < asked.seeds:
                continue
            result.finalists[tuning.best[1]] = done
            if timing is not None:
                result.step_seconds, result.step_time_ratio = timing["seconds"], timing["ratio"]
            chosen[name] = tuning.best[0]
        results.append(result)
    return TaskOutcome(TaskResult(place.source.load(), place.steps, results), chosen)


def _grid(kept: Kept, place: Place, tuning: Tuning) -> dict[float, float]:
    """Returns the losses at the learning rates of the chosen options."""
    name = tuning.best[0] if tuning.best else tuning.points[0][0]
    runs = {
        lr: run_of(kept, place, other, lr, TUNING_SEED)
        for other, lr in tuning.points
        if other == name
    }
    return {lr: final_loss(run) for lr, run in sorted(runs.items()) if run is not None}


STUDY = Study(
    name="defaults",
    description="every optimizer tuned alike on twelve tasks: steps, time, losses, test metrics",
    request=request,
    groups={"choice": CHOICE, "held-out": HELD_OUT},
    pieces=pieces,
    report=report,
)
