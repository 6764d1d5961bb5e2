"""Figures: how every chart of the command is made and written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkor_bench.errors import UserError
from mkor_bench.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which people with any colour vision can tell apart.
COLOURS = (
    *("#56B4E9", "#E69F00", "#F0E442", "#0072B2", "#D55E00", "#009E73"),
    *("#CC79A7", "#000000", "#999999", "#882255", "#44AA99", "#332288", "#AA4499", "#117733"),
)
MARKS = "os^vDPX*<>hpd8"
"""Beside the colours, for those who print in grey."""


def new_figure(
    rows: int, columns: int, *, width: float = 5.5, height: float = 4.2, share: str | bool = False
) -> tuple[Figure, Any]:
    """Makes a figure of charts.

    Args:
        rows: How many below each other.
        columns: How many beside each other.
        width: Of a chart, in inches.
        height: Of a chart, in inches.
        share: Which charts share the axis of y, as matplotlib's ``sharey``.

    Returns:
        The figure, and its axes as an array [rows, columns].
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # No pyplot: it would choose a backend and keep global state.
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False, sharey=share)


def check_figure(path: Path) -> None:
    """Checks that a figure can be written under a name, before anything is computed for it.

    Args:
        path: The file.

    Raises:
        UserError: Its ending names no format of figures.
    """
    from matplotlib.backend_bases import FigureCanvasBase

    if path.suffix.removeprefix(".").lower() not in FigureCanvasBase.get_supported_filetypes():
        raise UserError(
            f"--output {str(path)!r} names no format of figures: give a file such as scaling.png, "
            ".svg or .pdf."
        )


def save_figure(path: Path, figure: Figure) -> None:
    """Writes a figure.

    Args:
        path: The file.
        figure: What :func:`new_figure` made.
    """
    write_atomically(path, lambda temporary: figure.savefig(temporary, dpi=130))


def finish(axes: Axes, title: str, x: str, y: str, *, legend: bool = True) -> None:
    """Names a chart and its axes.

    Args:
        axes: The chart.
        title: Above it.
        x: What the axis of x shows, with its unit.
        y: What the axis of y shows, with its unit.
        legend: Whether to explain the colours, where anything has a label.
    """
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.25, which="both")
    if legend and axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=7.5)


def name_beside(figure: Figure, axes: Axes) -> None:
    """Explains the colours of one chart for all charts of a figure, beside them.

    Args:
        figure: What :func:`new_figure` made.
        axes: The chart.
    """
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside right upper", fontsize=8)


def draw_lines(axes: Axes, curves: Iterable[tuple[str, Sequence[float], Sequence[float]]]) -> None:
    """Draws curves with marks, each in a colour of its own.

    Args:
        axes: The chart.
        curves: The label, x and y of each.
    """
    for place, (label, x, y) in enumerate(curves):
        style = {"color": COLOURS[place % len(COLOURS)], "marker": MARKS[place % len(MARKS)]}
        axes.plot(x, y, label=label, markersize=4, linewidth=1.5, **style)


def draw_stacks(
    axes: Axes, names: Sequence[str], parts: Iterable[tuple[str, Sequence[float]]]
) -> None:
    """Draws a horizontal bar for each name, made of parts.

    Args:
        axes: The chart.
        names: From top to bottom.
        parts: The label of each part, and its length in each bar.
    """
    ends = [0.0] * len(names)
    for place, (label, lengths) in enumerate(parts):
        axes.barh(names, lengths, left=ends, label=label, color=COLOURS[place % len(COLOURS)])
        ends = [end + length for end, length in zip(ends, lengths, strict=True)]
    axes.invert_yaxis()
