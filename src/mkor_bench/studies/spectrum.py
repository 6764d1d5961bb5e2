"""Figure 8: the eigenvalues of K-FAC's factors over training, and what half precision does to them.

A training by K-FAC is watched: the eigenvalues of the moving average of the inputs' covariance (the
right factor) and its condition number, plain and damped. Beside it three methods follow the same
rows twice, in float64 and in a narrower type, by the library's own code; the error is that of the
narrow inverse relative to the wide one.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mkor.factors import covariance, dense, thin
from mkor.factors.lowrank import LowRank
from mkor_bench.report.chart import draw_lines, finish, new_figure, save_figure
from mkor_bench.report.section import Figure, Section, Table
from mkor_bench.studies.finding import Check, conclude, judge
from mkor_bench.studies.kept import Kept
from mkor_bench.studies.piece import Piece
from mkor_bench.studies.rank import looks_at, sketch
from mkor_bench.studies.rows import Seen, follow, watched_piece
from mkor_bench.studies.runs import places_of
from mkor_bench.studies.study import Report, Request, Study
from mkor_bench.studies.tuned import usual_tasks

DAMPING = 0.003
"""K-FAC's, as the command has it; the paper's is 0.001 to 0.003."""

DECAY, KEPT, VECTORS = 0.9, 20, 16
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ONE = torch.ones(1, dtype=torch.bool)

SINGULAR, LARGE = 1e6, 1e2
"""Condition numbers from which on a plain factor counts as singular, a damped one as large."""


class KFACSide:
    """K-FAC: the covariance, and its damped inverse by Cholesky."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        self.total = torch.zeros(1, width, width, dtype=dtype)
        self.mass = torch.zeros(1, dtype=torch.float64 if dtype == torch.float64 else torch.float32)

    def take(self, rows: Tensor) -> None:
        """Takes a batch's rows in."""
        moment = (rows.mT @ rows / len(rows))[None].to(self.mass.dtype)
        gain = torch.ones(1, dtype=self.mass.dtype)
        covariance.average_(self.total, self.mass, moment, gain, DECAY, ONE)

    def inverse(self) -> Tensor:
        """Returns the inverse, [d, d]; not finite where there is none."""
        wide = torch.promote_types(self.total.dtype, torch.float32)
        found, sound = covariance.inverse(self.total, self.mass, DAMPING, wide)
        return (
            found[0].to(self.total.dtype).double() if bool(sound) else found[0].double() * math.nan
        )


class MKORSide:
    """MKOR: the inverse itself, by rank-one updates."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        self.factor = dense.identity(1, width, dtype, torch.device("cpu"))
        self.wide = torch.promote_types(dtype, torch.float32)

    def take(self, rows: Tensor) -> None:
        """Takes a batch's mean row in."""
        seen = dense.prepare(rows.mean(dim=0).to(self.wide)[None, :, None], 0.02)
        change = dense.exact(self.factor, seen, DECAY, 2.0, 0.95)
        dense.write_(self.factor, dense.guard(change, ONE, self.factor.dtype)[0])

    def inverse(self) -> Tensor:
        """Returns the inverse, [d, d]."""
        return self.factor[0].double()


class LowRankSide:
    """MKOR with low-rank sketches: the identity minus a few rows."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        self.kind = LowRank(KEPT, DECAY, 0.01)
        self.parts = self.kind.init(1, width, dtype, torch.device("cpu"))
        self.signs = torch.Generator().manual_seed(0)

    def take(self, rows: Tensor) -> None:
        """Takes a batch's sketch in."""
        vectors = sketch(rows, VECTORS, self.signs).mT[None] / VECTORS**0.5
        self.kind.absorb_(self.parts, thin.prepare(vectors.to(self.parts["sizes"].dtype)), ONE)

    def inverse(self) -> Tensor:
        """Returns the inverse, [d, d]."""
        mixed = self.parts["root"][0].double() @ self.parts["rows"][0].double()
        return torch.eye(mixed.shape[1], dtype=torch.float64) - mixed.mT @ mixed


