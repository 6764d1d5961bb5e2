"""Ctrl-C, or the end of a cluster job's time: SIGINT and SIGTERM have the same effect.

The command as a whole ends at once. Training ends between two steps, and a comparison
once its workers have ended; whoever cannot wait for that gives the signal again.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

INTERRUPTED = 130
"""The exit code that shells give for Ctrl-C."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def end_at_once() -> None:
    """Lets a signal end the process from now on, with a word and without clean-up.

    An exception would not do: modules that are being imported turn it into errors of
    their own.
    """

    def end(number: int, frame: FrameType | None) -> None:
        os.write(2, b"Interrupted.\n")
        os._exit(INTERRUPTED)

    for number in _SIGNALS:
        signal.signal(number, end)


def ignore() -> None:
    """Ignores signals from now on: an interrupted process that already ends needs no more."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def raises_interrupt() -> Iterator[None]:
    """Lets the first signal raise KeyboardInterrupt, and the second do what it did before."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        restore()
        raise KeyboardInterrupt

    with _handling(interrupt) as restore:
        yield


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Turns the first signal into a question that can be asked after a step.

    The second one does what it did before, for steps that never end.

    Yields:
        A function that tells whether to stop.
    """
    asked = threading.Event()

    def ask(number: int, frame: FrameType | None) -> None:
        asked.set()
        restore()

    with _handling(ask) as restore:
        yield asked.is_set


@contextmanager
def _handling(handler: Callable[[int, FrameType | None], Any]) -> Iterator[Callable[[], None]]:
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None  # Python lets no other thread handle signals
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}

    def restore() -> None:
        for number, old in before.items():
            signal.signal(number, old)

    for number in _SIGNALS:
        signal.signal(number, handler)
    try:
        yield restore
    finally:
        restore()
