"""Figures 5 and 10: how well few vectors stand for the covariances of a layer, over training.

A batch's covariance C = XᵀX/n of inputs or output gradients, and its moving average, are compared
with what MKOR keeps of them: the error is ‖C - Ĉ‖/‖C‖ in the Frobenius norm. Vectors and rows come
from the library's own code.

| approximation | of | what |
| ------------- | -- | ---- |
| mean | a batch | the outer product of the mean row, the paper's rank one |
| best rank 1 | a batch | the leading eigenvector: no rank one is nearer |
| sketch | a batch | r sums of rows with random signs |
| window | the average | the last k sketched vectors |
| low rank | the average | k eigenvectors of sketches, as `mkor-lowrank` keeps them |
| best rank k | the average | the k leading eigenvectors |
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mkor.factors import thin
from mkor.factors.lowrank import LowRank
from mkor.factors.window import Window
from mkor_bench.report.chart import draw_lines, finish, name_beside, new_figure, save_figure
from mkor_bench.report.section import Figure, Section, Table
from mkor_bench.studies.finding import Check, conclude, judge
from mkor_bench.studies.kept import Kept
from mkor_bench.studies.piece import Piece
from mkor_bench.studies.rows import Seen, follow, watched_piece
from mkor_bench.studies.runs import places_of
from mkor_bench.studies.study import Report, Request, Study
from mkor_bench.studies.tuned import usual_tasks

SIDES = ("inputs", "gradients")
NAMES = ("mean", "best rank 1", "sketch", "window", "low rank", "best rank k")
VECTORS, KEPT, WINDOW, DECAY = 16, 20, 160, 0.95
"""Sketched vectors of an update, rows of the low rank, vectors of the window, γ."""

LOOKS = 8
"""How often a training is looked at."""

LOW, NEAR = 0.3, 1.5
"""An error up to LOW counts as low; one up to NEAR times the best as near the best."""

Errors = Mapping[str, Mapping[str, Sequence[Mapping[str, float]]]]
"""By side and approximation: one dict for each look, the error by layer."""


class Side:
    """One side of one layer: its moving average, and what stands for it.

    Args:
        width: d.
        seed: Of the sketches' signs.
    """

    def __init__(self, width: int, seed: int) -> None:
        self.average = torch.zeros(width, width, dtype=torch.float64)
        self._signs = torch.Generator().manual_seed(seed)
        self.updates = 0
        # As in the library: a side that is no wider than the window keeps its whole average.
        fits = width <= WINDOW
        window = LowRank(width, DECAY, 0.01) if fits else Window(WINDOW, DECAY, 0.01)
        self._thin = {"window": window, "low rank": LowRank(KEPT, DECAY, 0.01)}
        where = torch.device("cpu")
        self._parts = {n: t.init(1, width, torch.float64, where) for n, t in self._thin.items()}

    def take(self, rows: Tensor) -> None:
        """Takes a batch's rows [n, d] in."""
        self.rows = rows
        self.updates += 1
        self.average = DECAY * self.average + (1 - DECAY) * covariance(rows)
        self.vectors = sketch(rows, VECTORS, self._signs)
        seen = thin.prepare(self.vectors.mT[None] / VECTORS**0.5)
        for name, kind in self._thin.items():
            kind.absorb_(self._parts[name], seen, torch.ones(1, dtype=torch.bool))

    def errors(self) -> dict[str, float]:
        """Returns the error of each approximation."""
        true, mean = covariance(self.rows), self.rows.mean(dim=0)
        batch = {
            "mean": torch.outer(mean, mean),
            "best rank 1": best(true, 1),
            "sketch": self.vectors.mT @ self.vectors / VECTORS,
        }
        average = {name: stands_for(own, self.updates) for name, own in self._parts.items()}
        average["best rank k"] = best(self.average, KEPT)
        out = {name: error(true, near) for name, near in batch.items()}
        return out | {name: error(self.average, near) for name, near in average.items()}


def covariance(rows: Tensor) -> Tensor:
    """Returns XᵀX/n, [d, d]."""
    return rows.mT @ rows / len(rows)


def sketch(rows: Tensor, count: int, signs: torch.Generator) -> Tensor:
    """Returns V = SX/√n [r, d]; VᵀV/r has the covariance as its expectation.

    As in the library, row i is in sum i mod r, with a random sign, times √r.
    """
    chosen = torch.randint(0, 2, (len(rows), 1), generator=signs).to(rows.dtype) * 2 - 1
    sums = rows.new_zeros(count, rows.shape[1])
    sums.index_add_(0, torch.arange(len(rows)) % count, chosen * rows)
    return sums * (count / len(rows)) ** 0.5


def best(matrix: Tensor, rank: int) -> Tensor:
    """Returns the nearest matrix of a rank to a positive semidefinite one."""
    values, vectors = torch.linalg.eigh(matrix)
    return vectors[:, -rank:] * values[-rank:] @ vectors[:, -rank:].mT


