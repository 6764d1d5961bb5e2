"""``curves.png``: the training loss by step and by second, one row a task."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mkor_bench.optimizers import optimizer_row
from mkor_bench.report.chart import COLOURS, new_figure, save_figure
from mkor_bench.report.table import number
from mkor_bench.summary import OptimizerResult, TaskResult, mean_curve, smooth, window
from mkor_bench.train import clock

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FILE_NAME = "curves.png"


def write_curves(folder: Path, results: Sequence[TaskResult]) -> None:
    """Writes ``curves.png``.

    Args:
        folder: The output folder.
        results: One result a task.
    """
    figure, grid = new_figure(len(results), 2, share="row")
    for (by_step, by_second), result in zip(grid, results, strict=True):
        _draw(by_step, result, by_second=False)
        _draw(by_second, result, by_second=True)
        if by_step.get_legend_handles_labels()[0]:  # else every optimizer diverged
            by_step.legend(fontsize=9, loc="upper right")
    save_figure(folder / FILE_NAME, figure)


def _draw(axes: Axes, result: TaskResult, *, by_second: bool) -> None:
    lows, highs = [], []
    for place, optimizer in enumerate(result.optimizers):
        if optimizer.runs and min(run.step for run in optimizer.runs) > 1:
            colour = COLOURS[place % len(COLOURS)]
            low, high = _draw_optimizer(axes, optimizer, colour, by_second=by_second)
            lows.append(low)
            highs.append(high)
    if result.target is not None:
        # Named in the legend: beside the line, its name would lie under the curves.
        loss = result.target.final_loss[0]
        label = f"best first-order: {number(loss)}"
        axes.axhline(loss, color="grey", linestyle=":", linewidth=1.2, zorder=0, label=label)
    axes.set_title(f"{result.task.name}, loss by {'second' if by_second else 'step'}")
    axes.set_xlabel(f"training time of a run ({clock()[1]}, s)" if by_second else "step")
    axes.set_xlim(left=0)
    if not by_second:
        axes.set_ylabel(f"training loss (mean of {window(result.steps)} steps)")
    axes.grid(alpha=0.25)
    _limit(axes, lows, highs)


def _draw_optimizer(
    axes: Axes, result: OptimizerResult, colour: str, *, by_second: bool
) -> tuple[float, float]:
    """Draws the mean over seeds in a band from the lowest seed to the highest."""
    width = window(result.runs[0].settings.steps)
    steps = min(run.step for run in result.runs)
    curves = np.array([smooth(run.losses, width)[:steps] for run in result.runs])
    # The first means have too few values in them to be shown.
    shown = slice(min(width, steps) - 1, None)
    seconds = mean_curve([run.seconds for run in result.runs])
    x = np.array(seconds) if by_second else np.arange(1, steps + 1)
    style = "--" if optimizer_row(result.optimizer).first_order else "-"
    mean = curves.mean(axis=0)
    label = f"{result.optimizer} (lr {result.runs[0].settings.lr:g})"
    axes.plot(x[shown], mean[shown], color=colour, linestyle=style, linewidth=1.8, label=label)
    band = (curves.min(axis=0)[shown], curves.max(axis=0)[shown])
    axes.fill_between(x[shown], *band, color=colour, alpha=0.18, linewidth=0)
    # What an optimizer does after its first tenth decides the range of the axis, and
    # nothing above the loss that it began with.
    settled = mean[max(width - 1, steps // 10) :]
    finite = settled[np.isfinite(settled)]
    if not len(finite):
        return np.nan, np.nan
    first = np.mean([run.losses[0] for run in result.runs])
    return float(finite.min()), float(min(finite.max(), first))


def _limit(axes: Axes, lows: list[float], highs: list[float]) -> None:
    lows, highs = [x for x in lows if np.isfinite(x)], [x for x in highs if np.isfinite(x)]
    if not lows:
        return
    low, high = min(lows), max(highs)
    if low > 0 and high > 3 * low:
        axes.set_yscale("log")
        axes.set_ylim(low / 1.3, high * 1.3)
    elif high > low:
        axes.set_ylim(low - 0.06 * (high - low), high + 0.06 * (high - low))
