"""Ctrl-C, or the end of a cluster job's time, between two steps and not within one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Turns the first SIGINT or SIGTERM into a question that can be asked after a step.

    The second one has its usual effect, for steps that never end.

    Yields:
        A function that tells whether to stop.
    """
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set  # Python lets no other thread handle signals
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def ask(number: int, frame: FrameType | None) -> None:
        asked.set()
        restore()

    for number in before:
        signal.signal(number, ask)
    try:
        yield asked.is_set
    finally:
        restore()
