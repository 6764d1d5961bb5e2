"""Pieces that time the stages of an optimizer's step on a model, beside SGD's in turns."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

from mkor_bench.optimizers import settled_options
from mkor_bench.studies.kept import Kept
from mkor_bench.studies.measure import STAGES, Trainee, median_stages
from mkor_bench.studies.piece import Piece
from mkor_bench.studies.workloads import workloads
from mkor_bench.timing import REFERENCE

_ROUNDS = 9
_QUICK_ROUNDS = 3

Stages = Mapping[str, Any]
"""Seconds by stage and in "total", of a "plain" step and of one that is "updating" the factors; and
those of SGD's, as "sgd"."""


def stages_piece(model: str, quick: bool, optimizer: str) -> Piece:
    """Returns the piece that times an optimizer on a model.

    Args:
        model: Its name among the workloads.
        quick: Whether the model is small.
        optimizer: The name, which may carry options.

    Returns:
        The piece; :func:`stages_of` reads its result.
    """
    spec = {
        "model": model,
        "quick": quick,
        "optimizer": optimizer,
        "options": settled_options(optimizer),
        "rounds": _QUICK_ROUNDS if quick else _ROUNDS,
    }
    label = f"{model} {optimizer} stages"
    return Piece("mkor_bench.studies.stages:measure", spec, label, spec["rounds"], alone=True)


def stages_of(kept: Kept, model: str, quick: bool, optimizer: str) -> Stages | None:
    """Reads what :func:`stages_piece` measured.

    Args:
        kept: The results.
        model: Its name among the workloads.
        quick: Whether the model is small.
        optimizer: The name.

    Returns:
        The stages; None where they have not been measured.
    """
    return kept.get(stages_piece(model, quick, optimizer))


def measure(
    spec: Mapping[str, Any], data: str | None, report: Callable[[int], None]
) -> dict[str, Any]:
    """Measures, in a worker; see :func:`stages_piece`."""
    del data
    make = workloads(spec["quick"])[spec["model"]][1]
    reference, trainee = (Trainee(make, name) for name in (REFERENCE, spec["optimizer"]))
    plain: list[dict[str, float]] = []
    updating: list[dict[str, float]] = []
    sgd: list[float] = []
    for _ in range(spec["rounds"] + 1):
        sgd.append(reference.step(updates=False))
        for updates, own in ((False, plain), (True, updating)):
            trainee.step(updates=updates)
            own.append(trainee.spent)
        report(1)
    del sgd[0], plain[0], updating[0]  # caches are cold in the first
    return {
        "sgd": statistics.median(sgd),
        "plain": median_stages(plain),
        "updating": median_stages(updating if trainee.engine is not None else plain),
    }


def mean_step(stages: Stages, interval: int) -> dict[str, float]:
    """Returns the mean step where every so many steps update the factors.

    Args:
        stages: What was measured.
        interval: Steps from one update to the next.

    Returns:
        Seconds by stage; what hooks add to the passes is "factors", the passes are those of a
        plain step.
    """
    plain, updating = stages["plain"], stages["updating"]
    mean = {s: plain[s] + (updating[s] - plain[s]) / interval for s in (*STAGES, "total")}
    extra = max(0.0, updating["passes"] - plain["passes"]) / interval
    return {**mean, "passes": mean["passes"] - extra, "factors": extra}
