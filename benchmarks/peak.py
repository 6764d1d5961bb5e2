"""The largest resident size of a process."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any


def resident_bytes(work: Callable[..., Any], *arguments: Any) -> int:
    """The largest resident size of a new process that does some work, the interpreter's included.

    Args:
        work: At the top of a module.
        arguments: Anything that pickles.
    """
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply(largest_resident, (work, arguments))


def largest_resident(work: Callable[..., Any], arguments: tuple[Any, ...]) -> int:
    """Do the work; the largest resident size of this process so far, in bytes."""
    work(*arguments)
    # Not ru_maxrss, which a new process takes over from the one that started it.
    status = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
