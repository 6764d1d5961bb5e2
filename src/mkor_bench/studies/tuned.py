"""Optimizers tuned alike on tasks, run with several seeds, and timed: what several studies share.

For each task and optimizer, one seed finds the learning rate (and options that are searched) by the
lowest final training loss; further seeds run at the best. The time of a step is measured beside
SGD's in interleaved turns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mkor_bench.compare import TUNING_SEED
from mkor_bench.studies.kept import Kept
from mkor_bench.studies.outcome import TaskOutcome
from mkor_bench.studies.piece import Piece
from mkor_bench.studies.runs import Place, places_of, run_of, run_piece, timing_piece
from mkor_bench.studies.study import Request
from mkor_bench.studies.tuning import Candidate, Tuning, tune
from mkor_bench.summary import OptimizerResult, TaskResult, final_loss

GRID = (-6, -5, -4, -3, -2)
"""Learning rates from 0.001 to 0.1, and further ones where the best is at the edge."""

QUICK_GRID = (-4, -3, -2)
QUICK_TASKS = ("digits-autoencoder", "mnist-autoencoder", "shakespeare")
DIGITS = ("digits-autoencoder", "digits-classifier")
"""Tasks whose data come with scikit-learn."""


def usual_tasks(data: str | None, full: Sequence[str], quick: bool) -> tuple[str, ...]:
    """Returns the tasks of a study: its own where data were named, else those that need none.

    Args:
        data: What --data named.
        full: The study's tasks.
        quick: Whether to do a small part.
    """
    if data is None:
        return DIGITS
    return QUICK_TASKS if quick else tuple(full)


def grid_of(quick: bool) -> tuple[int, ...]:
    """Returns the places of the learning rates that tuning begins with."""
    return QUICK_GRID if quick else GRID


def small_request(quick: bool, data: str | None) -> Request:
    """Returns what is done by studies that compare variants of MKOR on a few small tasks."""
    tasks = usual_tasks(data, (*DIGITS, "mnist-autoencoder", "cifar100-convnet"), quick)
    chosen, seeds = (tasks[:1], 1) if quick else (tasks, 3)
    return Request(chosen, (), seeds, quick, data, grid_of(quick))


@dataclass(frozen=True)
class Tuned:
    """Tuning as far as it has come.

    Attributes:
        asked: Tasks, optimizers and seeds.
        kept: The results so far.
        search: Options that are tuned too, by the optimizer's name.
        timed: Whether the time of a step is measured.
    """

    asked: Request
    kept: Kept
    search: Mapping[str, Mapping[str, Sequence[Any]]] = field(default_factory=dict)
    timed: bool = True

    @property
    def places(self) -> list[Place]:
        """The tasks as they are run."""
        return places_of(self.asked)

    def pieces(self) -> list[Piece]:
        """Returns what is wanted by now: tuning, then seeds and step times."""
        return [
            piece
            for place in self.places
            for name in self.asked.optimizers
            for piece in self.pieces_of(place, name)
        ]

    def pieces_of(self, place: Place, name: str) -> list[Piece]:
        """Returns what is wanted by now of one optimizer on one task."""
        tuning = self.tuning(place, name)
        wanted = [run_piece(place, *point, TUNING_SEED) for point in tuning.points]
        if tuning.best is not None:
            wanted += [run_piece(place, *tuning.best, seed) for seed in range(self.asked.seeds)]
            wanted += [timing_piece(place, tuning.best[0])] * self.timed
        return wanted

    def outcomes(self) -> list[TaskOutcome]:
        """Gathers what is known of each task, leaving out optimizers that are not done there."""
        return [self.outcome(place) for place in self.places]

    def outcome(self, place: Place) -> TaskOutcome:
        """Gathers what is known of one task."""
        results, chosen = [], {}
        for name in self.asked.optimizers:
            tuning = self.tuning(place, name)
            result = self._result(place, name, tuning)
            if result is not None:
                results.append(result)
                if tuning.best is not None:
                    chosen[name] = tuning.best[0]
        return TaskOutcome(TaskResult(place.source.load(), place.steps, results), chosen)

    def tuning(self, place: Place, name: str) -> Tuning:
        """Tells how far the tuning of an optimizer on a task is."""

        def loss_of(optimizer: str, lr: float) -> float | None:
            run = run_of(self.kept, place, optimizer, lr, TUNING_SEED)
            return None if run is None else final_loss(run)

        search = {} if self.asked.quick else self.search.get(name, {})
        return tune(Candidate(name, search), self.asked.grid, loss_of)

    def _result(self, place: Place, name: str, tuning: Tuning) -> OptimizerResult | None:
        if tuning.missing:
            return None
        result = OptimizerResult(name, self._grid(place, tuning))
        if tuning.best is None:
            return result
        seeds = range(self.asked.seeds)
        runs = [run_of(self.kept, place, *tuning.best, seed) for seed in seeds]
        done = [run for run in runs if run is not None]
        if len(done) < self.asked.seeds:
            return None
        result.finalists[tuning.best[1]] = done
        timing = self.kept.get(timing_piece(place, tuning.best[0])) if self.timed else None
        if timing is not None:
            result.step_seconds, result.step_time_ratio = timing["seconds"], timing["ratio"]
        return result

    def _grid(self, place: Place, tuning: Tuning) -> dict[float, float]:
        """Returns the losses at the learning rates of the chosen options."""
        name = tuning.best[0] if tuning.best else tuning.points[0][0]
        runs = {
            lr: run_of(self.kept, place, other, lr, TUNING_SEED)
            for other, lr in tuning.points
            if other == name
        }
        return {lr: final_loss(run) for lr, run in sorted(runs.items()) if run is not None}