def stands_for(parts: Mapping[str, Tensor], updates: int) -> Tensor:
    """Returns the covariance that the rows of a thin factor stand for, [d, d].

    Args:
        parts: Of a low rank, which has the size of the average; or of a window, whose vectors have
            the weights γ^age. They count as if they were all that there was.
        updates: How many there were.
    """
    sized = parts["rows"][0] * parts["sizes"][0][:, None]
    found = sized.mT @ sized
    if "trace" in parts:
        return found
    held = min(updates, WINDOW // VECTORS)
    return found * (1 - DECAY) * (1 - DECAY**updates) / (1 - DECAY**held)


def error(true: Tensor, near: Tensor) -> float:
    """Returns ‖C - Ĉ‖/‖C‖, 0 where both are zero."""
    size = float(torch.linalg.matrix_norm(true))
    return float(torch.linalg.matrix_norm(true - near)) / size if size else 0.0


def watch(
    spec: Mapping[str, Any], data: str | None, report: Callable[[int], None]
) -> dict[str, Any]:
    """Trains, and compares at some of the steps; see the module."""
    sides: dict[tuple[str, str], Side] = {}
    looks: list[int] = []
    errors: dict[str, dict[str, list[dict[str, float]]]] = {
        side: {name: [] for name in NAMES} for side in SIDES
    }

    def see(step: int, seen: Seen) -> None:
        for layer, both in seen.items():
            for side, rows in zip(SIDES, both, strict=True):
                key = (layer, side)
                sides.setdefault(key, Side(rows.shape[1], len(sides))).take(rows)
        if step not in looks_at(spec["steps"]):
            return
        looks.append(step + 1)
        for side in SIDES:
            found = {layer: own.errors() for (layer, s), own in sides.items() if s == side}
            for name in NAMES:
                errors[side][name].append({layer: own[name] for layer, own in found.items()})

    follow(spec, data, report, see)
    return {"steps": looks, "errors": errors}


def looks_at(steps: int) -> set[int]:
    """Returns the steps, from 0, at which a training is looked at."""
    return {round(place * (steps - 1) / (LOOKS - 1)) for place in range(LOOKS)}


def medians(errors: Errors, side: str, name: str) -> list[float]:
    """Returns the median error over the layers at each look."""
    return [statistics.median(look.values()) for look in errors[side][name]]


def checks(results: Mapping[str, Errors]) -> list[Check]:
    """Compares with the paper, task by task and side by side."""
    out = []
    for task, errors in results.items():
        for side in SIDES:
            mean, top = (medians(errors, side, name) for name in ("mean", "best rank 1"))
            where = f"{task}, {side}"
            told = f"{where}: the best rank 1 has an error of {top[-1]:.2f}, at most {LOW}"
            out.append(Check(told, top[-1] <= LOW))
            told = f"{where}: the mean's is {mean[-1]:.2f}, at most {NEAR} times that"
            out.append(Check(told, mean[-1] <= NEAR * top[-1]))
            told = f"{where}: the best rank 1's falls in training, from {top[0]:.2f}"
            out.append(Check(told, top[-1] < top[0]))
    return out


def _pieces(asked: Request) -> dict[str, Piece]:
    places = places_of(asked)
    more = {"kept": [VECTORS, KEPT, WINDOW, DECAY, LOOKS]}
    name = "mkor_bench.studies.rank:watch"
    return {place.task: watched_piece(place, name, "mkor", **more) for place in places}


def report(asked: Request, kept: Kept, folder: Path) -> Report:
    """Writes the section."""
    known = {task: kept.get(piece) for task, piece in _pieces(asked).items()}
    results = {task: result for task, result in known.items() if result is not None}
    errors = {task: result["errors"] for task, result in results.items()}
    verdict, reason = judge(checks(errors), asked.quick)
    if results:
        _draw(folder / "rank.png", results)
    section = Section(
        study="rank",
        title="How well one vector stands for a covariance",
        source="Figures 5 and 10, sections 4 and 8.7",
        claim=(
            "Covariances of activations and of gradients are near rank one, so that the outer "
            "product of the mean is enough; the error falls as training goes on."
        ),
        measured=(
            f"Trainings with MKOR on {', '.join(results) or 'nothing yet'}; up to six layers each; "
            f"relative error in the Frobenius norm, median layer. Sketches have {VECTORS} vectors, "
            f"the window {WINDOW}, the low rank {KEPT}; averages decay by {DECAY}."
        ),
        verdict=verdict,
        reason=reason,
        tables=tuple(_table(task, result) for task, result in results.items()),
        figures=(Figure("rank.png", "Error of each approximation by step"),) * bool(results),
    )
    return conclude(asked, kept, folder, section, {"results": results})


def _table(task: str, result: Mapping[str, Any]) -> Table:
    rows = []
    for side in SIDES:
        for name in NAMES:
            course = medians(result["errors"], side, name)
            worst = max(result["errors"][side][name][-1].values())
            rows.append((side, name, course[0], course[len(course) // 2], course[-1], worst))
    columns = (
        "side",
        "approximation",
        "at first",
        "midway",
        "at the end",
        "worst layer, at the end",
    )
    return Table(f"Relative error, {task}", columns, tuple(rows))


def _draw(path: Path, results: Mapping[str, Mapping[str, Any]]) -> None:
    figure, charts = new_figure(len(results), 2, share="row")
    for row, (task, result) in zip(charts, results.items(), strict=True):
        for axes, side in zip(row, SIDES, strict=True):
            draw_lines(
                axes, [(n, result["steps"], medians(result["errors"], side, n)) for n in NAMES]
            )
            axes.set_ylim(0, 1.1)
            finish(axes, f"{task}: {side}", "step", "relative error, median layer", legend=False)
    name_beside(figure, charts[0][0])
    save_figure(path, figure)


def _request(quick: bool, data: str | None) -> Request:
    full = ("digits-autoencoder", "cifar100-resnet20", "wikitext-masked")
    tasks = usual_tasks(data, full, quick)
    return Request(tasks[:1] if quick else tasks, (), seeds=0, quick=quick, data=data)


STUDY = Study(
    name="rank",
    description="how well means, sketches and windows stand for covariances, over training",
    request=_request,
    pieces=lambda asked, kept: list(_pieces(asked).values()),
    report=report,
)