METHODS = {"kfac": KFACSide, "mkor": MKORSide, "mkor-lowrank": LowRankSide}


class Layer:
    """One layer's inputs: the methods, each in float64 and in the narrower types."""

    def __init__(self, width: int) -> None:
        self.wide = {name: make(width, torch.float64) for name, make in METHODS.items()}
        self.narrow = {
            (name, told): make(width, dtype)
            for name, make in METHODS.items()
            for told, dtype in TYPES.items()
        }

    def take(self, rows: Tensor) -> None:
        """Takes a batch's rows in."""
        for side in (*self.wide.values(), *self.narrow.values()):
            side.take(rows)

    def spectrum(self) -> dict[str, float]:
        """Returns the extreme eigenvalues of K-FAC's factor, and its condition numbers."""
        side = self.wide["kfac"]
        values = torch.linalg.eigvalsh(side.total[0] / side.mass)
        least, most = float(values[0].clamp_min(0)), float(values[-1])
        rounding = most * torch.finfo(values.dtype).eps  # what is below is no eigenvalue
        return {
            "least": least,
            "most": most,
            "condition": most / max(least, rounding) if most else 1.0,
            "damped": (most + DAMPING) / (least + DAMPING),
        }

    def narrowed(self) -> dict[str, dict[str, float]]:
        """Returns by method and type, as "method type", the error and the least eigenvalue."""
        out = {}
        for (name, told), side in self.narrow.items():
            true, near = self.wide[name].inverse(), side.inverse()
            finite = bool(torch.isfinite(near).all())
            error = torch.linalg.matrix_norm(true - near) / torch.linalg.matrix_norm(true)
            least = torch.linalg.eigvalsh((near + near.mT) / 2)[0] if finite else torch.tensor(-1.0)
            out[f"{name} {told}"] = {
                "error": float(error) if finite else math.inf,
                "least": float(least),
            }
        return out


def watch(
    spec: Mapping[str, Any], data: str | None, report: Callable[[int], None]
) -> dict[str, Any]:
    """Trains, and looks at the factors at some of the steps; see the module."""
    layers: dict[str, Layer] = {}
    looks: list[int] = []
    spectra: list[dict[str, dict[str, float]]] = []

    def see(step: int, seen: Seen) -> None:
        for name, (rows, _) in seen.items():
            layers.setdefault(name, Layer(rows.shape[1])).take(rows)
        if step in looks_at(spec["steps"]):
            looks.append(step + 1)
            spectra.append({name: layer.spectrum() for name, layer in layers.items()})

    follow(spec, data, report, see)
    narrowed = {name: layer.narrowed() for name, layer in layers.items()}
    return {"steps": looks, "spectra": spectra, "narrowed": narrowed}


def median_of(result: Mapping[str, Any], key: str) -> list[float]:
    """Returns the median over layers of an entry of the spectra, at each look."""
    return [statistics.median(own[key] for own in look.values()) for look in result["spectra"]]


def error_of(result: Mapping[str, Any], which: str) -> float:
    """Returns the median error over layers of a method in a type, such as "kfac bfloat16"."""
    errors = [own[which]["error"] for own in result["narrowed"].values()]
    return statistics.median(math.inf if error is None else error for error in errors)


def checks(results: Mapping[str, Mapping[str, Any]]) -> list[Check]:
    """Compares with the paper, task by task."""
    out = []
    for task, result in results.items():
        plain, damped = (median_of(result, key)[-1] for key in ("condition", "damped"))
        told = f"{task}: the median condition number is {plain:.1e}, at least {SINGULAR:.0e}"
        out.append(Check(told, plain >= SINGULAR))
        told = f"{task}: damped by {DAMPING} it is {damped:.1e}, at least {LARGE:.0e}"
        out.append(Check(told, damped >= LARGE))
        ours, theirs = (error_of(result, f"{name} bfloat16") for name in ("mkor", "kfac"))
        told = f"{task}: bfloat16 changes MKOR's inverse by {ours:.1e}, K-FAC's by {theirs:.1e}"
        out.append(Check(told, ours < theirs))
        least = min(own["mkor bfloat16"]["least"] for own in result["narrowed"].values())
        told = (
            f"{task}: MKOR's inverse stays positive in bfloat16, its least eigenvalue {least:.1e}"
        )
        out.append(Check(told, least > 0))
    return out


