"""The table that a comparison ends with; what lost is told as it is."""

from __future__ import annotations

import math

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mkor_bench.optimizers import OPTIMIZERS, optimizer_row
from mkor_bench.summary import OptimizerResult, TaskResult
from mkor_bench.train import clock

EDGE_MARK = "†"
NONE = "–"
_MEASURED = ("steps to\ntarget", "seconds\nto it", "step\ntime")
_DROPPED_FIRST = (5, 6, 3, 4, 1)
"""The columns' numbers, the least important first."""


def task_table(result: TaskResult, width: int = 110) -> Table:
    """Makes the table of one task.

    Args:
        result: Every optimizer on the task.
        width: The width of the terminal, in characters. Columns are left out, from the
            least important on, until the numbers of the others fit into it.

    Returns:
        One row an optimizer, and what the rows mean below.
    """
    headings = ["optimizer", "lr", "final loss", result.task.metric, *_MEASURED]
    table = _make(result, headings, ())
    for count in range(len(_DROPPED_FIRST) + 1):
        if Console(width=1000).measure(table).maximum <= width:
            break
        table = _make(result, headings, _DROPPED_FIRST[:count], wraps=True)
    return table


def _make(
    result: TaskResult, headings: list[str], left_out: tuple[int, ...], *, wraps: bool = False
) -> Table:
    table = Table(
        title=_title(result),
        title_justify="left",
        caption=_caption(result, [headings[index] for index in left_out]),
        caption_justify="left",
        caption_style="",
        box=SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    best = min(result.optimizers, key=lambda r: r.final_loss[0])
    rows = [_cells(result, optimizer) for optimizer in result.optimizers]
    shown = [index for index in range(len(headings)) if index not in left_out]
    for index in shown:
        cells = [row[index] for row in rows]
        # Words stay whole; a learning rate and its mark stay together.
        parts = cells if index == 1 else " ".join([headings[index], *cells]).split()
        width = max(map(len, parts)) if wraps else None
        table.add_column(headings[index], justify="right" if index else "left", width=width)
    for optimizer, row in zip(result.optimizers, rows, strict=True):
        cells = [row[index] for index in shown]
        table.add_row(*cells, style="bold" if optimizer is best else "")
    return table


def number(value: float) -> str:
    """Writes a number to four significant digits, as people write it."""
    if not math.isfinite(value):
        return NONE
    if value != 0 and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.2e}"
    digits = 3 - math.floor(math.log10(abs(value))) if value else 3
    return f"{value:.{max(0, min(4, digits))}f}"


def _title(result: TaskResult) -> Text:
    seeds = max(len(optimizer.runs) for optimizer in result.optimizers)
    told = f"{result.steps} steps" + (f", {seeds} seed{'s'[: seeds - 1]}" if seeds else "")
    return Text(f"{result.task.name}: {result.task.description} ({told})", style="bold")


def _cells(of_task: TaskResult, result: OptimizerResult) -> list[str]:
    reached = of_task.reach(result)
    lr = NONE if result.lr is None else f"{result.lr:g}"
    return [
        result.optimizer,
        f"{lr} {EDGE_MARK}" if result.lr_at_edge else lr,
        _final_loss(result),
        _with_spread(result.metric),
        str(reached[0]) if reached else NONE,
        f"{reached[1]:.2f}" if reached else NONE,
        f"×{result.step_time_ratio:.2f}",
    ]


def _final_loss(result: OptimizerResult) -> str:
    diverged = sum(run.diverged for run in result.runs)
    if not result.runs:
        return "diverged"  # at every learning rate
    if diverged:
        return f"diverged ({diverged} of {len(result.runs)})"
    return _with_spread(result.final_loss)


def _with_spread(pair: tuple[float, float]) -> str:
    mean, spread = pair
    if not math.isfinite(mean):
        return NONE
    if not spread > 0:  # a single seed has none
        return number(mean)
    # As many decimals as give the spread two digits, and the mean no more than are certain.
    decimals = 1 - math.floor(math.log10(spread))
    if not 0 <= decimals <= 5:
        return f"{number(mean)}±{spread:.1e}"
    return f"{mean:.{decimals}f}±{spread:.{decimals}f}"


def _caption(result: TaskResult, left_out: list[str]) -> str:
    times = f"Seconds: {clock()[1]} of a run. Step time: relative to SGD, in interleaved turns."
    lines = [_conclusion(result), times]
    if any(optimizer.lr_at_edge for optimizer in result.optimizers):
        lines.append(
            f"{EDGE_MARK} at the edge of the grid: a wider --lrs might find a better learning rate."
        )
    if left_out:
        names = ", ".join(heading.replace("\n", " ") for heading in left_out)
        lines.append(f"Left out in this narrow terminal: {names}; see results.json.")
    return "\n".join(lines)


def _conclusion(result: TaskResult) -> str:
    target = result.target
    known = ", ".join(row.name for row in OPTIMIZERS.values() if row.first_order)
    if not any(optimizer_row(r.optimizer).first_order for r in result.optimizers):
        return f"No target: it takes a first-order optimizer ({known}) in --optimizers."
    if target is None:
        return f"No target: no first-order optimizer ({known}) came to an end."
    told = (
        f"Target: {number(target.final_loss[0])}, the best first-order loss ({target.optimizer})."
    )
    others = [(r, result.reach(r)) for r in result.optimizers if r is not target]
    faster = [(reached[0], reached[1], r) for r, reached in others if reached]
    own = result.reach(target)
    if not faster or own is None:
        return f"{told} No other optimizer reaches it."
    steps, seconds, first = min(faster, key=lambda reach: reach[0])
    return (
        f"{told} {first.optimizer} reaches it in {steps} of {result.steps} steps, "
        f"in {seconds:.2f} s where {target.optimizer} takes {own[1]:.2f} s."
    )
