"""What is said when a collective fails: on every worker that is left the same."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
Result = TypeVar("Result")

PURPOSE = ContextVar("purpose", default="exchange what a step needs")
"""What the collectives that run are for."""


@contextmanager
def during(purpose: str) -> Iterator[None]:
    """Name what collectives are for, as it goes on from "workers could not"; also a decorator."""
    token = PURPOSE.set(purpose)
    try:
        yield
    finally:
        PURPOSE.reset(token)


def guarded(collective: Callable[P, Result]) -> Callable[P, Result]:
    """A function that runs collectives, whose failure is told by their purpose.

    torch's own error tells of a connection or of a time limit, and is the cause.
    """

    @functools.wraps(collective)
    def call(*args: P.args, **kwargs: P.kwargs) -> Result:
        try:
            return collective(*args, **kwargs)
        except torch.OutOfMemoryError:
            raise  # this worker's own
        except RuntimeError as error:
            raise RuntimeError(
                f"workers could not {PURPOSE.get()}: at least one of them ended, failed, or did "
                "not come within the time limit of the process group. All workers must take the "
                "same steps. Look for the first error in the logs of the others and start all "
                "again from the last checkpoint; if one is only slow, pass a longer timeout to "
                "init_process_group"
            ) from error

    return call
