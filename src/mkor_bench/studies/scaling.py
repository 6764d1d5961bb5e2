"""Figure 9: steps on 1, 2 and 4 processes, measured beside the prediction, and predicted beyond.

The measured steps are of a small network with gloo on this machine, where more processes than
cores share the cores; rate, latency and bandwidth are measured in the same processes. The
prediction beyond is `mkor estimate`'s: BERT-Large on accelerators, a batch of fixed size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mkor
from mkor_bench.report.chart import draw_lines, finish, new_figure, save_figure
from mkor_bench.report.section import Figure, Section, Table
from mkor_bench.scale.bert import bert_large
from mkor_bench.scale.command import FIGURE_9, Plan
from mkor_bench.scale.measured import (
    measured_machine,
    median_machine,
    median_seconds,
    network,
    predicted_seconds,
)
from mkor_bench.scale.model import Machine
from mkor_bench.studies.finding import Check, conclude, judge
from mkor_bench.studies.kept import Kept
from mkor_bench.studies.piece import Piece
from mkor_bench.studies.processes import in_processes
from mkor_bench.studies.study import Report, Request, Study
from mkor_bench.workers import cores

PERIOD = 4
EVERY: dict[str, Any] = {"factor_update_steps": PERIOD, "warmup_steps": 1}
MEASURED: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (None, {}),
    "MKOR": (mkor.MKOR, EVERY),
    "Eva": (mkor.Eva, EVERY),
    "K-FAC": (mkor.KFAC, {**EVERY, "solver": "inverse", "inverse_update_steps": PERIOD}),
}
PROCESSES = (1, 2, 4)
FULL = {"width": 512, "depth": 6, "rows": 512, "periods": 7}
QUICK = {"width": 64, "depth": 2, "rows": 64, "periods": 3}

AT_SCALE = {"rate": 50e12, "bandwidth": 25e9, "latency": 5e-6, "batch": 8192, "sequence": 128}
"""The defaults of `mkor estimate`."""

NUMBERS = (1, 4, 16, 64)
SCALES, AGREES = 0.9, 2.0
"""The least part of LAMB's efficiency that counts as scaling as well as it does, since the network
that is assumed decides the rest; the most that prediction and measurement differ."""


def pieces(asked: Request, kept: Kept) -> Sequence[Piece]:
    """Returns a measurement for each number of processes, and the prediction."""
    del kept
    return [*(_measured(asked, workers) for workers in PROCESSES), _predicted()]


def _measured(asked: Request, workers: int) -> Piece:
    spec = {"workers": workers, "period": PERIOD, **(QUICK if asked.quick else FULL)}
    name = f"{workers} processes"
    return Piece("mkor_bench.studies.scaling:measure", spec, name, 1, alone=True)


def _predicted() -> Piece:
    spec = {**AT_SCALE, "numbers": list(NUMBERS)}
    return Piece("mkor_bench.studies.scaling:forecast", spec, "BERT-Large predicted", 1)


def measure(
    spec: Mapping[str, Any], data: str | None, report: Callable[[int], None]
) -> dict[str, Any]:
    """Measures steps in processes, and predicts them by what the processes can do."""
    del data, report
    workers, size = spec["workers"], {key: spec[key] for key in ("width", "depth", "rows")}
    found = in_processes(work, workers, spec)
    machine = median_machine([Machine(**own["machine"]) for own in found])
    return {
        name: {
            "seconds": max(own["seconds"][name] for own in found),
            "predicted": predicted_seconds(method, machine, workers, **size),
        }
        for name, method in MEASURED.items()
    }


def work(workers: int, spec: Mapping[str, Any]) -> dict[str, Any]:
    """Measures in one of the processes."""
    machine = measured_machine(workers, spec["width"], spec["rows"])
    seconds = {name: _seconds(name, workers, spec) for name in MEASURED}
    return {"machine": asdict(machine), "seconds": seconds}


def _seconds(name: str, workers: int, spec: Mapping[str, Any]) -> float:
    cls, options = MEASURED[name]
    torch.manual_seed(0)
    model: nn.Module = network(spec["width"], spec["depth"])
    if workers > 1:
        model = DistributedDataParallel(model)
    base = torch.optim.SGD(model.parameters(), lr=1e-3)
    optimizer: Any = cls(model, base, **options) if cls else base
    rows = torch.randn(spec["rows"], spec["width"])

    def period() -> None:
        for _ in range(PERIOD):
            optimizer.zero_grad()
            model(rows).square().mean().backward()
            optimizer.step()

    period()
    return median_seconds(period, spec["periods"]) / PERIOD


def forecast(
    spec: Mapping[str, Any], data: str | None, report: Callable[[int], None]
) -> dict[str, Any]:
    """Predicts steps of BERT-Large by method and number of workers, in seconds."""
    del data, report
    machine = Machine(spec["rate"], spec["bandwidth"], spec["latency"])
    plan, model = Plan(machine, spec["batch"], spec["sequence"]), bert_large()
    return {
        name: {str(p): plan.step(model, name, p).total for p in spec["numbers"]}
        for name in FIGURE_9
    }


def efficiency(seconds: Mapping[str, float]) -> float:
    """Returns how much of the ideal speed-up is left at the largest number of workers."""
    first, last = min(seconds, key=int), max(seconds, key=int)
    return seconds[first] / seconds[last] / (int(last) / int(first))


def checks(
    measured: Mapping[int, Mapping[str, Mapping[str, float]]],
    predicted: Mapping[str, Mapping[str, float]],
    most: int,
) -> list[Check]:
    """Compares with the paper.

    Args:
        measured: Seconds and prediction by processes and method.
        predicted: Seconds at scale by method and workers.
        most: How many processes the machine has cores for.

    Returns:
        The checks; processes that share cores are not compared with the prediction, and what is
        predicted can speak against the claim but not confirm it.
    """
    out = []
    for workers, rows in measured.items():
        if workers <= most and "MKOR" in rows:
            ratio = rows["MKOR"]["seconds"] / rows["MKOR"]["predicted"]
            told = f"on {workers} processes MKOR's step is {ratio:.2f} times the prediction"
            met = 1 / AGREES <= ratio <= AGREES
            out.append(Check(f"{told}, within {AGREES:g} times", met))
    if {"MKOR", "K-FAC", "LAMB"} <= predicted.keys():
        ours, base = efficiency(predicted["MKOR"]), efficiency(predicted["LAMB"])
        last = max(predicted["MKOR"], key=int)
        told = f"predicted at {last} workers: MKOR keeps {ours:.0%} of the ideal speed-up"
        told = f"{told}, at least {SCALES} of LAMB's {base:.0%}"
        out.append(Check(told, _predicts(ours >= SCALES * base)))
        times = predicted["K-FAC"][last] / predicted["MKOR"][last]
        told = f"predicted there: K-FAC's step takes {times:.2f} times as long, above 1"
        out.append(Check(told, _predicts(times > 1)))
    return out


def _predicts(fine: bool) -> bool | None:
    return None if fine else False


def report(asked: Request, kept: Kept, folder: Path) -> Report:
    """Writes the section."""
    known = {workers: kept.get(_measured(asked, workers)) for workers in PROCESSES}
    measured = {
        workers: {name: result[name] for name in MEASURED}
        for workers, result in known.items()
        if result is not None
    }
    found = kept.get(_predicted())
    predicted = {name: found[name] for name in FIGURE_9} if found else {}
    verdict, reason = judge(checks(measured, predicted, cores()), asked.quick)
    _draw(folder / "scaling.png", measured, predicted)
    section = Section(
        study="scaling",
        title="Steps on many workers",
        source="Figure 9, section 8.6",
        claim="MKOR scales strongly on BERT-Large up to 64 GPUs.",
        measured=(
            "A small network in 1, 2 and 4 gloo processes of this machine, each with its own rows, "
            "beside the prediction of an α-β model; and the model's prediction for BERT-Large at "
            f"{AT_SCALE['rate'] / 1e12:g} TFLOP/s and {AT_SCALE['bandwidth'] / 1e9:g} GB/s, "
            f"{AT_SCALE['batch']} sequences a step. No step beyond this machine was measured."
        ),
        verdict=verdict,
        reason=reason,
        tables=_tables(measured, predicted),
        figures=(Figure("scaling.png", "Measured and predicted steps; predicted speed-up"),),
    )
    return conclude(asked, kept, folder, section, {"measured": measured, "predicted": predicted})


def _tables(
    measured: Mapping[int, Mapping[str, Mapping[str, float]]],
    predicted: Mapping[str, Mapping[str, float]],
) -> tuple[Table, ...]:
    rows = tuple(
        (
            workers,
            name,
            1e3 * row["seconds"],
            1e3 * row["predicted"],
            row["seconds"] / row["predicted"],
        )
        for workers, own in measured.items()
        for name, row in own.items()
    )
    columns = ("processes", "method", "measured", "predicted", "measured over predicted")
    small = Table("A step of the small network, ms of wall time", columns, rows)
    large = tuple(
        (name, *(1e3 * own[str(p)] for p in NUMBERS), efficiency(own))
        for name, own in predicted.items()
    )
    told = ("method", *(f"{p} workers" for p in NUMBERS), "efficiency")
    return small, Table("A step of BERT-Large as predicted, ms", told, large)


def _draw(
    path: Path,
    measured: Mapping[int, Mapping[str, Mapping[str, float]]],
    predicted: Mapping[str, Mapping[str, float]],
) -> None:
    figure, ((small, large),) = new_figure(1, 2)
    curves = [
        (f"{name}, {told}", list(measured), [1e3 * own[name][key] for own in measured.values()])
        for name in (MEASURED if measured else ())
        for key, told in (("seconds", "measured"), ("predicted", "predicted"))
    ]
    draw_lines(small, curves)
    small.set(xscale="log", yscale="log")
    finish(small, "A small network on this machine", "processes", "a step (ms, wall time)")
    speed = [
        (name, NUMBERS, [predicted["LAMB"]["1"] / own[str(p)] for p in NUMBERS])
        for name, own in predicted.items()
    ]
    draw_lines(large, speed)
    large.plot(NUMBERS, NUMBERS, ":", color="grey", label="ideal")
    large.set(xscale="log", yscale="log")
    finish(large, "BERT-Large, predicted", "workers", "steps a second, over LAMB's on 1")
    save_figure(path, figure)


STUDY = Study(
    name="scaling",
    description="steps on 1, 2 and 4 processes, measured and predicted; predicted beyond",
    request=lambda quick, data: Request((), (), seeds=0, quick=quick, data=data),
    pieces=pieces,
    report=report,
)
