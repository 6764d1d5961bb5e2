"""Lemmas 3.1 to 3.3 and section 3.3: the parts of MKOR, each taken away.

The lemmas are checked in float64 on the formula as printed. Then MKOR trains without its
stabiliser, without the rescaling, by the other rules and in half precision, each variant tuned.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mkor_bench.report.chart import COLOURS, finish, new_figure, save_figure
from mkor_bench.report.section import Figure, Section, Table
from mkor_bench.studies.finding import Check, conclude, judge
from mkor_bench.studies.kept import Kept
from mkor_bench.studies.lemmas import BLEND, DECAY, LIMIT, ROUNDING, UPDATES
from mkor_bench.studies.piece import Piece
from mkor_bench.studies.study import Report, Request, Study
from mkor_bench.studies.tuned import Tuned, small_request

VARIANTS = {
    "sgd": "the base alone",
    "mkor": "MKOR with its defaults",
    "mkor:norm_limit=1e30": "without the stabiliser",
    "mkor:rescale=None": "without rescaling",
    "mkor:rule=paper:damping=None": "rule as printed",
    "mkor:rule=reference:damping=None": "rule as released",
    "mkor:state_dtype=bfloat16": "factors in bfloat16",
}
FULL = {"widths": [16, 64, 256], "sizes": [0.1, 1.0], "seeds": 10}
QUICK = {"widths": [16, 64], "sizes": [0.1, 1.0], "seeds": 3}

Finals = Mapping[str, tuple[float, float]]
"""Mean final loss and its spread, by variant."""


def pieces(asked: Request, kept: Kept) -> Sequence[Piece]:
    """Returns the measurement of the lemmas, and what is wanted of trainings by now."""
    return [_lemmas(asked), *_tuned(asked, kept).pieces()]


def _lemmas(asked: Request) -> Piece:
    size = QUICK if asked.quick else FULL
    spec = {**size, "constants": [DECAY, LIMIT, BLEND, UPDATES]}
    return Piece("mkor_bench.studies.lemmas:measure", spec, "lemmas", len(size["widths"]))


def _tuned(asked: Request, kept: Kept) -> Tuned:
    return Tuned(replace(asked, optimizers=tuple(VARIANTS)), kept, timed=False)


def lemma_checks(found: Mapping[str, Any]) -> list[Check]:
    """Compares the lemmas' numbers with what they say."""
    least = min(own["least"] for own in found["grown"])
    shares = [own["error"] / own["bound"] for own in found["quantized"]]
    without, held = (
        [own["left"] for own in found["grown"] if own["stabilised"] is stabilised]
        for stabilised in (False, True)
    )
    left = [update for update in without if update is not None]
    escaped = sum(update is not None for update in held)
    told = f"after {min(left)} updates at the earliest" if left else "never"
    return [
        Check(
            f"Lemma 3.1: the printed rule's least eigenvalue over its largest is {least:.1e}, not "
            "below 0 but for rounding",
            least > -ROUNDING,
        ),
        Check(
            f"Lemma 3.2: the error is at most {max(shares):.1e} of the bound, whose median is "
            f"{1 / sorted(shares)[len(shares) // 2]:.0e} times the error",
            max(shares) <= 1,
        ),
        Check(f"without the stabiliser the printed rule leaves the range {told}", bool(left)),
        Check(f"with it in {escaped} of {len(held)} cases, none", escaped == 0),
    ]


def training_checks(tasks: Mapping[str, Finals]) -> list[Check]:
    """Compares the variants with MKOR, task by task; worse means by more than the spread."""
    rules = [
        ("mkor:norm_limit=1e30", True, "is worse without the stabiliser"),
        ("mkor:rescale=None", True, "is worse without rescaling"),
        ("mkor:rule=paper:damping=None", False, "is no worse by the rule as printed"),
        ("mkor:state_dtype=bfloat16", False, "is no worse in half precision"),
    ]
    out = []
    for task, finals in tasks.items():
        for name, worse, told in rules:
            if {"mkor", name} <= finals.keys():
                (loss, spread), (base, other) = finals[name], finals["mkor"]
                behind = _behind(loss, base, max(spread, other))
                text = f"{task}: MKOR {told} ({_told(loss)} against {_told(base)})"
                out.append(Check(text, None if behind is None else behind is worse))
    return out