def _pieces(asked: Request) -> dict[str, Piece]:
    places = places_of(asked)
    more = {"kept": [DAMPING, DECAY, KEPT, VECTORS]}
    name = "mkor_bench.studies.spectrum:watch"
    return {place.task: watched_piece(place, name, "kfac", **more) for place in places}


def report(asked: Request, kept: Kept, folder: Path) -> Report:
    """Writes the section."""
    known = {task: kept.get(piece) for task, piece in _pieces(asked).items()}
    results = {task: result for task, result in known.items() if result is not None}
    verdict, reason = judge(checks(results), asked.quick)
    if results:
        _draw(folder / "spectrum.png", results)
    section = Section(
        study="spectrum",
        title="Eigenvalues of K-FAC's factors, and half precision",
        source="Figure 8, section 8.4",
        claim=(
            "The least eigenvalues of K-FAC's right factors approach zero, so that the factors are "
            "nearly singular, and even damped ones are badly conditioned; MKOR's rank-one updates "
            "do not depend on that, and may be done in half precision."
        ),
        measured=(
            f"Trainings with K-FAC on {', '.join(results) or 'nothing yet'}; up to six layers "
            f"each, medians over them; dampings {DAMPING} of K-FAC, 0.02 of MKOR (relative). "
            "The same rows in float64 and in narrower types."
        ),
        verdict=verdict,
        reason=reason,
        tables=(*map(_spectra, results.items()), *map(_narrow, results.items())),
        figures=(Figure("spectrum.png", "Eigenvalues and condition numbers by step"),)
        * bool(results),
    )
    return conclude(asked, kept, folder, section, {"results": results})


def _spectra(item: tuple[str, Mapping[str, Any]]) -> Table:
    task, result = item
    courses = [median_of(result, key) for key in ("least", "most", "condition", "damped")]
    columns = ("step", "least eigenvalue", "largest", "condition number", "damped")
    return Table(
        f"Right factors, {task}", columns, tuple(zip(result["steps"], *courses, strict=True))
    )


def _narrow(item: tuple[str, Mapping[str, Any]]) -> Table:
    task, result = item
    rows = []
    for name in METHODS:
        for told in TYPES:
            found = [own[f"{name} {told}"] for own in result["narrowed"].values()]
            positive = sum(own["least"] > 0 for own in found)
            error = error_of(result, f"{name} {told}")
            rows.append((name, told, error if math.isfinite(error) else None, positive, len(found)))
    columns = ("method", "type", "median error", "layers positive definite", "layers")
    return Table(f"Inverses relative to float64's, {task}", columns, tuple(rows))


def _draw(path: Path, results: Mapping[str, Mapping[str, Any]]) -> None:
    figure, charts = new_figure(len(results), 2)
    for row, (task, result) in zip(charts, results.items(), strict=True):
        parts: tuple[tuple[str, Sequence[tuple[str, str]]], ...] = (
            ("eigenvalue, median layer", (("largest", "most"), ("least", "least"))),
            ("condition number, median layer", (("plain", "condition"), ("damped", "damped"))),
        )
        for axes, (told, curves) in zip(row, parts, strict=True):
            draw_lines(axes, [(n, result["steps"], median_of(result, key)) for n, key in curves])
            axes.set_yscale("log")
            finish(axes, f"{task}: right factors", "step", told)
    save_figure(path, figure)


def _request(quick: bool, data: str | None) -> Request:
    tasks = usual_tasks(data, ("digits-autoencoder", "cifar100-resnet20", "wikitext-masked"), quick)
    return Request(tasks[:1] if quick else tasks, (), seeds=0, quick=quick, data=data)


STUDY = Study(
    name="spectrum",
    description="eigenvalues of K-FAC's factors over training, and inverses in half precision",
    request=_request,
    pieces=lambda asked, kept: list(_pieces(asked).values()),
    report=report,
)
