"""Quantities and tables as text."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """Rows of text as lines whose columns are aligned, the first `left` of them to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            text.ljust(width) if place < left else text.rjust(width)
            for place, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def bytes_text(size: float) -> str:
    """Bytes in a unit that fits."""
    return with_unit(size, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def flops_text(count: float) -> str:
    """Operations in a unit that fits."""
    return with_unit(count, 1000, ("flop", "kflop", "Mflop", "Gflop", "Tflop", "Pflop"))


def with_unit(value: float, base: int, units: tuple[str, ...]) -> str:
    """A number with the largest unit that leaves it at least 1."""
    power = 0
    while value >= base and power < len(units) - 1:
        value, power = value / base, power + 1
    return f"{value:.0f} {units[0]}" if power == 0 else f"{value:.1f} {units[power]}"