def _behind(loss: float, base: float, spread: float) -> bool | None:
    if not math.isfinite(base):
        return None
    return not math.isfinite(loss) or loss - base > (0 if math.isnan(spread) else spread)


def _told(loss: float) -> str:
    return f"{loss:.4g}" if math.isfinite(loss) else "diverged"


def report(asked: Request, kept: Kept, folder: Path) -> Report:
    """Writes the section."""
    lemmas = kept.get(_lemmas(asked))
    tasks: dict[str, Finals] = {
        outcome.name: {r.optimizer: r.final_loss for r in outcome.result.optimizers}
        for outcome in _tuned(asked, kept).outcomes()
    }
    checks = [*(lemma_checks(lemmas) if lemmas else ()), *training_checks(tasks)]
    verdict, reason = judge(checks, asked.quick)
    _draw(folder / "ablation.png", tasks)
    section = Section(
        study="ablation",
        title="The lemmas, and the parts of MKOR taken away",
        source="Lemmas 3.1-3.3, section 3.3",
        claim=(
            "The rule as printed keeps the inverse positive definite, half precision changes it "
            "within a bound, and the stabiliser and the rescaling prevent exploding gradients."
        ),
        measured=(
            f"Formula 5 in float64 on random vectors, {UPDATES} updates; quantized inverses and "
            f"vectors; trainings on {', '.join(tasks)}, each variant tuned, seeds: {asked.seeds}."
        ),
        verdict=verdict,
        reason=reason,
        tables=(
            *((_grown(lemmas), _quantized(lemmas)) if lemmas else ()),
            *(_losses(task, finals) for task, finals in tasks.items()),
        ),
        figures=(Figure("ablation.png", "Final loss of each variant over that of MKOR"),),
    )
    return conclude(asked, kept, folder, section, {"lemmas": lemmas, "finals": tasks})


def _grown(found: Mapping[str, Any]) -> Table:
    rows = tuple(
        (o["d"], o["size"], o["stabilised"], o["least"], o["end"], o["left"])
        for o in found["grown"]
    )
    columns = (
        "d",
        "size of v",
        "stabilised",
        "least over largest eigenvalue",
        "largest entry at the end",
        "left at",
    )
    return Table(f"Formula 5 over {UPDATES} updates; left the range of 1e30 at", columns, rows)


def _quantized(found: Mapping[str, Any]) -> Table:
    columns = ("d", "size of v", "type", "error", "bound", "error over bound")
    rows = tuple(
        (o["d"], o["size"], o["type"], o["error"], o["bound"], o["error"] / o["bound"])
        for o in found["quantized"]
    )
    return Table("Lemma 3.2: the worst of the seeds", columns, rows)


def _losses(task: str, finals: Finals) -> Table:
    rows = tuple(
        (name, VARIANTS[name], *map(_finite, finals[name])) for name in VARIANTS if name in finals
    )
    return Table(f"Final training loss, {task}", ("optimizer", "variant", "loss", "±"), rows)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _draw(path: Path, tasks: Mapping[str, Finals]) -> None:
    figure, (charts,) = new_figure(1, len(tasks), width=6)
    for axes, (task, finals) in zip(charts, tasks.items(), strict=True):
        base = finals.get("mkor", (math.nan, math.nan))[0]
        known = {
            n: own for n, own in finals.items() if math.isfinite(own[0]) and math.isfinite(base)
        }
        names = [VARIANTS[name] for name in known]
        sizes = [loss / base for loss, _ in known.values()]
        spreads = [0.0 if math.isnan(s) else s / base for _, s in known.values()]
        axes.barh(names, sizes, xerr=spreads, color=COLOURS[0], capsize=3)
        axes.axvline(1, color="grey", linestyle=":")
        axes.invert_yaxis()
        gone = ", ".join(VARIANTS[name] for name in finals if name not in known)
        title = f"{task}{'; diverged: ' + gone if gone else ''}"
        finish(axes, title, "final training loss over MKOR's", "")
    save_figure(path, figure)


STUDY = Study(
    name="ablation",
    description="the lemmas in numbers; stabiliser, rescaling, rules and precision taken away",
    request=small_request,
    pieces=pieces,
    report=report,
)
